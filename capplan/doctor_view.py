"""A diagnosis as text: terminal, Markdown, CSV rows. Nothing here computes a figure."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from capplan.doctor import Diagnosis
from capplan.log_terms import Term, settings
from capplan.refusals import Fix
from capplan.report import to_markdown
from capplan.units import GIB, format_gib

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_ENGINES: Final = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "tensorrt-llm": "TensorRT-LLM",
    "tgi": "TGI",
    "llama.cpp": "llama.cpp",
}
_STYLES: Final = {"started": "green", "not said": "yellow"}
_HEAD: Final = ("term", "log", "line", "plan", "log less plan")


def title(diagnosis: Diagnosis) -> str:
    """Engine, version, model, GPU, and how it ended."""
    log, subject = diagnosis.log, diagnosis.subject
    version = log.fields.get("version")
    text = _ENGINES.get(log.engine, log.engine) + (f" {version.value}" if version is not None else "")
    named = subject.model.name if subject.model else None
    said = log.fields.get("model") or log.fields.get("model_name")
    if named is None and said is not None:
        named = str(said.value)
    text += f", {plain(named)}" if named else ", a model it does not name"
    if subject.gpu is not None:
        text += f" on {subject.gpu.id}"
    return f"{text}: {diagnosis.outcome}"


def plain(text: str) -> str:
    """Text of a log without characters that would steer a terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def figure(value: float | None, unit: str, *, sign: bool = False) -> str:
    """A term's value; with `sign` a difference."""
    if value is None:
        return ""
    if sign and round(value / GIB if unit == "bytes" else value, 0 if unit == "int" else 2) == 0:
        return "0"
    mark = ("+" if value > 0 else "-") if sign else "-" if value < 0 else ""
    size = abs(value)
    if unit == "bytes":
        return f"{mark}{format_gib(size)}"
    return f"{mark}{size:,.2f}" if unit == "float" else f"{mark}{size:,.0f}"


def rows(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """One row a term, exact: the CSV."""
    return [
        {
            "term": term.field,
            "unit": term.unit,
            "log": term.log,
            "line": term.line,
            "plan": term.plan,
            "difference": term.difference,
            "derived": term.derived,
        }
        for term in diagnosis.terms
    ]


def _cells(term: Term) -> tuple[str, ...]:
    return (
        term.name,
        figure(term.log, term.unit),
        "" if term.line is None else f"{term.line:,}",
        figure(term.plan, term.unit),
        figure(term.difference, term.unit, sign=True),
    )


def closing(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """What follows the tables: lines with their style."""
    for text in diagnosis.missing:
        yield f"missing: {plain(text)}", "yellow"
    for text in diagnosis.log.warnings:
        yield f"warning: {plain(text)}", "yellow"
    made = diagnosis.plan
    for text in (*diagnosis.notes, *(made.notes if made is not None else ())):
        yield f"note: {plain(text)}", "dim"


def _change(fix: Fix) -> str:
    return fix.change if fix.starts else f"{fix.change} (may not be enough)"


def _reason(diagnosis: Diagnosis) -> Iterator[str]:
    refusal = diagnosis.log.refusal
    if refusal is not None:
        yield f"line {refusal.line:,}: {plain(refusal.text)}"
        yield from diagnosis.explained


def _fix_title(diagnosis: Diagnosis) -> str:
    if diagnosis.startable:
        return "what would make it start, one flag at a time:"
    if diagnosis.outcome == "started":
        return "what would give more room, one flag at a time:"
    return "what to try, one flag at a time (the log does not say enough to be sure):"


def view(diagnosis: Diagnosis) -> list["RenderableType"]:
    """What the terminal shows, in order."""
    from rich.text import Text

    made: list[RenderableType] = [
        Text(title(diagnosis), style=f"bold {_STYLES.get(diagnosis.outcome, 'red')}"),
        Text(""),
        _term_table(diagnosis),
    ]
    reason = list(_reason(diagnosis))
    if reason:
        made += [Text(""), Text(reason[0]), *(Text(f"  {text}") for text in reason[1:])]
    if diagnosis.cause is not None:
        made += [Text(""), Text(f"differs most: {diagnosis.cause}")]
    if diagnosis.fixes:
        made += [Text(""), Text(_fix_title(diagnosis)), _fix_table(diagnosis)]
    elif diagnosis.startable is False:
        made += [Text(""), Text("no single flag makes it start", style="red")]
    said = [
        f"{name} {plain(str(reading.value))} ({reading.line:,})" for name, reading in settings(diagnosis.log)
    ]
    if said:
        made += [Text(""), Text("said in the log (line): " + ", ".join(said), style="dim")]
    lines = list(closing(diagnosis))
    if lines:
        made += [Text(""), *(Text(text, style=style) for text, style in lines)]
    return made


def _term_table(diagnosis: Diagnosis) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    widest = diagnosis.widest
    for number, head in enumerate(_HEAD):
        table.add_column(
            f"  {head}" if number == 0 else head,
            justify="left" if number == 0 else "right",
            no_wrap=number > 0,
            overflow="fold",
        )
    for term in diagnosis.terms:
        name, *others = _cells(term)
        table.add_row(f"  {name}", *others, style="bold" if term is widest else "")
    return table


def _fix_table(diagnosis: Diagnosis) -> "Table":
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for fix in diagnosis.fixes:
        table.add_row(f"  {fix.flag}", _change(fix))
    return table


def markdown(diagnosis: Diagnosis) -> str:
    """The same as Markdown."""
    table = to_markdown([dict(zip(_HEAD, _cells(term), strict=True)) for term in diagnosis.terms])
    text = f"**{title(diagnosis)}**\n\n{table}"
    lines = [f"- {line}" for line in _reason(diagnosis)]
    if diagnosis.cause is not None:
        lines.append(f"- differs most: {diagnosis.cause}")
    lines += [f"- `{fix.flag}`: {_change(fix)}" for fix in diagnosis.fixes]
    lines += [f"- {line}" for line, _ in closing(diagnosis)]
    return text + ("\n" + "\n".join(lines) + "\n" if lines else "")
