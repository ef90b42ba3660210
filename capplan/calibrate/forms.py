"""Which numbers each operation's form has, and how a measured table is put through it."""

from collections.abc import Mapping
from itertools import product
from typing import Any, Final

from capplan.calibrate.search import Form, Knob, Variant
from capplan.calibrate.tables import Table, weight_bits
from capplan.formulas import op_cost
from capplan.op_costs import Rates
from capplan.specs import Gpu

COLLECTIVES: Final = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "send")
# DeepSeek's latent attention, the only one in the tables: latent + rotary, latent; key and value a head.
_LATENT: Final = (576, 512)
_EXPANDED: Final = (192, 128)


def variants(table: Table) -> tuple[Variant, ...]:
    """The forms of a table's operation that may be fitted."""
    return _VARIANTS[_kind(table.op)]


def form(table: Table, gpu: Gpu) -> Form:
    """Predicted seconds of all rows of a table, as a function of the numbers."""
    kind = _kind(table.op)
    call: Any = getattr(op_cost, f"{kind}_s")
    given = _ARGUMENTS[kind](table, Rates(gpu))
    return lambda fit: call(**given, fit=fit)


def _kind(op: str) -> str:
    return "collective" if op in COLLECTIVES else op


def _rates(rates: Rates, dtype: str) -> dict[str, Any]:
    return {
        "flop_per_s": rates.flop_per_s(dtype),
        "bytes_per_s": rates.bytes_per_s,
        "sms": rates.sms,
    }


def _cache(table: Table, rates: Rates) -> Any:
    """Cache that a timed call found filled by the one before: shared by the copies that were rotated."""
    return (rates.gpu.l2_bytes or 0) / table.columns["copies"]


def _taken(table: Table, *names: str) -> dict[str, Any]:
    return {name: table.columns[name] for name in names}


def _gemm(table: Table, rates: Rates) -> dict[str, Any]:
    given = _taken(table, "m", "n", "k") | _rates(rates, table.dtype)
    return given | {"weight_bits": weight_bits(table.dtype), "cache_bytes": _cache(table, rates)}


def _kv(table: Table, rates: Rates) -> dict[str, Any]:
    peak = "fp8" if table.dtype == "fp8_compute" else "bf16"
    return {"kv_bits": 16 if table.dtype == "bf16" else 8} | _rates(rates, peak)


def _decode(table: Table, rates: Rates) -> dict[str, Any]:
    given = _taken(table, "batch", "kv_tokens", "heads", "kv_heads", "k_width", "v_width")
    return given | {"cache_bytes": _cache(table, rates)} | _kv(table, rates)


def _prefill(table: Table, rates: Rates) -> dict[str, Any]:
    given = _taken(table, "sequences", "tokens", "pairs", "heads", "kv_heads", "k_width", "v_width")
    return given | {"cache_bytes": rates.gpu.l2_bytes or 0} | _kv(table, rates)


def _mla_decode(table: Table, rates: Rates) -> dict[str, Any]:
    latent, value = _LATENT
    given = _taken(table, "batch", "kv_tokens", "heads") | {"latent_width": latent, "v_width": value}
    return given | _kv(table, rates)


def _mla_prefill(table: Table, rates: Rates) -> dict[str, Any]:
    key, value = _EXPANDED
    given = _taken(table, "sequences", "tokens", "pairs", "heads") | {"k_width": key, "v_width": value}
    peak = _kv(table, rates)
    del peak["kv_bits"]  # keys and values are expanded to 16 bits
    return given | {"cache_bytes": rates.gpu.l2_bytes or 0} | peak


def _experts(table: Table, rates: Rates) -> dict[str, Any]:
    names = ("tokens", "hidden", "inter", "top_k", "experts", "ep", "tp", "skew", "gated")
    return _taken(table, *names) | {"weight_bits": weight_bits(table.dtype)} | _rates(rates, table.dtype)


def _collective(table: Table, rates: Rates) -> dict[str, Any]:
    given = _taken(table, "bytes_moved") | {"ranks": int(table.columns["ranks"][0])}
    return given | {"link_bytes_per_s": rates.link_bytes_per_s}


def _elementwise(table: Table, rates: Rates) -> dict[str, Any]:
    given = _taken(table, "bytes_moved") | {"bytes_per_s": rates.bytes_per_s}
    return given | {"cache_bytes": rates.gpu.l2_bytes or 0}


_ARGUMENTS: Final = {
    "gemm": _gemm,
    "decode_attention": _decode,
    "prefill_attention": _prefill,
    "mla_decode": _mla_decode,
    "mla_prefill": _mla_prefill,
    "experts": _experts,
    "collective": _collective,
    "elementwise": _elementwise,
}

