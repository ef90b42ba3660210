"""YAML text → a tree that keeps positions and spelling, for files that people write and programs must trust.

Scalars stay text with their style: what they mean is decided by the key they stand under (scenario_values),
never by the loader, since YAML 1.1 and 1.2 disagree on `no`, `1e3`, `017`, `1:30`. Read with PyYAML's parser
(libyaml), whose events know where anchors and duplicate keys stand. Refused: duplicate keys, anchors and
aliases, tags, merge keys, several documents, tabs as indentation.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from capplan.errors import InputError, shown

MAX_BYTES: Final = 1 << 20
MAX_NODES: Final = 20_000
MAX_DEPTH: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A place in a file; line and column count from 1."""

    file: str
    line: int = 1
    column: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    def error(self, message: str, hint: str) -> InputError:
        """An error at this place."""
        return InputError(message, where=str(self), hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """Text as written; `plain` without quotes."""

    text: str
    plain: bool
    mark: Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """A list."""

    items: "tuple[Node, ...]"
    mark: Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping:
    """Key → value, and where each key stands."""

    items: "dict[str, Node]"
    keys: dict[str, Mark]
    mark: Mark


Node = Scalar | Sequence | Mapping


def read_tree(raw: bytes, file: str) -> Mapping:
    """The one mapping of a YAML file; `file` names it in errors.

    Errors: InputError with file:line:column for all that is not plain mappings, lists and scalars.
    """
    import yaml

    start = Mark(file=file)
    if len(raw) > MAX_BYTES:
        raise start.error(f"{len(raw):,} bytes", f"a scenario has at most {MAX_BYTES:,}")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise Mark(file=file, line=line).error("not UTF-8", "save the file as UTF-8") from None
    try:
        return _Builder(file, iter(yaml.parse(text, Loader=yaml.CSafeLoader))).document()
    except yaml.YAMLError as error:
        raise _broken(error, file, text) from None


class _Builder:
    """Events → tree."""

    def __init__(self, file: str, events: Iterator[Any]) -> None:
        self.file = file
        self.events = events
        self.count = 0

    def mark(self, event: Any) -> Mark:
        return Mark(file=self.file, line=event.start_mark.line + 1, column=event.start_mark.column + 1)

    def document(self) -> Mapping:
        import yaml

        found: Node | None = None
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent) and found is not None:
                raise self.mark(event).error(
                    "a second document", "one scenario a file; matrix: makes variants"
                )
            if isinstance(event, yaml.NodeEvent):
                found = self.node(event, 0)
        if found is None:
            raise Mark(file=self.file).error("an empty file", "start with `capplan: 1` and `model: …`")
        if not isinstance(found, Mapping):
            raise found.mark.error("not a mapping", "write key: value pairs, `capplan: 1` first")
        return found

    def node(self, event: Any, depth: int) -> Node:
        import yaml

        mark = self.mark(event)
        self.count += 1
        if self.count > MAX_NODES or depth > MAX_DEPTH:
            raise mark.error("too large", f"at most {MAX_NODES:,} values, {MAX_DEPTH} deep")
        if isinstance(event, yaml.AliasEvent):
            raise mark.error(
                f"the alias *{event.anchor}", "write the value out; `extends:` and `matrix:` share values"
            )
        if event.anchor is not None:
            raise mark.error(
                f"the anchor &{event.anchor}", "take it out; `extends:` and `matrix:` share values"
            )
        if event.tag is not None and event.tag != "!":
            raise mark.error(f"the tag {shown(event.tag)}", "take it out: the key says what the value is")
        if isinstance(event, yaml.ScalarEvent):
            return Scalar(text=event.value, plain=event.style in (None, "") and event.tag is None, mark=mark)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Node] = []
            while not isinstance(inner := next(self.events), yaml.SequenceEndEvent):
                items.append(self.node(inner, depth + 1))
            return Sequence(items=tuple(items), mark=mark)
        return self.mapping(mark, depth)

    def mapping(self, mark: Mark, depth: int) -> Mapping:
        import yaml

        items: dict[str, Node] = {}
        keys: dict[str, Mark] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self.node(event, depth + 1)
            if not isinstance(key, Scalar):
                raise key.mark.error("a key that is no text", "write key: value")
            if key.plain and key.text == "<<":
                raise key.mark.error("a merge key", "write the values out; `extends:` shares them")
            if key.text in keys:
                raise key.mark.error(
                    f"{shown(key.text)} is given twice", f"first on line {keys[key.text].line}: keep one"
                )
            keys[key.text] = key.mark
            items[key.text] = self.node(next(self.events), depth + 1)
        return Mapping(items=items, keys=keys, mark=mark)


def _broken(error: Any, file: str, text: str) -> InputError:
    """What the parser refuses, at the place that is wrong."""
    place = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if place is None:
        # The reader's own error: a character, and how many stand before it.
        position = getattr(error, "position", 0)
        before = text[:position]
        mark = Mark(file=file, line=before.count("\n") + 1, column=position - (before.rfind("\n") + 1) + 1)
        return mark.error("a character YAML does not allow", "take the control character out")
    mark = Mark(file=file, line=place.line + 1, column=place.column + 1)
    lines = text.splitlines()
    line = lines[place.line] if place.line < len(lines) else ""
    if "\t" in line[: len(line) - len(line.lstrip())] or line[place.column : place.column + 1] == "\t":
        return mark.error("a tab", "YAML indents with spaces: replace the tab")
    problem = str(getattr(error, "problem", None) or error).splitlines()[0]
    return mark.error(
        f"broken YAML: {problem}", "check indentation, quotes and colons on this line and above"
    )
