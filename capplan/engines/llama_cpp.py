"""llama.cpp's memory: what llama-server allocates on one GPU and in host memory, and whether it will start.

llama.cpp has no memory fraction: it allocates the weights of the layers on the GPU, the whole cache of its
context and a compute buffer, and fails where one of them does not fit. The buffers are llama_cpp_buffers';
the defaults and the compute rule of a build are in profiles/engines/llama-cpp.yaml.
`EngineFlags.max_model_len` is the context of one request (--ctx-size is that × --parallel, unless the cache
is unified), `max_num_batched_tokens` is --batch-size and --ubatch-size, and tp × pp GPUs share the layers.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from capplan import catalog
from capplan.engines import llama_cpp_buffers as buffers
from capplan.engines.plan import Advice, Band, EngineFlags, EnginePlan, Flag, Rule
from capplan.engines.token_pool import UNKNOWN
from capplan.engines.vllm_terms import visible_bytes
from capplan.errors import InputError, shown
from capplan.specs import Format, Gpu, Model
from capplan.units import MIB

NEWEST: Final = 1 << 30
"""Stands for the newest build known."""
_LONGEST: Final = 1 << 30


@cache
def _profile() -> Mapping[str, Any]:
    return catalog.read_yaml(catalog.PROFILES / "engines" / "llama-cpp.yaml")


def build_number(version: str | None) -> int:
    """The build a version names: b9272, 9272 or "9272 (1d7ab2b94)"; NEWEST for None and "unknown".

    Raises InputError for another text.
    """
    if version is None or version == UNKNOWN:
        return NEWEST
    found = re.fullmatch(r"b?(\d{1,7})(\s*\(.*\))?", version.strip(), re.ASCII)
    if found is None:
        raise InputError(
            f"{shown(version)} is no llama.cpp build",
            where="--engine-version",
            hint="a build number such as b9272",
        )
    return int(found.group(1))


def default_slots(version: str | None) -> int:
    """Slots of a build where --parallel is left out. Raises as build_number."""
    defaults: Mapping[str, int] = _profile()["defaults"]["auto_slots"]
    return defaults["slots"] if build_number(version) >= defaults["since"] else 1


def compute_rule(build: int) -> tuple[buffers.ComputeRule, Rule]:
    """How `build` lays out its compute buffer, with what that was verified on."""
    entry = [entry for entry in _profile()["compute"] if entry["since"] <= build][-1]
    rule = buffers.ComputeRule(
        **{key: value for key, value in entry.items() if key not in ("since", "verified", "source")}
    )
    return rule, Rule(
        rule="the compute buffer is the largest of FFN, attention scores and logits of one micro-batch",
        verified=str(entry["verified"]),
        source=str(entry["source"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """A server asked for: the model's buffers as functions of context and layers."""

    model: Model
    weights: buffers.LayerWeights
    size: buffers.Widths
    rule: buffers.ComputeRule
    devices: int
    ubatch: int
    kv_bits: float
    extra: int

    def placement(self, gpu_layers: int) -> buffers.Placement:
        """Which GPU has which layers; every GPU the same share."""
        return buffers.place_layers(self.model.layers, gpu_layers, (1.0,) * self.devices)

    def loads(self, context: buffers.Context, gpu_layers: int) -> list[dict[str, int]]:
        """Terms of every GPU; the last entry is the host's."""
        place = self.placement(gpu_layers)
        ubatch = min(self.ubatch, context.total_cells)
        kv, state = buffers.layer_cache_bytes(self.model, context, kv_bits=self.kv_bits, ubatch=ubatch)
        pipelined = self.devices > 1 and gpu_layers > self.model.layers
        made = []
        for number, layers in enumerate(place.gpus):
            has_output = place.output_on == number
            made.append(
                {
                    "weights": sum(self.weights.layers[index] for index in layers)
                    + (self.weights.output if has_output else 0),
                    "extra": self.extra if number == 0 else 0,
                    "kv_cache": sum(kv[index] for index in layers),
                    "states": sum(state[index] for index in layers),
                    "compute": buffers.compute_bytes(
                        self.size,
                        self.rule,
                        cells=context.cells,
                        ubatch=ubatch,
                        sequences=context.sequences,
                        pipelined=pipelined,
                        has_output=has_output,
                    )
                    if layers or has_output
                    else 0,
                }
            )
        host = {
            "weights": self.weights.embedding
            + sum(self.weights.layers[index] for index in place.host)
            + (self.weights.output if place.output_on is None else 0),
            "kv_cache": sum(kv[index] for index in place.host),
            "states": sum(state[index] for index in place.host),
            "compute": buffers.host_compute_bytes(
                self.size, self.rule, cells=context.cells, ubatch=ubatch, pipelined=pipelined
            ),
        }
        return [*made, host]

    def peak(self, context: buffers.Context, gpu_layers: int) -> int:
        """What the fullest GPU holds."""
        return max(sum(load.values()) for load in self.loads(context, gpu_layers)[:-1])


