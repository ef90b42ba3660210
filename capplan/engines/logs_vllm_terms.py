"""Terms of vLLM's memory that follow from those its log prints."""

from capplan.engines.log_record import Notes, Reading, Value, again
from capplan.units import GIB

_DEFAULT_BLOCK = 16
_ROUNDING_BYTES = 0.05 * GIB


def finish(notes: Notes) -> None:
    """Terms that follow from the printed ones."""
    for rank in list(notes.by_rank):
        _derive_memory(notes, rank)
    _derive_tokens(notes)
    if "failed" in notes.memo and not notes.refusals:
        notes.warn(
            f"line {notes.memo['failed']}: the engine failed to start for a reason that is not about memory"
        )


def _bytes(notes: Notes, name: str, rank: str | None) -> int | None:
    reading = notes.get(name, rank)
    return reading.value if reading is not None and isinstance(reading.value, int) else None


def _derive_memory(notes: Notes, rank: str | None) -> None:
    """Activation and non-torch of the versions that print them inside another term."""
    weights = _bytes(notes, "weights_bytes", rank)
    peak, consumed = notes.get("peak_torch_bytes", rank), notes.get("consumed_bytes", rank)
    if peak is not None and weights is not None and isinstance(peak.value, int) and peak.value > weights:
        notes.put(
            again(peak),
            "activation_bytes",
            peak.value - weights,
            weak=True,
            derived="peak_torch_memory less the weights",
        )
    if consumed is not None and weights is not None and isinstance(consumed.value, int):
        notes.put(
            again(consumed),
            "non_torch_bytes",
            consumed.value - weights,
            weak=True,
            derived="consumed memory less the weights",
        )
    _take_out_graphs(notes, rank)


def _take_out_graphs(notes: Notes, rank: str | None) -> None:
    """From about 0.26 the printed peak activation holds the graph estimate: take it out again.

    Told apart by the budget: it closes with the activation alone only where the estimate is inside.
    """
    activation = notes.get("activation_bytes", rank)
    estimate = _bytes(notes, "cuda_graph_estimate_bytes", rank)
    inside = notes.get("cuda_graph_in_budget", rank)
    terms = [_bytes(notes, name, rank) for name in ("budget_bytes", "consumed_bytes", "kv_pool_bytes")]
    if activation is None or estimate is None or inside is None or not inside.value:
        return
    budget, consumed, pool = terms
    if budget is None or consumed is None or pool is None or not isinstance(activation.value, int):
        return
    closes = abs(budget - consumed - activation.value - pool) < _ROUNDING_BYTES
    if closes and _ROUNDING_BYTES < estimate <= activation.value:
        notes.put(
            again(activation),
            "activation_bytes",
            activation.value - estimate,
            derived="printed peak activation less the CUDA graph estimate it holds",
        )


def _derive_tokens(notes: Notes) -> None:
    """V0 prints blocks only: tokens are blocks × block size, which the concurrency line gives away."""
    for rank, readings in list(notes.by_rank.items()):
        blocks = readings.get("kv_blocks")
        if blocks is None or "kv_tokens" in readings or not isinstance(blocks.value, int):
            continue
        block, source = _block_size(notes, rank, blocks.value)
        notes.put(
            again(blocks),
            "kv_tokens",
            blocks.value * block,
            derived=f"kv_blocks × block size {block} ({source})",
        )


def _block_size(notes: Notes, rank: str | None, blocks: int) -> tuple[int, str]:
    for where in (rank, None):
        printed = notes.get("block_size", where)
        if printed is not None and isinstance(printed.value, int):
            return printed.value, "as printed"
    for where in (rank, None):
        times: Value | None = _value(notes.get("max_concurrency", where))
        tokens: Value | None = _value(notes.get("max_concurrency_tokens", where))
        if isinstance(times, float) and isinstance(tokens, int) and blocks and times > 0.05:
            for block in (8, 16, 32, 64, 128, 256):
                if abs(times * tokens / (blocks * block) - 1) < 0.1:
                    return block, "from the concurrency printed"
    return _DEFAULT_BLOCK, "vLLM's default; not printed"


def _value(reading: Reading | None) -> Value | None:
    return None if reading is None else reading.value
