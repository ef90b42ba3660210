"""What capplan knows: rows for `capplan list`, one record for `capplan show`."""

from typing import Any

from capplan import catalog, model_source
from capplan.errors import InputError, did_you_mean, shown
from capplan.kv import KvLayout, kv_layout
from capplan.specs import Format, Gpu, LayerGroup, Model
from capplan.units import GB, GIB, TERA
from capplan.weights import tower_bytes, weight_budget


def rows(kind: str) -> list[dict[str, Any]]:
    """One row a thing, sorted by id."""
    made = {
        "models": _model_row,
        "gpus": lambda identity: _gpu_row(catalog.load_gpu(identity)),
        "formats": lambda identity: _format_row(catalog.load_format(identity)),
        "architectures": _architecture_row,
    }[kind]
    return [made(identity) for identity in catalog.ids(kind)]


def _model_row(identity: str) -> dict[str, Any]:
    data = catalog.read_yaml(catalog.PROFILES / "models" / f"{identity}.yaml")
    model = catalog.load_model(identity)
    layout = kv_layout(model, kv_bits=16)
    return {
        "id": identity,
        "name": model.name,
        "size": data.get("size_alias"),
        "parameters": model.parameters,
        "kv_bytes_per_token": round(layout.bytes_per_token),
        "context": model.max_context,
        "read_on": model.read_on,
    }


def _gpu_row(gpu: Gpu) -> dict[str, Any]:
    bf16 = gpu.flop_per_s.get("bf16") or gpu.flop_per_s.get("fp16")
    return {
        "id": gpu.id,
        "memory_gib": round(gpu.usable_bytes / GIB, 2),
        "gb_per_s": round(gpu.memory_bandwidth_bytes_per_s / GB),
        "bf16_tflops": round(bf16 / TERA, 1) if bf16 else None,
        "tdp_w": gpu.tdp_w and round(gpu.tdp_w),
        "read_on": gpu.read_on,
    }


def _format_row(stored: Format) -> dict[str, Any]:
    return {
        "id": stored.id,
        "bits": stored.element_bits,
        "effective_bits": stored.effective_bits,
        "applies_to": "linear layers" if stored.quantizes == "linear" else "all tensors",
        "kv": "yes" if stored.kv else "",
        "name": stored.name,
    }


def _architecture_row(identity: str) -> dict[str, Any]:
    arch = catalog.load_architecture(identity)
    return {
        "id": arch.id,
        "also": ", ".join(arch.aliases),
        "source": arch.source,
        "read_on": arch.read_on,
    }


def find(name: str, *, online: bool = False) -> dict[str, Any]:
    """The thing a name means: a path, model, GPU or format, and `online` a hub id.

    Raises InputError when it is none of them; see model_source.load for what the network adds.
    """
    if model_source.model_path(name) is not None:
        return show_model(model_source.load(name), {})
    key = catalog.normalised(name)
    found = {kind: catalog.index(kind).get(key) for kind in ("models", "gpus", "formats")}
    if found["models"] is not None:
        stem = found["models"].partition("#")[0]
        data = catalog.read_yaml(catalog.PROFILES / "models" / f"{stem}.yaml")
        return show_model(catalog.load_model(found["models"]), data)
    if found["gpus"] is not None:
        return show_gpu(catalog.load_gpu(found["gpus"]))
    if found["formats"] is not None:
        return show_format(catalog.load_format(found["formats"]))
    if online or model_source.is_hub_id(name):
        return show_model(model_source.load(name, online=online), {})
    known = [identity for kind in found for identity in catalog.ids(kind)]
    raise InputError(
        f"nothing is called {shown(name)}",
        where="capplan show",
        hint=did_you_mean(name, known, "`capplan list models|gpus|formats` shows what is known"),
    )


def show_model(model: Model, data: Any) -> dict[str, Any]:
    """Layers by kind, parameters by role, cache and state, checkpoints."""
    budget = weight_budget(model, None)
    layout = kv_layout(model, kv_bits=16)
    active = sum(
        tensor.elements * tensor.active_copies * len(group.indices)
        for group in model.groups
        for tensor in group.layer.tensors()
    ) + sum(tensor.parameters for tensor in model.outside)
    return {
        "schema": "capplan.show.model/1",
        "name": model.name,
        "architecture": model.architecture,
        "parameters": budget.parameters,
        "active_parameters": round(active),
        "layers": model.layers or None,
        "hidden": model.hidden if model.groups else None,
        "vocab": model.vocab if model.groups else None,
        "max_context": model.max_context,
        "tied_embeddings": model.tied,
        "stored_bytes": budget.bytes,
        "stored_formats": list(budget.formats) or ["16-bit"],
        "weight_files": model.stored.files if model.stored else None,
        "kv_scheme": model.quantization.kv_format if model.quantization else None,
        "kv_bytes_per_token_16_bit": round(layout.bytes_per_token),
        "state_bytes_per_sequence": layout.state_bytes,
        "layer_groups": [_group_row(group) for group in model.groups],
        "parameters_by_role": [
            {"role": part.role, "parameters": part.parameters, "stored_bytes": part.bytes}
            for part in budget.roles
        ],
        "cache_by_kind": _cache_rows(layout),
        "beside_the_decoder": [
            {
                "part": tower.name,
                "parameters": tower.parameters,
                "bytes": tower_bytes(model)[tower.name],
                "exact": "yes" if tower.exact or model.stored else "estimate",
            }
            for tower in model.towers
        ],
        "aliases": [str(alias) for alias in data.get("aliases", ())],
        "checkpoints": [str(entry["name"]) for entry in data.get("checkpoints", ())],
        "assumptions": list(model.assumptions),
        "ignored_keys": list(model.ignored_keys),
        "source": model.source,
        "read_on": model.read_on,
    }