# Every knob: start, least, most.
_LIMITS: Final[Mapping[str, tuple[float, float, float]]] = {
    "t0_us": (9.0, 0.3, 200.0),
    "compute": (0.55, 0.01, 1.0),
    "memory": (0.8, 0.02, 1.0),
    "p": (2.0, 1.0, 20.0),
    "cache_reach": (0.7, 0.2, 2.0),
    "cache_speed": (1.5, 1.0, 8.0),
    "quantise": (1.0, 0.01, 20.0),
    "steps": (0.5, 0.001, 1.0),
    "half_rows": (16.0, 0.1, 500.0),
    "chain_us": (2.0, 0.01, 30.0),
    "serial_ns": (2.0, 0.05, 400.0),
    "tile_us": (3.0, 0.01, 50.0),
    "group": (0.01, 1e-4, 1.0),
    "single": (0.3, 0.001, 0.9),
    "width": (0.3, 0.01, 2.0),
    "own_t0_us": (9.0, 0.3, 60.0),
    "own_memory": (0.6, 0.02, 1.0),
    "own_tile_us": (2.0, 0.01, 50.0),
    "kv_passes": (2.0, 0.05, 20.0),
    "chain": (0.5, 0.01, 3.0),
    "p_chain": (2.0, 1.0, 10.0),
    "p_serial": (2.0, 1.0, 10.0),
    "pad_rows": (8.0, 0.1, 256.0),
    "busy": (0.3, 0.001, 10.0),
    "gather": (0.05, 0.001, 2.0),
    "permute": (2.0, 0.01, 40.0),
    "permute_local": (2.0, 0.01, 40.0),
    "expert_us": (1.0, 0.01, 100.0),
    "activate": (2.0, 0.01, 40.0),
}
# Messages of collectives grow through several protocols: a hand-over slower than the sum.
_COLLECTIVE_P: Final = (1.0, 0.3, 10.0)
_CACHE: Final = ("cache_reach", "cache_speed")


def _knobs(*names: str) -> tuple[Knob, ...]:
    made = []
    for name in names:
        start, low, high = _LIMITS[name]
        made.append(Knob(name=name, start=start, low=low, high=high))
    return tuple(made)


def _gemm_variants() -> tuple[Variant, ...]:
    knobs = _knobs("t0_us", "compute", "memory", "p", "steps", "half_rows", "quantise", *_CACHE)
    starts: tuple[Mapping[str, float], ...] = (
        {},
        {"steps": 0.05, "p": 4.0},
        {"half_rows": 100.0, "compute": 0.8},
    )
    return tuple(
        Variant(knobs=knobs, fixed={"tile_m": rows, "tile_n": columns}, starts=starts)
        for rows, columns in product((16.0, 64.0, 128.0), (64.0, 128.0))
    )


def _decode_variants() -> tuple[Variant, ...]:
    shared = ("t0_us", "chain_us", "serial_ns", "memory", "tile_us", "compute", "p", *_CACHE)
    starts: tuple[Mapping[str, float], ...] = ({}, {"serial_ns": 15.0, "p": 5.0})
    return (
        Variant(knobs=_knobs(*shared, "group", "single", "width"), starts=starts),
        Variant(knobs=_knobs(*shared, "own_t0_us", "own_memory", "own_tile_us"), starts=starts),
    )


def _prefill_variants(*packings: float) -> tuple[Variant, ...]:
    names = ("t0_us", "compute", "memory", "kv_passes", "chain", "tile_us", "p", "p_chain", *_CACHE)
    starts: tuple[Mapping[str, float], ...] = ({}, {"p": 1.1, "p_chain": 1.2, "tile_us": 1.0}, {"p": 8.0})
    return tuple(Variant(knobs=_knobs(*names), fixed={"packed": one}, starts=starts) for one in packings)


_FLAT: Final = Knob(name="p", start=_COLLECTIVE_P[0], low=_COLLECTIVE_P[1], high=_COLLECTIVE_P[2])
_VARIANTS: Final[Mapping[str, tuple[Variant, ...]]] = {
    "gemm": _gemm_variants(),
    "decode_attention": _decode_variants(),
    "prefill_attention": _prefill_variants(0.0, 1.0),
    "mla_decode": (
        Variant(
            knobs=_knobs(
                "t0_us", "chain_us", "serial_ns", "memory", "tile_us", "group", "compute", "p", "p_serial"
            ),
            starts=({}, {"serial_ns": 100.0}, {"p": 5.0, "serial_ns": 20.0}),
        ),
    ),
    "mla_prefill": _prefill_variants(0.0),
    "experts": (
        Variant(
            knobs=_knobs(
                "t0_us", "compute", "memory", "p", "pad_rows", "busy", "gather", "permute", "permute_local",
                "expert_us", "activate",
            ),
            starts=({}, {"p": 1.2, "pad_rows": 64.0}),
        ),
    ),
    "collective": (
        Variant(knobs=(*_knobs("t0_us", "memory"), _FLAT), starts=({}, {"t0_us": 20.0}, {"memory": 0.1})),
    ),
    "elementwise": (Variant(knobs=_knobs("t0_us", "memory", "p", *_CACHE), starts=({}, {"t0_us": 2.0})),),
}  # fmt: skip
