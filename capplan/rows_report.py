"""Engines, GPUs and services beside each other, as tables and rows of text."""

from typing import TYPE_CHECKING, Any, Final

from capplan.units import format_gib

if TYPE_CHECKING:
    from rich.console import RenderableType

    from capplan.estimate import VramEstimate
    from capplan.ranks import RankNeed
    from capplan.services import Service
    from capplan.side_by_side import EngineRow

_MOST_NOTES: Final = 8
_WORDS = {True: "yes", False: "no", None: "maybe"}
_STYLES = {True: "green", False: "red", None: "yellow"}


def engine_csv(estimate: "VramEstimate") -> list[dict[str, Any]]:
    """One flat row an engine and GPU, sizes in bytes."""
    return [_engine_row(estimate, row) for row in estimate.rows]


def _engine_row(estimate: "VramEstimate", row: "EngineRow") -> dict[str, Any]:
    plan, verdict = row.plan, row.verdict
    return {
        "model": estimate.name,
        "engine": row.engine,
        "version": plan.version if plan else "",
        "gpu": row.gpu_id or row.gpu,
        "users": estimate.question.users,
        "context": estimate.question.context,
        "starts": _text(plan.starts if plan else None),
        "fits": _text(row.fits),
        "kv_pool_bytes": max(0, plan.kv_pool.value) if plan else None,
        "kv_tokens": plan.kv_tokens if plan else None,
        "max_concurrency": plan.max_concurrency if plan else None,
        "longest_model_len": plan.longest_model_len if plan else None,
        "max_users": verdict.max_users if verdict else None,
        "note": row.note,
    }


def service_csv(estimate: "VramEstimate") -> list[dict[str, Any]]:
    """One flat row a service, in start order, sizes in bytes."""
    return [
        {
            "model": service.name,
            "engine": service.plan.engine,
            "version": service.plan.version,
            "starts": _text(service.starts),
            "fits": _text(service.fits),
            "free_before_bytes": service.free_bytes,
            "takes_bytes": service.takes_bytes,
            "kv_pool_bytes": service.plan.kv_pool.value,
            "kv_tokens": service.plan.kv_tokens,
            "note": _service_note(service),
        }
        for service in estimate.services
    ]


def _text(answer: bool | None) -> str:
    return "" if answer is None else str(answer).lower()


def engine_cells(estimate: "VramEstimate") -> tuple[list[str], list[list[str]]]:
    """Head and cells of the engines; the GPU is a column where there are several."""
    several_gpus = len({row.gpu for row in estimate.rows}) > 1
    several_engines = len({row.engine for row in estimate.rows}) > 1
    lead = ["GPU"] * several_gpus + ["engine"] * several_engines
    made = []
    for row in estimate.rows:
        cells = [row.gpu_id or row.gpu] * several_gpus + [row.engine] * several_engines
        made.append(cells + _figures(row))
    return [*lead, "starts", "users fit", "KV pool", "tokens", "requests", "longest"], made


def _figures(row: "EngineRow") -> list[str]:
    plan = row.plan
    if plan is None:
        return ["-", "-", "-", "-", "-", "-"]
    return [
        _WORDS[plan.starts],
        _WORDS[row.fits],
        format_gib(max(0, plan.kv_pool.value)),
        "?" if plan.kv_tokens is None else f"{plan.kv_tokens:,}",
        "?" if plan.max_concurrency is None else f"{plan.max_concurrency:,.2f}",
        "-" if plan.longest_model_len is None else f"{plan.longest_model_len:,}",
    ]


def engine_notes(estimate: "VramEstimate") -> list[str]:
    """What each row has to say, where it does not simply start."""
    several_gpus = len({row.gpu for row in estimate.rows}) > 1
    several_engines = len({row.engine for row in estimate.rows}) > 1
    made = []
    for row in estimate.rows:
        if row.note:
            who = [row.engine] * several_engines + [row.gpu_id or row.gpu] * several_gpus
            made.append(f"{' on '.join(who)}: {row.note}")
    notes = list(dict.fromkeys(made))
    if len(notes) > _MOST_NOTES:
        # Of the whole catalog the reasons would be longer than the answer: they are in the JSON and CSV.
        notes = [*notes[:_MOST_NOTES], f"and {len(notes) - _MOST_NOTES} more, in -o json and -o csv"]
    return notes


