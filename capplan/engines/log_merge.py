"""One consistent answer from what several ranks printed."""

from collections.abc import Iterator, Mapping

from capplan.engines.log_record import MEMORY, SMALLEST, EngineLog, Notes, Reading, Refusal
from capplan.units import format_bytes

# A generic failure, followed or preceded by the engine's own words where it has some.
_GENERIC = frozenset({"out_of_memory"})


def merged(engine: str, notes: Notes, *, source: str, lines: int) -> EngineLog:
    """The log of an engine.

    Memory terms come from the rank that binds, then from the engine, then from the other ranks; of a
    setting the last printed counts, since what was asked for comes before what was settled on.
    """
    ranks = notes.by_rank
    fields: dict[str, Reading] = {}
    for rank in _order(engine, ranks):
        for name, reading in ranks[rank].items():
            if name not in fields or (name not in MEMORY and reading.line > fields[name].line):
                fields[name] = reading
    if engine != "llama.cpp":
        for name in SMALLEST & fields.keys():
            fields[name] = _smallest(name, ranks, fields[name])
    _check(fields, notes)
    return EngineLog(
        engine=engine,
        source=source,
        fields=fields,
        ranks={rank: dict(readings) for rank, readings in ranks.items() if rank is not None},
        refusal=_refusal(notes.refusals),
        oom=notes.oom,
        started_line=notes.started_line,
        starts=notes.starts,
        lines=lines,
        warnings=tuple(notes.warnings),
    )


def _order(engine: str, ranks: Mapping[str | None, Mapping[str, Reading]]) -> Iterator[str | None]:
    """The rank whose memory terms count first: the one with the least pool, else the most weights.

    llama.cpp's ranks are devices, whose sums stand under the engine as a whole.
    """
    names = sorted((rank for rank in ranks if rank is not None), key=_natural)
    if engine == "llama.cpp":
        yield from (rank for rank in (None,) if rank in ranks)
        return
    candidates = [rank for rank in (None, *names) if rank in ranks]
    pools = [rank for rank in candidates if "kv_pool_bytes" in ranks[rank]]
    weights = [rank for rank in candidates if "weights_bytes" in ranks[rank]]
    binding: list[str | None] = []
    if pools:
        binding = [min(pools, key=lambda rank: _room(ranks[rank]))]
    if weights and not (binding and binding[0] in weights):
        binding.append(max(weights, key=lambda rank: _number(ranks[rank]["weights_bytes"])))
    yield from binding
    yield from (rank for rank in candidates if rank not in binding)


def _room(readings: Mapping[str, Reading]) -> tuple[float, float]:
    """Sorts ranks by their pool; of equal pools the one with more weights comes first."""
    weights = readings.get("weights_bytes")
    return _number(readings["kv_pool_bytes"]), 0.0 if weights is None else -_number(weights)


def _natural(rank: str) -> tuple[int, str]:
    return len(rank), rank


def _number(reading: Reading) -> float:
    return 0.0 if isinstance(reading.value, str) else float(reading.value)


def _smallest(name: str, ranks: Mapping[str | None, Mapping[str, Reading]], chosen: Reading) -> Reading:
    """Among ranks that printed a field the least: the engine gives each what the poorest can hold."""
    readings = [readings[name] for readings in ranks.values() if name in readings]
    least = min(readings, key=_number)
    return least if _number(least) < _number(chosen) else chosen


def _refusal(refusals: list[Refusal]) -> Refusal | None:
    """The first of the engine's own reasons, else the first failed allocation."""
    own = [refusal for refusal in refusals if refusal.reason not in _GENERIC]
    return next(iter(own or refusals), None)


def _check(fields: Mapping[str, Reading], notes: Notes) -> None:
    """Figures that cannot be of this device are said to be so, not repaired."""
    total = fields.get("gpu_total_bytes")
    if total is None or isinstance(total.value, str) or total.value <= 0:
        return
    for name in ("weights_bytes", "kv_pool_bytes", "gpu_free_bytes"):
        reading = fields.get(name)
        if reading is not None and _number(reading) > 1.05 * total.value:
            notes.warn(
                f"line {reading.line}: {name} of {format_bytes(_number(reading))} is more than the device's "
                f"{format_bytes(total.value)} (line {total.line})"
            )
