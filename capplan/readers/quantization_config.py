"""quantization_config of a config.json → Quantization: which modules are stored how.

Covers AWQ, GPTQ, AutoRound, FP8 (per tensor, block, FBGEMM), compressed-tensors, ModelOpt (FP8, NVFP4,
mixed), MXFP4, bitsandbytes and BitNet. Another method is an error that names it.
"""

import re
from typing import Final

from capplan.errors import InputError, shown
from capplan.readers.config_keys import Keys
from capplan.specs import Format, Quantization

ALL_LINEAR: Final = ("Linear",)
EXPERTS: Final = (r"re:.*\.experts\..*",)
_SAFE_REGEX: Final = re.compile(r"\)\s*[*+{]")


def read_quantization(top: Keys, text: Keys) -> Quantization | None:
    """The checkpoint's own formats, or None for a plain 16- or 32-bit one.

    Raises InputError for a method that is not understood.
    """
    keys = top.child("quantization_config", "compression_config")
    if keys is None and text is not top:
        keys = text.child("quantization_config", "compression_config")
    if keys is None:
        return None
    method = keys.text("quant_method", "quant_library", default="") or ""
    method = method.lower().replace("_", "-")
    if not method and keys.present("load_in_4bit", "load_in_8bit"):
        method = "bitsandbytes"
    if not method and keys.present("quant_algo", "quantization"):
        method = "modelopt"
    reader = {
        "awq": _awq,
        "gptq": _gptq,
        "auto-round": _gptq,
        "fp8": _fp8,
        "fbgemm-fp8": _fbgemm,
        "compressed-tensors": _groups,
        "modelopt": _modelopt,
        "modelopt-fp4": _modelopt,
        "modelopt-mixed": _modelopt,
        "mxfp4": _mxfp4,
        "bitsandbytes": _bitsandbytes,
        "bitnet": _bitnet,
    }.get(method)
    if reader is None:
        raise keys.fail(
            "quant_method",
            f"{shown(method)} is not understood",
            "known: awq gptq auto-round fp8 fbgemm_fp8 compressed-tensors modelopt mxfp4 bitsandbytes "
            "bitnet; give --precision to plan with another format",
        )
    rules = reader(keys)
    if text.text("expert_dtype") == "fp4":
        # DeepSeek-V4: the routed experts are FP4 with one 8-bit scale every 32, the rest FP8.
        rules = ((EXPERTS, _mx(keys)), *rules)
    return Quantization(
        method=method,
        rules=rules,
        keep=_keep(keys, method),
        kv_format=_kv_format(keys),
    )


Rules = tuple[tuple[tuple[str, ...], Format], ...]


def _format(identity: str, name: str, bits: float, **fields: object) -> Format:
    return Format(id=identity, name=name, element_bits=bits, quantizes="linear", **fields)  # type: ignore[arg-type]


def _grouped(keys: Keys, method: str, bits: int, group: int | None, *, zeros: bool, extra: int = 0) -> Format:
    """Integer weights with fp16 scales along the input dimension; a group of −1 is a whole row."""
    if group is None or group == -1:
        return _format(
            f"{method}-int{bits}",
            f"{method} int{bits}, one scale a row",
            bits,
            group_shape="channel",
            scale_bits=16,
            zero_bits=bits if zeros else 0,
            extra_bytes_per_tensor=extra,
        )
    return _format(
        f"{method}-int{bits}-g{group}",
        f"{method} int{bits}, groups of {group}",
        bits,
        group_shape="input",
        group=group,
        scale_bits=16,
        zero_bits=bits if zeros else 0,
        extra_bytes_per_tensor=extra,
    )


def _group_size(keys: Keys, default: int | None = 128) -> int | None:
    """Weights that share a scale; −1: a whole row."""
    value = keys.optional_integer("group_size", "q_group_size", low=-1)
    if value == 0:
        raise keys.fail("group_size", "0 weights cannot share a scale", "a size, or -1 for a whole row")
    return default if value is None else value


def _awq(keys: Keys) -> Rules:
    bits = keys.integer("bits", "w_bit", default=4, high=16)
    zeros = keys.flag("zero_point", default=True)
    return ((ALL_LINEAR, _grouped(keys, "awq", bits, _group_size(keys), zeros=zeros)),)