def gpu_notes(estimate: "VramEstimate") -> list[str]:
    """What is to be said of the GPUs themselves, once each."""
    return list(dict.fromkeys(verdict.note for verdict in estimate.verdicts if verdict.note))


def service_cells(estimate: "VramEstimate") -> tuple[list[str], list[list[str]]]:
    """Head and cells of the services, in start order."""
    head = ["service", "starts", "fits", "free before", "takes", "KV pool", "tokens"]
    cells = [
        [
            f"{number}. {service.name.rsplit('/', 1)[-1]}",
            _WORDS[service.starts],
            _WORDS[service.fits],
            format_gib(service.free_bytes),
            format_gib(service.takes_bytes),
            format_gib(service.plan.kv_pool.value) if service.starts is not False else "-",
            f"{service.plan.kv_tokens or 0:,}" if service.starts is not False else "-",
        ]
        for number, service in enumerate(estimate.services, 1)
    ]
    return head, cells


def service_notes(estimate: "VramEstimate") -> list[str]:
    """Why a service does not start, and what to change."""
    return [f"{service.name}: {note}" for service in estimate.services if (note := _service_note(service))]


def _service_note(service: "Service") -> str:
    if service.reason is None:
        return ""
    change = "".join(f"; change {entry.flag}: {entry.change}" for entry in service.advice[:1])
    return service.reason + (change if service.starts is not True else "")


def stage_cells(estimate: "VramEstimate") -> tuple[list[str], list[list[str]]]:
    """Head and cells of the pipeline stages; none without a pipeline."""
    head = ["stage", "layers", "weights", "KV cache", "total", "KV pool", "tokens"]
    if len(estimate.ranks) == 1:
        return head, []
    if estimate.question.stage_gpus:
        return [head[0], "GPU", *head[1:]], [
            [cells[0], rank.verdict.gpu_id if rank.verdict and rank.verdict.gpu_id else "?", *cells[1:]]
            for number, rank in enumerate(estimate.ranks)
            for cells in [_stage(number, rank, estimate)]
        ]
    return head, [_stage(number, rank, estimate) for number, rank in enumerate(estimate.ranks)]


def _stage(number: int, rank: "RankNeed", estimate: "VramEstimate") -> list[str]:
    need, verdict = rank.need, rank.verdict if estimate.named else None
    layers = len(rank.stage.layers) if rank.stage else 0
    tokens = verdict.pool_tokens if verdict else None
    return [
        f"{number}",
        str(layers),
        format_gib(need.weights_bytes),
        "?" if need.kv_bytes is None else format_gib(need.kv_bytes),
        format_gib(need.total_bytes),
        format_gib(verdict.pool_bytes) if verdict and verdict.pool_bytes is not None else "-",
        f"{tokens:,}" if tokens is not None else "-",
    ]


def stage_notes(estimate: "VramEstimate") -> list[str]:
    """Which pipeline stage decides; nothing without a pipeline."""
    if len(estimate.ranks) == 1:
        return []
    number = next(n for n, rank in enumerate(estimate.ranks) if rank.need is estimate.need)
    why = "least room" if estimate.named else "most to hold"
    return [f"stage {number} decides for all: it has the {why}"]


def table(head: list[str], cells: list[list[str]]) -> "RenderableType":
    """A table for the terminal; yes, no and maybe are coloured."""
    from rich.table import Table
    from rich.text import Text

    styles = {word: _STYLES[answer] for answer, word in _WORDS.items()}
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for number, name in enumerate(head):
        left = number == 0 or name in ("engine", "starts", "fits", "users fit")
        made.add_column(
            f"  {name}" if number == 0 else name,
            justify="left" if left else "right",
            no_wrap=number > 0,
            overflow="fold",
        )
    for row in cells:
        made.add_row(f"  {row[0]}", *(Text(cell, style=styles.get(cell, "")) for cell in row[1:]))
    return made