def _group_row(group: LayerGroup) -> dict[str, Any]:
    layer = group.layer
    cache = ", ".join(cache.kind + (f" {cache.window:,}" if cache.window else "") for cache in layer.caches())
    return {
        "layers": len(group.indices),
        "first": group.indices[0],
        "blocks": " + ".join(block.kind for block in layer.blocks),
        "keeps": cache or "nothing",
        "parameters_each": sum(tensor.parameters for tensor in layer.tensors()),
    }


def _cache_rows(layout: KvLayout) -> list[dict[str, Any]]:
    return [
        {
            "kind": group.kind,
            "layers": group.layers,
            "window": group.window,
            "bytes_per_token": round(group.entry_bytes / group.stride) or None,
            "bytes_per_sequence": group.state_bytes or None,
        }
        for group in layout.groups
    ]


def show_gpu(gpu: Gpu) -> dict[str, Any]:
    """Facts of one accelerator with source and date."""
    return {
        "schema": "capplan.show.gpu/1",
        "name": gpu.name,
        "id": gpu.id,
        "vendor": gpu.vendor,
        "architecture": gpu.architecture,
        "compute_capability": gpu.compute_capability,
        "memory_type": gpu.memory_type,
        "memory_bytes_as_sold": gpu.memory_bytes,
        "memory_bytes_driver": gpu.memory_driver_bytes,
        "memory_reading": gpu.memory_reading,
        "memory_bandwidth_bytes_per_s": round(gpu.memory_bandwidth_bytes_per_s),
        "dense_flop_per_s": {name: round(value) for name, value in gpu.flop_per_s.items()},
        "l2_bytes": gpu.l2_bytes,
        "sm_count": gpu.sm_count,
        "boost_clock_hz": gpu.boost_clock_hz and round(gpu.boost_clock_hz),
        "tdp_w": gpu.tdp_w,
        "nvlink_bytes_per_s": gpu.nvlink_bytes_per_s and round(gpu.nvlink_bytes_per_s),
        "pcie_gen": gpu.pcie_gen,
        "pcie_lanes": gpu.pcie_lanes,
        "max_gpus_per_node": gpu.max_gpus_per_node,
        "scaleup_domain": gpu.scaleup_domain,
        "aliases": list(gpu.aliases),
        "ambiguous_aliases": dict(gpu.ambiguous_aliases),
        "unverified": list(gpu.unverified),
        "conflicts": list(gpu.conflicts),
        "notes": gpu.notes,
        "source": gpu.source,
        "read_on": gpu.read_on,
    }


def show_format(stored: Format) -> dict[str, Any]:
    """One weight or KV format."""
    return {
        "schema": "capplan.show.format/1",
        "name": stored.name,
        "id": stored.id,
        "element_bits": stored.element_bits,
        "effective_bits": stored.effective_bits,
        "scales": stored.group_shape,
        "group": stored.group if stored.group > 1 else None,
        "scale_bits": stored.scale_bits or None,
        "zero_bits": stored.zero_bits or None,
        "activation_bits": stored.activation_bits,
        "applies_to": "linear layers" if stored.quantizes == "linear" else "all tensors",
        "keeps_at_16_bits": list(stored.keeps),
        "mix": [
            {
                "tensor": rule.tensor,
                "type": rule.stored.id,
                "layers": rule.layers,
                "experts": rule.experts or (f"{rule.min_experts}+" if rule.min_experts else None),
                "layer_count": rule.layer_count,
                "heads_per_kv_head": f"{rule.min_gqa}+" if rule.min_gqa else None,
            }
            for rule in stored.rules
        ],
        "kv_cache": "yes" if stored.kv else "no",
        "aliases": list(stored.aliases),
        "notes": stored.notes,
        "source": stored.source,
        "read_on": stored.read_on,
    }
