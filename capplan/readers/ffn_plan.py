"""Which layers route to experts, from what the config says about its layers."""

from typing import Final, TypeVar

from capplan.errors import shown
from capplan.readers.config_keys import Keys
from capplan.readers.decoder_keys import EXPERT_COUNTS

_T = TypeVar("_T")
MAX_INDEX: Final = 1 << 20
# Keys that mean something only where layers route to experts.
MOE_RULES: Final = (
    "decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace", "moe_layer_freq",
    "expert_layer_period", "expert_layer_offset", "num_experts_per_tok", "moe_topk",
    "moe_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts",
    "num_shared_experts", "num_shared_expert", "moe_layer_start_index", "moe_k",
    "moe_layer_end_index", "moe_layer_interval", "moe_num_shared_experts",
    "interleave_moe_layer_step", "mlp_layer_types", "use_mixed_mlp_moe", "top_k_experts",
    "n_group", "topk_group", "topk_method", "scoring_func", "routed_scaling_factor",
)  # fmt: skip
# Names of kernels, which dense files of some tools carry too.
_NO_RULES: Final = frozenset(("experts_implementation", "moe_implementation", "use_mixed_mlp_moe"))


def fitted(keys: Keys, name: str, values: list[_T], layers: int) -> list[_T]:
    """`values` cut to one per layer; entries past the decoder's layers belong to its MTP layers."""
    if layers <= len(values) <= layers + 8:
        return values[:layers]
    raise keys.fail(name, f"has {len(values)} entries for {layers} layers", "give one entry for each layer")


def feed_forwards(keys: Keys, layers: int) -> list[str | None]:
    """The feed-forward of every layer.

    Only a stated count of none or one expert (or `enable_moe_block: false`) makes every layer dense; a file
    that routes without saying how many experts it has is refused.
    """
    name = keys.present(*EXPERT_COUNTS)
    experts: int | None = None
    if name is not None and isinstance(keys.value(name), list):
        experts = max(keys.integers(name) or [0], default=0)
    elif name is not None:
        experts = keys.optional_integer(name, low=0)
    if not keys.flag("enable_moe_block", default=True):
        experts = None
    elif not any(known in keys.data or known in keys.defaults for known in EXPERT_COUNTS):
        _refuse_routing(keys)
    # One expert takes every token: the classes build a dense layer then.
    if not experts or experts == 1:
        _forget_moe_rules(keys)
        return ["dense"] * layers
    return ["moe" if sparse else "dense" for sparse in _sparse_layers(keys, layers)]


def _refuse_routing(keys: Keys) -> None:
    """Refuse a file without an expert count where any of its keys, or its class's, routes to experts."""
    for key, value in (*keys.defaults.items(), *keys.data.items()):
        routes = key in MOE_RULES or "expert" in key or key.startswith("moe_")
        kinds = set(map(str, value)) if isinstance(value, list) and key != "mlp_only_layers" else {"x"}
        off = not value or not kinds - {"dense", "0"}
        if routes and not off and key not in _NO_RULES:
            raise keys.fail(
                EXPERT_COUNTS[0],
                f"missing, but {key} {shown(value, 40)} routes to experts",
                "add the number of experts, or null where every layer is dense",
            )


def _forget_moe_rules(keys: Keys) -> None:
    keys.used.update(MOE_RULES)


def _sparse_layers(keys: Keys, layers: int) -> list[bool]:
    """Which layers route to experts."""
    types = keys.texts("mlp_layer_types")
    dense_first = keys.optional_integer("first_k_dense_replace", "num_dense_layers", low=0)
    frequency = keys.present("moe_layer_freq")
    if types is not None:
        keys.used.add("moe_layer_freq")
        for kind in types:
            if kind not in ("dense", "sparse"):
                raise keys.fail("mlp_layer_types", f"unknown kind {shown(kind)}", "dense or sparse")
        return [kind == "sparse" for kind in fitted(keys, "mlp_layer_types", types, layers)]
    if frequency is not None and isinstance(keys.data.get("moe_layer_freq"), list):
        flags = keys.integers("moe_layer_freq", low=0, high=1) or []
        return [bool(flag) for flag in fitted(keys, "moe_layer_freq", flags, layers)]
    listed = keys.text("moe_layers_enum")
    if listed is not None:
        return _enumerated(keys, listed, layers)
    if keys.present("moe_layers") is not None:
        chosen = keys.integers("moe_layers", high=layers - 1) or []
        return [layer in chosen for layer in range(layers)]
    every = keys.integer(
        "decoder_sparse_step",
        "interleave_moe_layer_step",
        "moe_layer_freq",
        "expert_layer_period",
        "moe_layer_interval",
        "moe_layer_frequency",
        default=1,
        low=0,
    )
    if every == 0:
        return [False] * layers
    only_dense = set(keys.integers("mlp_only_layers", high=MAX_INDEX) or [])
    offset = keys.optional_integer("expert_layer_offset", low=0)
    # Ernie-VL gives one range a modality; its published files give the same start for all.
    start = keys.per_layer(0, "moe_layer_start_index", default=0, low=0)
    end = keys.per_layer(0, "moe_layer_end_index", default=-1, low=-1)
    last = layers - 1 if end < 0 else end

    def sparse(layer: int) -> bool:
        if layer in only_dense or layer < (dense_first or 0) or not start <= layer <= last:
            return False
        if offset is not None:
            return layer % every == offset
        if dense_first is not None:
            # DeepSeek counts from layer 0, the interleaved families from layer 1.
            return layer % every == 0
        return (layer + 1) % every == 0

    return [sparse(layer) for layer in range(layers)]


def _enumerated(keys: Keys, listed: str, layers: int) -> list[bool]:
    """Step-3's comma-separated layer numbers."""
    numbers = [part.strip() for part in listed.split(",")] if len(listed) < 1 << 16 else [""]
    if not all(part.isascii() and part.isdigit() and len(part) < 6 for part in numbers):
        raise keys.fail("moe_layers_enum", f"{shown(listed)} is no list of layers", "4,5,6…")
    chosen = {int(part) for part in numbers}
    return [layer in chosen for layer in range(layers)]
