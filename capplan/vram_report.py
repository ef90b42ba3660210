"""The answer of `capplan vram` as text: terminal view, Markdown, CSV rows. Nothing prints here."""

from typing import TYPE_CHECKING, Any, Final

from capplan import rows_report
from capplan.engine_report import engine_lines, term_lines
from capplan.report import grid, to_markdown
from capplan.units import GIB, KIB, format_bytes, format_count, format_gib

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from capplan.capacity import Paging, Verdict
    from capplan.estimate import VramEstimate

BAR_CELLS: Final = 50
NARROW: Final = 76
# One glyph a part, so that the bar reads without colour too.
_PARTS: Final = (
    ("weights", "█", "blue"),
    ("other weights", "▉", "magenta"),
    ("KV cache", "▓", "green"),
    ("overhead", "▒", "yellow"),
    ("headroom", "·", "dim"),
)
_FITS: Final = {True: ("yes", "green"), False: ("no", "red"), None: ("maybe", "yellow")}


def vram_rows(estimate: "VramEstimate") -> list[dict[str, Any]]:
    """One flat row a memory, engine or service, sizes in bytes: the CSV."""
    if estimate.rows:
        return rows_report.engine_csv(estimate)
    if estimate.services:
        return rows_report.service_csv(estimate)
    need = estimate.need
    return [
        {
            "model": estimate.name,
            "precision": estimate.precision.id if estimate.precision else "auto",
            "kv_dtype": estimate.kv_format.id,
            "users": estimate.question.users,
            "context": estimate.question.context,
            "tp": estimate.question.tp,
            "pp": estimate.question.pp,
            "ep": estimate.question.ep,
            "dp": estimate.question.dp,
            "gpu": verdict.gpu_id or verdict.name,
            "per_gpu_usable_bytes": verdict.usable_bytes,
            "per_gpu_weights_bytes": need.weights_bytes,
            "per_gpu_kv_cache_bytes": need.kv_bytes,
            "per_gpu_overhead_bytes": need.overhead.high_bytes,
            "per_gpu_total_bytes": need.total_bytes,
            "fits": "" if verdict.fits is None else str(verdict.fits).lower(),
            "per_gpu_headroom_bytes": verdict.headroom_bytes,
            "max_users": verdict.max_users,
            "max_context": verdict.max_context,
        }
        for verdict in estimate.verdicts
    ]


def vram_markdown(estimate: "VramEstimate") -> str:
    """Budget and verdicts as Markdown tables, then stages and services; or the rows of engines alone."""
    text = f"**{vram_title(estimate)}**\n\n{vram_workload(estimate)}\n"
    if estimate.rows:
        head, cells = rows_report.engine_cells(estimate)
        text += "\n" + to_markdown([dict(zip(head, row, strict=True)) for row in cells])
        lines = [*rows_report.engine_notes(estimate), *rows_report.gpu_notes(estimate), *estimate.notes]
        return text + "".join(f"\n- {line}" for line in lines) + ("\n" if lines else "")
    budget = [
        {"part": name, "GiB": f"{size / GIB:,.2f}", "how": how} for name, size, how in budget_lines(estimate)
    ]
    verdicts = [
        dict(zip(_verdict_head(estimate), cells, strict=True))
        for cells in (_verdict_cells(estimate, verdict) for verdict in estimate.verdicts)
    ]
    text += "\n" + to_markdown(budget) + "\n" + to_markdown(verdicts)
    for head, cells in (rows_report.stage_cells(estimate), rows_report.service_cells(estimate)):
        if cells:
            text += "\n" + to_markdown([dict(zip(head, row, strict=True)) for row in cells])
    lines = [
        *engine_lines(estimate.engine),
        *rows_report.stage_notes(estimate),
        *rows_report.service_notes(estimate),
        *closing_lines(estimate),
    ]
    return text + ("\n" + "".join(f"- {line}\n" for line in lines) if lines else "")


