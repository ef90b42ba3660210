"""KV cache of every row in kv.csv, beside what vLLM itself computes.

Bytes per token, windows and state are compared for all rows. Blocks, tokens and concurrency are compared
where one group of full or latent attention has the whole pool; pools shared by several groups are an
engine rule and are counted as left.
"""

import functools
import re
from dataclasses import dataclass

from capplan.capacity import Demand, Overhead, Target, Verdict
from capplan.estimate import VramQuestion, answer
from capplan.kv import KvLayout
from capplan.units import GIB
from tests.accuracy import oracles

_LAYERS = re.compile(
    r"(?P<kind>\w+?)x(?P<layers>\d+)\((?:kvh\d+,hd\d+,(?:(?:w|chunk)(?P<window>\d+),)?block(?P<block>\d+),"
    r"page(?P<page>\d+)|state(?P<state>\d+),padded\d+)\)"
)
# vLLM's layer class → the kind of cache (an indexer's keys are part of the latent's page in vLLM).
_KINDS = {
    "FullAttention": "full",
    "SlidingWindow": "sliding",
    "ChunkedLocalAttention": "chunked",
    "MLAAttention": "mla",
    "Mamba": "state",
}
# kind, window → (layers, bytes per token; of a state: bytes per sequence)
Caches = dict[tuple[str, int | None], tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRow:
    """One row of kv.csv. `capacity` is None where several cache groups share the pool."""

    model: str
    tp: int
    kv_dtype: str
    layers_equal: bool
    columns_equal: bool
    capacity: "CapacityRow | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRow:
    """What fits, as capplan says and as vLLM prints; `refused` rows are those vLLM does not start with.

    vLLM keeps one block back (the null block) when it asks whether one request fits, and not when it
    prints the capacity.
    """

    refused: bool
    tokens: tuple[int, int] | None
    blocks: tuple[int, int] | None
    concurrency: tuple[float, float] | None
    one_fits: bool
    one_fits_without_null_block: bool
    longest: tuple[int, int] | None
    need_gib: tuple[float, float] | None


@functools.cache
def kv_rows() -> list[KvRow]:
    """Every row of kv.csv."""
    return [_row(row) for row in oracles.rows("kv")]


@functools.cache
def layout_of(path: str, tp: int, kv_dtype: str) -> KvLayout:
    """The caches on one rank, asked for as a user would."""
    question = VramQuestion(model=path, tp=tp, kv_dtype=kv_dtype, users=1, context=1, overhead_bytes=0)
    layout = answer(question).layout
    assert layout is not None
    return layout


def oracle_caches(text: str) -> Caches:
    """The `layers` column: kinds with their layers, windows and page sizes."""
    made: Caches = {}
    parts = text.split("; ")
    for part in parts:
        match = _LAYERS.fullmatch(part)
        assert match is not None, part
        kind = _KINDS[match["kind"]]
        layers = int(match["layers"])
        size = float(match["state"]) if kind == "state" else int(match["page"]) / int(match["block"])
        window = int(match["window"]) if match["window"] else None
        before = made.get((kind, window), (0, 0.0))
        made[kind, window] = (before[0] + layers, before[1] + size * layers)
    return made


def capplan_caches(layout: KvLayout) -> Caches:
    """The same of capplan's layout."""
    made: Caches = {}
    for group in layout.groups:
        kind = "mla" if group.kind == "indexer" else group.kind
        size = group.state_bytes if kind == "state" else group.entry_bytes / group.stride
        layers, before = made.get((kind, group.window), (0, 0.0))
        # An indexer sits in the layers of its latent: its bytes add up, its layers do not.
        layers += 0 if group.kind == "indexer" else group.layers
        made[kind, group.window] = (layers, before + size)
    return made


def _row(row: oracles.Row) -> KvRow:
    tp, kv_dtype = int(row["tp"]), row["kv_dtype"]
    layout = layout_of(str(oracles.config_path(row)), tp, kv_dtype)
    caches = capplan_caches(layout)
    by_kind = {"full": 0.0, "sliding": 0.0, "mla": 0.0, "state": 0.0}
    for (kind, _), (_, size) in caches.items():
        by_kind["sliding" if kind == "chunked" else kind] += size
    want = {
        "full": float(row["bytes_per_token_full"]),
        "sliding": float(row["bytes_per_token_sliding"]),
        "mla": float(row["bytes_per_token_mla"]),
        "state": float(row["state_bytes_per_seq"]),
    }
    windows = {window for (_, window) in caches if window is not None}
    alone = len(layout.groups) == 1 and layout.groups[0].kind in ("full", "mla")
    return KvRow(
        model=row["model"],
        tp=tp,
        kv_dtype=kv_dtype,
        layers_equal=caches == oracle_caches(row["layers"]),
        columns_equal=by_kind == want and windows == ({int(row["window"])} if row["window"] else set()),
        capacity=_capacity(row, layout) if alone else None,
    )


def verdict_of(layout: KvLayout, *, pool: int, context: int, block_size: int) -> Verdict:
    """capplan's verdict over a memory that is all KV pool."""
    demand = Demand(
        layout=layout,
        users=1,
        context=context,
        block_size=block_size,
        prefix_shared=0,
        max_context=None,
    )
    nothing = Overhead(low_bytes=0, high_bytes=0, rule="none")
    target = Target(name="pool", gpu_id=None, usable_bytes=pool, reading="given")
    return demand.verdict(target, demand.need(weights=0, extra=0, overhead=nothing))


def pool_tokens(layout: KvLayout, pool_gib: float, block_size: int = 16) -> int:
    """Tokens that whole blocks of a pool hold, where one cache group has it."""
    return int(pool_gib * GIB // layout.paged_bytes(1, block_size)) * block_size


def longest_context(layout: KvLayout, pool_gib: float) -> int:
    """Longest context of one user, found by search over the per-layer rules."""
    demand = Demand(layout=layout, users=1, context=1, block_size=1, prefix_shared=0, max_context=None)
    found = demand.longest_context(int(pool_gib * GIB))
    assert found is not None  # nothing but the pool bounds it
    return found


def _capacity(row: oracles.Row, layout: KvLayout) -> CapacityRow:
    pool = int(row["kv_gib_per_rank"]) * GIB
    context, block_size = int(row["max_model_len"]), int(row["block_size"])
    one_block = round(layout.paged_bytes(1, block_size))
    verdict = verdict_of(layout, pool=pool, context=context, block_size=block_size)
    # The same memory with vLLM's null block taken out.
    without = verdict_of(layout, pool=pool - one_block, context=context, block_size=block_size)
    refused = bool(row["error"])
    assert verdict.pool_tokens is not None
    assert verdict.max_concurrency is not None
    assert without.max_context is not None
    return CapacityRow(
        refused=refused,
        tokens=None if refused else (verdict.pool_tokens, int(row["kv_tokens"])),
        blocks=None if refused else (pool // one_block, int(row["num_blocks"])),
        concurrency=None if refused else (round(verdict.max_concurrency, 6), float(row["max_concurrency"])),
        one_fits=bool(without.fits),
        one_fits_without_null_block=bool(verdict.fits),
        longest=(without.max_context, int(row["fit_max_model_len_estimate"])) if refused else None,
        need_gib=(layout.sequence_bytes(context) / GIB, float(row["need_gib"])) if refused else None,
    )