def _bitnet(keys: Keys) -> Rules:
    """Ternary weights, four in a byte, with one 16-bit scale a matrix."""
    keys.used.update(("linear_class", "quantization_mode", "use_rms_norm", "rms_norm_eps"))
    stored = _format("bitnet-ternary", "BitNet ternary", 2, group_shape="tensor", extra_bytes_per_tensor=2)
    return ((ALL_LINEAR, stored),)


def _gptq(keys: Keys) -> Rules:
    bits = keys.integer("bits", default=4, high=16)
    return ((ALL_LINEAR, _grouped(keys, "gptq", bits, _group_size(keys), zeros=True)),)


def _fp8(keys: Keys) -> Rules:
    # Some FP8 checkpoints name modules that a second format covers.
    named = _named_layers(keys) or ()
    block = keys.integers("weight_block_size", low=1)
    if block is None:
        static = keys.text("activation_scheme") == "static"
        return (*named, (ALL_LINEAR, _fp8_tensor(8 if static else 4)))
    if len(block) != 2:
        raise keys.fail("weight_block_size", f"{shown(block)} is no pair", "give rows and columns")
    return (*named, (ALL_LINEAR, _fp8_block(*block)))


def _fp8_tensor(extra: int) -> Format:
    return _format(
        "fp8",
        "FP8, one scale a tensor",
        8,
        group_shape="tensor",
        extra_bytes_per_tensor=extra,
        activation_bits=8,
        arithmetic="fp8",
    )


def _fp8_block(rows: int, cols: int) -> Format:
    return _format(
        f"fp8-block{rows}x{cols}",
        f"FP8, blocks of {rows} × {cols}",
        8,
        group_shape="block",
        block_rows=rows,
        block_cols=cols,
        scale_bits=32,
        activation_bits=8,
        arithmetic="fp8",
    )


def _channel(bits: int, name: str, arithmetic: str = "int8") -> Format:
    return _format(
        f"{name}-channel",
        f"{name}, one scale a row",
        bits,
        group_shape="channel",
        scale_bits=16,
        activation_bits=bits,
        arithmetic=arithmetic if bits == 8 else "16-bit",
    )


def _fbgemm(keys: Keys) -> Rules:
    return ((ALL_LINEAR, _channel(8, "fp8", "fp8")),)


def _mx(keys: Keys) -> Format:
    return _format("mxfp4", "MXFP4, groups of 32", 4, group_shape="input", group=32, scale_bits=8)


def _mxfp4(keys: Keys) -> Rules:
    return ((EXPERTS, _mx(keys)),)


def _bitsandbytes(keys: Keys) -> Rules:
    if keys.flag("load_in_8bit", "_load_in_8bit", default=False):
        return ((ALL_LINEAR, _channel(8, "bnb-int8")),)
    if not keys.flag("load_in_4bit", "_load_in_4bit", default=True):
        raise keys.fail("load_in_4bit", "false, and load_in_8bit too", "remove the quantization_config")
    double = keys.flag("bnb_4bit_use_double_quant", default=False)
    scale_bits = 8 + 32 / 256 if double else 32
    nf4 = _format("bnb-nf4", "NF4, blocks of 64", 4, group_shape="input", group=64, scale_bits=scale_bits)
    return ((ALL_LINEAR, nf4),)