def vram_title(estimate: "VramEstimate") -> str:
    """What was planned, naming the model an alias meant."""
    asked = estimate.question.model
    alias = f' ("{asked}")' if asked and asked != estimate.name and len(asked) < 24 else ""
    weights = estimate.precision.id if estimate.precision else "the checkpoint's own"
    own = estimate.model is not None and (estimate.model.quantization or estimate.model.stored)
    if estimate.precision is None and not own:
        weights = "16-bit"
    text = f"{estimate.name}{alias}"
    if estimate.model is not None:
        text += f", {format_count(estimate.parameters)} parameters"
    text += f", {weights} weights"
    if estimate.layout is not None:
        text += f", {estimate.kv_format.id} KV cache"
    return text


def vram_workload(estimate: "VramEstimate") -> str:
    """Users, context, GPUs."""
    question = estimate.question
    noun = "user" if question.users == 1 else "users"
    text = f"{question.users:,} {noun} × {question.context:,} tokens"
    if question.n > 1:
        text = f"{question.users:,} {noun} × {question.n} samples × {question.context:,} tokens"
        text += f", {question.isl:,} of them a prompt kept once"
    if question.prefix_shared:
        text += f", {question.prefix_shared:,} of them shared"
    text += " (worst case: every user holds a full context)"
    if estimate.gpus > 1 and estimate.offloads:
        return f"{text}; the fullest of {estimate.gpus} GPUs holds:"
    if estimate.gpus > 1:
        degrees = [f"{name} {getattr(question, name)}" for name in ("tp", "pp", "dp", "ep")]
        used = [text for text in degrees if not text.endswith(" 1")]
        who = "each" if used == [f"tp {question.tp}"] else "the fullest"
        how = "" if who == "each" else f" ({' × '.join(used)})".replace(" × ep", ", ep")
        text += f"; {who} of {estimate.gpus} GPUs{how} holds:"
    return text


def budget_lines(estimate: "VramEstimate") -> list[tuple[str, int, str]]:
    """Parts of the need on one GPU: name, bytes, how it comes about."""
    need = estimate.need
    made = [("weights", need.weights_bytes, _weights_how(estimate))]
    made += [(name, size, "loaded beside the decoder") for name, size in estimate.extra.items()]
    if need.kv_bytes is not None:
        own = need.kv_bytes - estimate.draft_rank_kv_bytes
        made.append(("KV cache", own, _kv_how(estimate)))
        if estimate.draft_rank_kv_bytes:
            made.append(("draft KV cache", estimate.draft_rank_kv_bytes, "the draft's own layers"))
        if need.tail_bytes:
            made.append(
                (
                    "block tails",
                    need.tail_bytes,
                    f"empty slots of the last blocks of {estimate.question.block_size}",
                )
            )
    overhead = need.overhead
    how = overhead.rule
    if overhead.named is not None:
        return [*made, *term_lines(overhead.named, how), ("total", need.total_bytes, "")]
    if overhead.low_bytes != overhead.high_bytes:
        how += f" ({overhead.low_bytes / GIB:.2f}–{overhead.high_bytes / GIB:.2f})"
    made.append(("overhead", overhead.high_bytes, how))
    made.append(("total", need.total_bytes, ""))
    return made


def _weights_how(estimate: "VramEstimate") -> str:
    budget = estimate.weights
    if budget is None:
        bits = estimate.precision.element_bits if estimate.precision else 16
        return f"headline formula: {estimate.parameters:,} × {bits:g} / 8"
    if not budget.formats:
        stored = estimate.precision.name if estimate.precision else "16-bit"
        return stored.split(",")[0]
    return f"{estimate.bits_per_parameter:.2f} bits a parameter with scales; " + "; ".join(
        name.split(",")[0] for name in budget.formats[:2]
    )


def _kv_how(estimate: "VramEstimate") -> str:
    layout = estimate.layout
    if layout is None:
        return ""
    parts = []
    if layout.pages:
        per_token = layout.bytes_per_token
        text = f"{per_token / KIB:,.4g} KiB a token"
        if any(group.window for group in layout.groups):
            text += " before windows fill"
        parts.append(text)
    if layout.state_bytes:
        parts.append(f"{format_bytes(layout.state_bytes)} state a user")
    return ", ".join(parts) + f" ({estimate.kv_reason})"