def plan(
    model: Model,
    *,
    weights_bytes: int,
    extra_bytes: int = 0,
    total_bytes: int,
    gpu: Gpu | None = None,
    flags: EngineFlags,
    precision: Format | None = None,
) -> EnginePlan:
    """What llama-server makes of `total_bytes` on each GPU; see the module.

    `precision` makes the split of the weights over layers exact; without it, and without a GGUF that was
    read, `weights_bytes` are shared out by parameters.
    Errors: InputError for a version that is no build, too many GPUs, negative --gpu-layers.
    Example: Llama-3-8B Q4_K_M, 8192 tokens, b2843: 4403.49 MiB of weights, 1024 of KV, 560 of compute.
    """
    build = build_number(flags.version)
    total_bytes = visible_bytes(total_bytes)
    devices = flags.tp * flags.pp
    if devices > model.layers + 1:
        raise InputError(
            f"{model.layers} layers and the output cannot be shared by {devices} GPUs",
            where="--tp, --pp",
            hint=f"at most {model.layers + 1}",
        )
    if flags.gpu_layers is not None and flags.gpu_layers < 0:
        raise InputError(f"{flags.gpu_layers} layers", where="--gpu-layers", hint=f"0 to {model.layers + 1}")
    rule, compute = compute_rule(build)
    defaults = _profile()["defaults"]
    server = _Server(
        model=model,
        weights=buffers.layer_weights(model, weights_bytes=weights_bytes * devices, precision=precision),
        size=buffers.widths(model),
        rule=rule,
        devices=devices,
        ubatch=flags.max_num_batched_tokens or defaults["ubatch"],
        kv_bits=flags.kv_bits,
        extra=extra_bytes,
    )
    sequences = flags.max_num_seqs or default_slots(flags.version)
    unified = flags.max_num_seqs is None and build >= defaults["auto_slots"]["since"]
    fits_itself = build >= defaults["fit"]["since"]
    margin = defaults["fit"]["margin_mib"] * MIB
    tokens = flags.max_model_len or model.max_context or defaults["fit"]["smallest_context"]
    gpu_layers = model.layers + 1 if flags.gpu_layers is None else min(flags.gpu_layers, model.layers + 1)
    sources = {"context": "asked" if flags.max_model_len else "the model's own longest"}
    sources["layers"] = "asked" if flags.gpu_layers is not None else "default: all"

    def made(length: int, count: int = sequences) -> buffers.Context:
        return buffers.cache_context(
            n_ctx=length if unified or not flags.max_model_len else length * count,
            sequences=count,
            unified=unified,
        )

    room = total_bytes - margin
    if fits_itself and server.peak(made(tokens), gpu_layers) > room:
        if flags.max_model_len is None:
            smallest = min(tokens, defaults["fit"]["smallest_context"])
            found = _largest(lambda length: server.peak(made(length), gpu_layers) <= room, smallest, tokens)
            tokens = found or smallest
            sources["context"] = "--fit, to leave the margin free"
        if flags.gpu_layers is None and server.peak(made(tokens), gpu_layers) > room:
            gpu_layers = _largest(lambda n: server.peak(made(tokens), n) <= room, 1, gpu_layers) or 0
            sources["layers"] = "--fit, to leave the margin free"
    context = made(tokens)
    loads = server.loads(context, gpu_layers)
    worst = max(loads[:-1], key=lambda load: sum(load.values()))
    used = sum(worst.values())
    starts = True if used <= room else (False if used > total_bytes else None)
    longest = _largest(
        lambda length: server.peak(made(length), gpu_layers) <= room,
        1,
        max(tokens, model.max_context or _LONGEST),
    )
    safe = _largest(lambda count: server.peak(made(tokens, count), gpu_layers) <= room, 1, 4096)
    terms = {
        "total": total_bytes,
        "budget": total_bytes,
        "weights": worst["weights"],
        "extra": worst["extra"],
        "kv_cache": worst["kv_cache"] + worst["states"],
        "compute": worst["compute"],
    }
    terms.update({f"host_{key}_outside": value for key, value in loads[-1].items()})
    pool = terms["kv_cache"]
    return EnginePlan(
        engine="llama.cpp",
        version=flags.version or "newest",
        flags=(
            Flag(name="ctx_size", value=context.total_cells, source=sources["context"]),
            Flag(name="parallel", value=sequences, source="asked" if flags.max_num_seqs else "default"),
            Flag(name="kv_unified", value=unified, source="default"),
            Flag(
                name="batch_size",
                value=flags.max_num_batched_tokens or defaults["batch"],
                source="asked" if flags.max_num_batched_tokens else "default",
            ),
            Flag(
                name="ubatch_size",
                value=server.ubatch,
                source="asked" if flags.max_num_batched_tokens else "default",
            ),
            Flag(name="gpu_layers", value=gpu_layers, source=sources["layers"]),
            Flag(name="flash_attn", value=rule.flash_attention, source="default of the build"),
        ),
        terms=terms,
        kv_pool=Band(value=pool, low=pool, high=pool),
        kv_tokens=context.total_cells,
        max_concurrency=context.total_cells / min(tokens, context.tokens),
        starts=starts,
        reason=None if starts is not False else _reason(worst, total_bytes),
        longest_model_len=longest if gpu_layers else None,
        safe_max_num_seqs=safe if not unified else sequences if starts else None,
        advice=() if starts else _advice(server, made, tokens, room, longest),
        rules=(*(Rule(**entry) for entry in _profile()["rules"]), compute),
        notes=_notes(server, context, flags, build, compute),
        more={
            "gpus": [
                {"layers": len(layers), "first_layer": layers[0] if layers else None, **load}
                for layers, load in zip(server.placement(gpu_layers).gpus, loads[:-1], strict=True)
            ],
            "host": dict(loads[-1]),
            "fullest": loads.index(worst),
        },
    )


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest number from `low` to `high` that fits, where more never fits if less does not."""
    if not fits(low):
        return None
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _reason(load: Mapping[str, int], total: int) -> str:
    """Which allocation fails: llama.cpp makes them in the order weights, cache, compute."""
    held = 0
    for name, what in (
        ("weights", "the model"),
        ("extra", "what is loaded beside it"),
        ("kv_cache", "the KV cache"),
        ("states", "the recurrent states"),
        ("compute", "the compute buffers"),
    ):
        held += load[name]
        if held > total:
            return f"unable to allocate {load[name] / MIB:,.2f} MiB for {what}: {held / MIB:,.2f} MiB needed"
    return "unable to allocate a buffer"


def _advice(
    server: _Server, made: Callable[[int], buffers.Context], tokens: int, room: int, longest: int | None
) -> tuple[Advice, ...]:
    advice = []
    layers = _largest(lambda n: server.peak(made(tokens), n) <= room, 1, server.model.layers + 1)
    if layers is not None and layers <= server.model.layers:
        advice.append(
            Advice(
                change=f"{layers} of {server.model.layers + 1} layers fit; the rest is computed by the CPU",
                flag=f"--gpu-layers {layers}",
            )
        )
    if longest is not None and longest < tokens:
        advice.append(
            Advice(change=f"{longest:,} tokens a request fit with these layers", flag=f"--ctx-size {longest}")
        )
    if server.kv_bits > 8:
        advice.append(
            Advice(change="a q8_0 cache takes 17/32 of f16", flag="--cache-type-k q8_0 --cache-type-v q8_0")
        )
    return tuple(advice)


def _notes(
    server: _Server, context: buffers.Context, flags: EngineFlags, build: int, compute: Rule
) -> tuple[str, ...]:
    notes = [
        f"the compute buffer rule was measured on {compute.verified}; the CUDA context is not counted: "
        "within 1 GiB of the total the answer is open"
    ]
    if context.unified and context.sequences > 1:
        notes.append(
            f"{context.sequences} slots share {context.total_cells:,} cells: each may use all of them, so "
            f"{context.sequences} full requests ask for {context.sequences} times what is there"
        )
    if flags.max_model_len is None:
        notes.append("the context comes from the model, not from the work: give one with --max-model-len")
    if server.devices > 1:
        notes.append(f"{server.devices} GPUs share the layers; llama.cpp does not cut heads by default")
    if flags.enforce_eager or flags.gpu_memory_utilization is not None:
        notes.append("llama.cpp has no memory fraction and no eager mode: those flags have no effect")
    if server.size.latent:
        notes.append("the compute buffer of latent attention was not measured on this engine")
    return tuple(notes)