def _weights_format(keys: Keys, weights: Keys, activations: Keys | None) -> Format:
    """The format a compressed-tensors or ModelOpt group's `weights` describe."""
    bits = weights.integer("num_bits", high=32)
    kind = weights.text("type", default="int")
    group = _group_size(weights, None)
    strategy = weights.text("strategy")
    if strategy is None:
        strategy = "group" if group and group > 0 else "tensor"
    symmetric = weights.flag("symmetric", default=True)
    if kind == "float" and bits == 4:
        if group == 32:
            return _mx(keys)
        if group not in (16, None):
            raise weights.fail("group_size", f"{group} is not understood for FP4", "16 or 32")
        return _format(
            "nvfp4",
            "NVFP4, groups of 16",
            4,
            group_shape="input",
            group=16,
            scale_bits=8,
            extra_bytes_per_tensor=4 if activations is None else 8,
            activation_bits=16 if activations is None else 4,
            arithmetic="16-bit" if activations is None else "fp4",
        )
    if kind not in ("float", "int"):
        raise weights.fail("type", f"{shown(kind)} is not understood", "float or int")
    name = "fp8" if kind == "float" else f"int{bits}"
    if strategy in ("group", "tensor_group"):
        return _grouped(keys, name, bits, group, zeros=not symmetric, extra=16 if bits < 8 else 0)
    if strategy == "channel":
        if activations is None and kind == "int":
            return _grouped(keys, name, bits, -1, zeros=not symmetric, extra=16)
        return _channel(bits, name, "fp8" if kind == "float" else "int8")
    if strategy in ("block", "tensor") and bits != 8:
        raise weights.fail("num_bits", f"{bits} with one scale a {strategy} is not understood", "8 bits")
    if strategy == "block":
        block = weights.integers("block_structure", "block_size", low=1) or [128, 128]
        if len(block) != 2:
            raise weights.fail("block_structure", "is no pair", "give rows and columns")
        return _fp8_block(*block)
    if strategy == "tensor":
        return _fp8_tensor(4 if activations is None else 8)
    raise weights.fail("strategy", f"{shown(strategy)} is not understood", "group, channel, block, tensor")


def _groups(keys: Keys) -> Rules:
    groups = keys.child("config_groups")
    if groups is None:
        raise keys.fail("config_groups", "missing", "it says which modules are stored how")
    rules: list[tuple[tuple[str, ...], Format]] = []
    for name in groups.data:
        group = groups.child(name)
        weights = group.child("weights") if group is not None else None
        if group is None or weights is None:
            # A group that only quantizes activations stores nothing.
            continue
        targets = tuple(group.texts("targets") or ALL_LINEAR)
        _check_patterns(keys, targets)
        rules.append((targets, _weights_format(keys, weights, group.child("input_activations"))))
    # Named targets go before the catch-all, whatever the file's order.
    return tuple(sorted(rules, key=lambda rule: rule[0] == ALL_LINEAR))


def _modelopt(keys: Keys) -> Rules:
    inner = keys.child("quantization") or keys
    algorithm = (inner.text("quant_algo", default="") or "").upper()
    named = _named_layers(inner)
    if named is not None:
        return named
    if keys.present("config_groups") is not None:
        return _groups(keys)
    moe = (inner.text("moe_quant_algo", default="") or "").upper()
    rules: Rules = ((ALL_LINEAR, _modelopt_format(inner, algorithm)),)
    return ((EXPERTS, _modelopt_format(inner, moe)), *rules) if moe else rules


def _named_layers(keys: Keys) -> Rules | None:
    """Rules of `quantized_layers`, which names each module's format."""
    layers = keys.child("quantized_layers")
    if layers is None:
        return None
    # The list says it module by module, whatever the summaries beside it say.
    layers.used.update(layers.data)
    keys.used.update(("config_groups", "group_size", "quant_algo", "moe_quant_algo", "ignore"))
    by_algorithm: dict[str, list[str]] = {}
    for path, entry in layers.data.items():
        known: dict[str, object] = entry if isinstance(entry, dict) else {}
        algo = known.get("quant_algo")
        if not isinstance(algo, str):
            raise layers.fail(str(path), "has no quant_algo", "give FP8 or NVFP4")
        odd_group = "NVFP4" in algo and known.get("group_size", 16) != 16
        if odd_group or known.keys() - {"quant_algo", "group_size"}:
            raise layers.fail(str(path), f"{shown(entry, 60)} is not understood", "quant_algo, group_size")
        by_algorithm.setdefault(algo.upper(), []).append(str(path))
    return tuple((tuple(paths), _modelopt_format(keys, algo)) for algo, paths in by_algorithm.items())