def closing_lines(estimate: "VramEstimate") -> list[str]:
    """Paging, remedies, notes: one line each."""
    made: list[str] = []
    if estimate.lesson is not None:
        made.append(_lesson_line(estimate.lesson))
    if estimate.paging is not None and estimate.named:
        made.append(_paging_line(estimate.paging))
    made += [verdict.note for verdict in estimate.verdicts if verdict.note]
    engine = () if estimate.engine is None else estimate.engine.notes
    return [*made, *engine, *estimate.notes]


def _paging_line(paging: "Paging") -> str:
    text = (
        f"KV waste when paged: tail blocks {format_gib(paging.tail_bytes)} ({paging.tail_fraction:.1%}); "
        f"pre-allocated contiguously to {paging.reserved_tokens:,} tokens a user: reserved-unused "
        f"{format_gib(paging.reserved_unused_bytes)} ({paging.reserved_unused_fraction:.0%})"
    )
    if paging.external_bytes:
        text += f", external (free but too small) {format_gib(paging.external_bytes)}"
    return text


def _lesson_line(lesson: dict[str, Any]) -> str:
    text = (
        f"as the lesson adds it: weights {lesson['weights_gb']:.1f} GB + KV cache "
        f"{lesson['kv_cache_gib']:.1f} GiB + overhead {lesson['overhead_gb']:.1f} GB = "
        f"{lesson['total_mixed']:.1f}"
    )
    if lesson["headroom_mixed"] is not None:
        text += f", headroom {lesson['headroom_mixed']:+.1f} GB"
    return text + " (GB and GiB mixed; the table above is exact)"


def _verdict_head(estimate: "VramEstimate") -> list[str]:
    return ["GPU" if estimate.named else "memory", "usable", "fits", "headroom", "max users", "max context"]


def _verdict_cells(estimate: "VramEstimate", verdict: "Verdict") -> list[str]:
    unknown = "?" if estimate.layout is None else "unbounded"

    def count(value: int | None) -> str:
        return unknown if value is None else f"{value:,}"

    return [
        verdict.name if verdict.gpu_id is None else verdict.gpu_id,
        format_gib(verdict.usable_bytes),
        _FITS[verdict.fits][0],
        format_gib(verdict.headroom_bytes),
        count(verdict.max_users),
        count(verdict.max_context),
    ]


def vram_view(estimate: "VramEstimate", width: int) -> list["RenderableType"]:
    """What the terminal shows, in order."""
    from rich.text import Text

    if estimate.rows:
        return _rows_view(estimate)
    made: list[RenderableType] = [
        Text(vram_title(estimate), style="bold"),
        Text(vram_workload(estimate)),
        Text(""),
        _budget_table(estimate),
        Text(""),
    ]
    bar = _bar(estimate, min(BAR_CELLS, max(20, width - 24)))
    if bar is not None:
        made += [*bar, Text("")]
    made += _verdict_lines(estimate) if width < NARROW else [_verdict_table(estimate)]
    if estimate.named and len(estimate.verdicts) == 1:
        made += [Text(""), _verdict_sentence(estimate)]
    made += [Text(line, style="cyan") for line in engine_lines(estimate.engine)]
    for head, cells in (rows_report.stage_cells(estimate), rows_report.service_cells(estimate)):
        if cells:
            made += [Text(""), rows_report.table(head, cells)]
    lines = [*rows_report.stage_notes(estimate), *rows_report.service_notes(estimate)]
    made += [Text(f"  {line}") for line in lines]
    if estimate.remedies:
        made += [Text(""), Text("what would make it fit:"), _remedy_table(estimate)]
    lines = closing_lines(estimate)
    if lines:
        made.append(Text(""))
        made += [_note(line) for line in lines]
    return made


def _rows_view(estimate: "VramEstimate") -> list["RenderableType"]:
    """Engines or GPUs side by side: no budget, which is another for each."""
    from rich.text import Text

    made: list[RenderableType] = [
        Text(vram_title(estimate), style="bold"),
        Text(vram_workload(estimate)),
        Text(""),
        rows_report.table(*rows_report.engine_cells(estimate)),
    ]
    lines = rows_report.engine_notes(estimate)
    if lines:
        made += [Text(""), *(Text(f"  {line}") for line in lines)]
    notes = [*rows_report.gpu_notes(estimate), *estimate.notes]
    if notes:
        made += [Text(""), *(_note(line) for line in notes)]
    return made


def _note(line: str) -> "Text":
    from rich.text import Text

    return Text(f"note: {line}", style="dim")


def _budget_table(estimate: "VramEstimate") -> "Table":
    table = grid()
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for name, size, how in budget_lines(estimate):
        style = "bold" if name == "total" else ""
        table.add_row(f"  {name}", format_gib(size), how, style=style)
    return table


def _verdict_lines(estimate: "VramEstimate") -> list["Text"]:
    """The verdicts where a table would not fit: a few words a line."""
    from rich.text import Text

    made: list[Text] = []
    for verdict in estimate.verdicts:
        cells = _verdict_cells(estimate, verdict)
        made.append(Text(f"  {cells[0]}: {cells[2]}", style=_FITS[verdict.fits][1]))
        made.append(Text(f"    {cells[1]} usable, {cells[3]} headroom"))
        made.append(Text(f"    max users {cells[4]}, max context {cells[5]}"))
    return made


def _verdict_table(estimate: "VramEstimate") -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, head in enumerate(_verdict_head(estimate)):
        text = f"  {head}" if number == 0 else head
        table.add_column(
            text, justify="left" if number in (0, 2) else "right", no_wrap=number > 0, overflow="fold"
        )
    for verdict in estimate.verdicts:
        cells = _verdict_cells(estimate, verdict)
        table.add_row(f"  {cells[0]}", cells[1], Text(cells[2], style=_FITS[verdict.fits][1]), *cells[3:])
    return table


def _verdict_sentence(estimate: "VramEstimate") -> "Text":
    from rich.text import Text

    verdict = estimate.verdicts[0]
    need = estimate.need.total_bytes
    arithmetic = f"{format_gib(need)} needed, {format_gib(verdict.usable_bytes)} there"
    if verdict.fits:
        return Text(f"fits: {arithmetic}", style="green")
    if verdict.fits is False:
        if estimate.engine is not None and verdict.headroom_bytes >= 0:
            return Text(f"does not start, though the users would fit: {arithmetic}", style="red")
        return Text(f"does not fit: {arithmetic}", style="red")
    if estimate.model is not None and estimate.model.uncounted:
        parts = ", ".join(estimate.model.uncounted)
        return Text(f"cannot be said: {arithmetic}, and {parts} is not counted", style="yellow")
    if estimate.layout is None:
        return Text(f"cannot be said: {arithmetic}, and the KV cache is not known", style="yellow")
    if estimate.engine is not None:
        return Text(f"may fit: {arithmetic}, within the plan's error", style="yellow")
    low = format_gib(estimate.need.low_bytes)
    return Text(
        f"may fit: {low} to {format_gib(need)} needed by the overhead band, "
        f"{format_gib(verdict.usable_bytes)} there",
        style="yellow",
    )


def _remedy_table(estimate: "VramEstimate") -> "Table":
    table = grid()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for remedy in estimate.remedies:
        table.add_row(
            f"  {remedy.flag}",
            remedy.change,
            format_gib(remedy.total_bytes),
            f"{format_gib(remedy.headroom_bytes)} left",
        )
    return table


def _bar(estimate: "VramEstimate", cells: int) -> list["Text"] | None:
    """The budget as a bar: of the GPU's memory where one is named, else of the need itself."""
    from rich.text import Text

    need = estimate.need
    whole = need.total_bytes
    headroom = 0
    if estimate.named and len(estimate.verdicts) == 1:
        headroom = max(0, estimate.verdicts[0].headroom_bytes)
        whole = max(whole, estimate.verdicts[0].usable_bytes)
    sizes = (
        need.weights_bytes,
        need.extra_bytes,
        (need.kv_bytes or 0) + need.tail_bytes,
        need.overhead.high_bytes,
        headroom,
    )
    if whole <= 0:
        return None
    bar, legend = Text("  "), Text("  ")
    used = 0
    running = 0
    for (name, glyph, style), size in zip(_PARTS, sizes, strict=True):
        if not size:
            continue
        running += size
        # Rounded ends, so that the cells sum up whatever the shares.
        end = round(running / whole * cells)
        bar.append(glyph * (end - used), style=style)
        used = end
        legend.append(f"{glyph} ", style=style)
        legend.append(f"{name} {size / whole:.0%}  ")
    return [bar, legend]