def _modelopt_format(keys: Keys, algorithm: str) -> Format:
    groups = 16 if "NVFP4" in algorithm else 32 if "MXFP4" in algorithm else None
    if groups and keys.optional_integer("group_size", low=0) not in (None, 0, groups):
        raise keys.fail("group_size", f"is not {groups}, as {algorithm} has it", "check the file")
    if algorithm in ("FP8", "FP8_PER_TENSOR"):
        return _fp8_tensor(8)
    if algorithm in ("FP8_PER_CHANNEL_PER_TOKEN", "FP8_PC_PT"):
        return _channel(8, "fp8", "fp8")
    if algorithm in ("FP8_PB_WO", "FP8_BLOCK_SCALES", "FP8_PB"):
        return _fp8_block(128, 128)
    if algorithm in ("NVFP4", "W4A8_NVFP4_FP8", "NVFP4_AWQ", "W4A16_NVFP4"):
        return _format(
            "nvfp4",
            "NVFP4, groups of 16",
            4,
            group_shape="input",
            group=16,
            scale_bits=8,
            extra_bytes_per_tensor=8,
            activation_bits=16 if "A16" in algorithm else 4,
            arithmetic="16-bit" if "A16" in algorithm else "fp4",
        )
    if algorithm in ("W4A16_AWQ", "W4A8_AWQ"):
        group = keys.integer("group_size", default=128)
        return _grouped(keys, "awq", 4, group, zeros=False)
    if algorithm in ("MXFP4", "W4A8_MXFP4_FP8", "W4A16_MXFP4"):
        return _mx(keys)
    raise keys.fail("quant_algo", f"{shown(algorithm)} is not understood", "known: FP8 NVFP4 W4A16_AWQ MXFP4")


def _keep(keys: Keys, method: str) -> tuple[str, ...]:
    """Modules that stay at the model's dtype."""
    if method == "fp8" and keys.present("quantized_layers") is not None:
        # Here the ignore list speaks of the second format; the rest is FP8.
        return ("lm_head",)
    named: list[str] = []
    inner = keys.child("quantization")
    for source in (keys, inner):
        if source is None:
            continue
        for name in ("ignore", "modules_to_not_convert", "exclude_modules", "llm_int8_skip_modules",
                     "ignored_layers"):  # fmt: skip
            named += source.texts(name) or []
    whole = method in ("compressed-tensors", "modelopt", "modelopt-fp4", "modelopt-mixed")
    if not whole and not keys.flag("lm_head", default=False):
        # The other methods leave the head alone unless told to include it.
        named.append("lm_head")
    _check_patterns(keys, named)
    return tuple(dict.fromkeys(named))


def _check_patterns(keys: Keys, patterns: list[str] | tuple[str, ...]) -> None:
    for pattern in patterns:
        if not pattern.startswith("re:"):
            continue
        # A repeated group can make matching exponential; no published list needs one.
        if len(pattern) > 512 or _SAFE_REGEX.search(pattern):
            raise keys.fail("ignore", f"{shown(pattern)} is too complex", "use simpler patterns")
        try:
            re.compile(pattern[3:])
        except (re.error, OverflowError, RecursionError):
            raise keys.fail(
                "ignore", f"{shown(pattern)} is no regular expression", "mend the pattern"
            ) from None


def _kv_format(keys: Keys) -> str | None:
    scheme = keys.data.get("kv_cache_scheme")
    keys.used.add("kv_cache_scheme")
    inner = keys.child("quantization")
    algorithm = keys.text("kv_cache_quant_algo") or (
        inner.text("kv_cache_quant_algo") if inner is not None else None
    )
    if isinstance(scheme, dict):
        child = Keys(scheme, where=keys.where, path=f"{keys.path}kv_cache_scheme.")
        bits = child.integer("num_bits", default=8, high=16)
        kind = child.text("type", default="float")
        if (bits, kind) == (8, "float"):
            return "fp8"
        if (bits, kind) == (8, "int"):
            return "int8"
        if (bits, kind) == (4, "float"):
            return "nvfp4"
        raise child.fail("num_bits", f"{bits}-bit {kind} is not understood", "8-bit float or int")
    if isinstance(scheme, str):
        algorithm = scheme
    if algorithm is None:
        return None
    known = {"FP8": "fp8", "INT8": "int8", "NVFP4": "nvfp4", "NONE": None}
    if algorithm.upper() not in known:
        raise InputError(
            f"{keys.path}kv_cache_quant_algo: {shown(algorithm)} is not understood",
            where=keys.where,
            hint="known: FP8 INT8 NVFP4",
        )
    return known[algorithm.upper()]
