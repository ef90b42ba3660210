"""Scenario files (capplan: 1) → Scenario: a deployment, its load, and what is expected of the answers.

`extends: FILE` takes another file's keys, this one's win; `matrix:` makes one scenario for each combination
of values. Paths in a file are relative to it. Keys are scenario_keys.KEYS, strict; every error names
file:line:column. Nothing is evaluated here.
"""

import hashlib
import json
import math
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final, Protocol

from capplan.errors import InputError, did_you_mean, shown
from capplan.expectation import Expectation, read_expectation
from capplan.scenario_keys import NAMES, SECTIONS, SPELLINGS, VERSION, children
from capplan.scenario_values import WHOLE, Text, scaled
from capplan.scenario_yaml import Mapping as Tree
from capplan.scenario_yaml import Mark, Node, Scalar, Sequence, read_tree

MAX_VARIANTS: Final = 1000
MAX_EXTENDS: Final = 8
SPECIAL: Final = ("capplan", "extends", "matrix", "expect")
_PATHS: Final = ("model", "kv_from", "draft_model", "lora", "calibration")


class Files(Protocol):
    """Where files come from: a folder, or a commit."""

    def read(self, path: str) -> bytes:
        """The bytes of a file; InputError where there is none."""

    def local(self, path: str) -> str:
        """A path on this machine with the same content, for a model or a calibration."""


class Disk:
    """Files as they are on the disk."""

    def read(self, path: str) -> bytes:
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", where=path, hint="check the path") from None

    def local(self, path: str) -> str:
        return path


class Held(Disk):
    """One file that is not written yet, whatever it is called; others as they are on the disk."""

    def __init__(self, text: str) -> None:
        self.text = text

    def read(self, path: str) -> bytes:
        return self.text.encode()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Scenario:
    """One scenario: `values` by dotted key, in SI; `marks` say where each stands.

    `file` is the path as it was given; `variant` what the matrix chose, by key as written. `paths` are the
    values that are paths as the file has them; in `values` they are paths from here.
    """

    file: str
    values: Mapping[str, Any]
    marks: Mapping[str, Mark]
    expectations: tuple[Expectation, ...]
    variant: Mapping[str, str]
    paths: Mapping[str, Any]

    @property
    def title(self) -> str:
        """Its name, else the file's, with what the matrix chose."""
        stem = self.file.replace("\\", "/").rpartition("/")[2]
        return str(self.values.get("name", stem.rsplit(".", 1)[0])) + self.chosen

    @property
    def chosen(self) -> str:
        """The matrix's choice in brackets; "" without one."""
        if not self.variant:
            return ""
        return "[" + ", ".join(f"{key.rpartition('.')[2]}={text}" for key, text in self.variant.items()) + "]"

    @property
    def asked(self) -> dict[str, Any]:
        """The values fit for JSON and the same on every machine: paths as the file has them."""
        return {key: _plain(self.paths.get(key, value)) for key, value in self.values.items()}

    @property
    def content_hash(self) -> str:
        """sha256 of the values: what is asked, not how the file is written."""
        return hashlib.sha256(canonical(self.asked).encode()).hexdigest()

    def mark(self, *keys: str) -> Mark:
        """Where the first of these keys that is given stands; the file's start without any."""
        return next((self.marks[key] for key in keys if key in self.marks), Mark(file=self.file))

    def to_dict(self) -> dict[str, Any]:
        """The scenario as JSON: values by section, in SI."""
        made: dict[str, Any] = {"schema": "capplan.scenario/1", "file": self.file, "name": self.title}
        for key, value in self.asked.items():
            *sections, name = key.split(".")
            here = made
            for section in sections:
                here = here.setdefault(section, {})
            here[name] = value
        made["expect"] = [expectation.key for expectation in self.expectations]
        return made

    def __repr__(self) -> str:
        return (
            f"Scenario({self.title!r}, model={self.values.get('model')!r}, expects={len(self.expectations)})"
        )

    def _repr_html_(self) -> str:
        """Notebook view: keys and values."""
        from html import escape

        rows = "".join(
            f"<tr><td>{escape(key)}</td><td>{escape(str(value))}</td></tr>"
            for key, value in self.values.items()
        )
        return f"<table><caption>{escape(self.title)}</caption>{rows}</table>"


def canonical(data: Any) -> str:
    """JSON that is the same for the same data, for hashes."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, tuple):
        return list(value)
    return value.isoformat() if hasattr(value, "isoformat") else value


def load_scenario(path: str | Path) -> Scenario:
    """The one scenario of a file.

    Errors: InputError, also for a file whose matrix makes several (see load_scenarios).
    Example: load_scenario("scenarios/llama-8b-chat.yaml").values["model"]
    """
    made = load_scenarios(path)
    if len(made) != 1:
        raise (
            made[0]
            .mark("matrix")
            .error(f"the matrix makes {len(made)} scenarios", "load_scenarios gives all of them")
        )
    return made[0]


def load_scenarios(path: str | Path, files: Files | None = None) -> tuple[Scenario, ...]:
    """Every scenario of a file: one, or one for each combination of its matrix."""
    return _Reader(files or Disk()).scenarios(str(path))


Placed = dict[str, tuple[Node, Mark]]
"""A key as written → its value, and where the key stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Raw:
    """What a file says, over what it extends: keys, expectations, and the matrix."""

    keys: Placed
    expect: Placed
    matrix: Placed


class _Reader:
    """Files → scenarios."""

    def __init__(self, files: Files) -> None:
        self.files = files

    def scenarios(self, path: str) -> tuple[Scenario, ...]:
        raw = self.merged(path, ())
        expectations = tuple(read_expectation(key, node, mark) for key, (node, mark) in raw.expect.items())
        return tuple(
            self.scenario(path, keys, chosen, raw.matrix, expectations) for keys, chosen in _variants(raw)
        )

    def merged(self, path: str, below: tuple[str, ...]) -> _Raw:
        """The file over the one it extends."""
        tree = read_tree(self.files.read(path), path)
        _check_version(tree)
        keys = _keys(tree)
        expect, matrix = _part(tree, "expect"), _part(tree, "matrix")
        _check_matrix(matrix)
        _check_once(keys, "")
        _check_once(matrix, "matrix.")
        for written, (node, _) in keys.items():
            _value(written, node)  # also where another file or the matrix replaces it
        for key, (node, mark) in expect.items():
            read_expectation(key, node, mark)
        if "extends" not in tree.items:
            return _Raw(keys=keys, expect=expect, matrix=matrix)
        mark, chain = tree.keys["extends"], (*below, path)
        target = _beside(path, Text(example="base.yaml").read(tree.items["extends"], "extends"))
        if target in chain or len(chain) > MAX_EXTENDS:
            raise mark.error(f"extends goes round: {' → '.join((*chain, target))}", "break the chain")
        try:
            base = self.merged(target, chain)
        except InputError as error:
            if error.where == target:  # not there: an error of the line that names it
                raise mark.error(f"{target} {error.message}", "give a path relative to this file") from None
            raise
        return _Raw(
            keys=_over(base.keys, keys), expect=base.expect | expect, matrix=_over(base.matrix, matrix)
        )

    def scenario(
        self,
        path: str,
        keys: Placed,
        chosen: Mapping[str, str],
        matrix: Placed,
        expectations: tuple[Expectation, ...],
    ) -> Scenario:
        values: dict[str, Any] = {}
        paths: dict[str, Any] = {}
        marks = {"matrix": next(iter(matrix.values()))[1]} if matrix else {}
        for written, (node, mark) in keys.items():
            name = SPELLINGS[written].name
            values[name], marks[name] = _value(written, node), mark
            if SPELLINGS[written].key in _PATHS:
                paths[name] = values[name]
                values[name] = self.path(values[name], mark.file)
        if "model" not in values and "params" not in values:
            raise Mark(file=path).error("no model", "add `model: NAME`, or `params: 70b` for a size alone")
        return Scenario(
            file=path,
            values={name: values[name] for name in sorted(values, key=NAMES.__getitem__)},
            marks=marks,
            expectations=expectations,
            variant=chosen,
            paths=paths,
        )

    def path(self, value: Any, file: str) -> Any:
        """A value that is a path, or a list of them, from here; a name stays."""
        if isinstance(value, tuple):
            return tuple(self.path(entry, file) for entry in value)
        return self.files.local(_beside(file, value)) if _is_path(value) else value


def _value(written: str, node: Node) -> Any:
    """A key's value in SI."""
    spelling = SPELLINGS[written]
    read = spelling.kind.read(node, written)
    if spelling.factor is None:
        return read
    value = scaled(read, spelling.factor)
    return round(value) if spelling.name.endswith("_bytes") else float(value)


def _is_path(value: str) -> bool:
    """Whether a name is a path: by how it looks, never by what lies on the disk."""
    drive = len(value) > 2 and value[1] == ":" and value[0].isalpha() and value[2] in "\\/"
    known = (".json", ".safetensors", ".gguf", ".yaml", ".yml")
    return value.startswith((".", "/", "~", "\\")) or drive or value.endswith(known)


def _beside(file: str, path: str) -> str:
    """A path as a file means it: relative to the file; absolute ones and ~ stay."""
    drive = len(path) > 2 and path[1] == ":"
    if path.startswith(("/", "~", "\\")) or drive:
        return path
    folder = posixpath.dirname(file.replace("\\", "/"))
    return posixpath.normpath(posixpath.join(folder, path))


def _check_version(tree: Tree) -> None:
    if "capplan" not in tree.items:
        raise tree.mark.error("no version", f"start the file with `capplan: {VERSION}`")
    node = tree.items["capplan"]
    if WHOLE.read(node, "capplan") != VERSION:
        text = node.text if isinstance(node, Scalar) else ""
        raise node.mark.error(f"version {text} of scenario files", f"this capplan reads version {VERSION}")


def _keys(tree: Tree, section: str = "") -> Placed:
    """Every key of a file but the special ones, by dotted spelling."""
    known = children(section)
    made: Placed = {}
    for name, node in tree.items.items():
        if not section and name in SPECIAL:
            continue
        path = known.get(name)
        if path is None:
            where = f" in {section}" if section else ""
            names = [*known, *(() if section else SPECIAL)]
            raise tree.keys[name].error(f"unknown key {shown(name)}{where}", _nearest(name, names))
        if path not in SECTIONS:
            made[path] = (node, tree.keys[name])
            continue
        if not isinstance(node, Tree):
            first = next(iter(children(path)))
            raise node.mark.error(f"{path} is a mapping", f"write {name}: {{{first}: …}}")
        if not node.items:
            raise node.mark.error(f"{path} is empty", "leave the key out")
        made.update(_keys(node, path))
    return made


def _nearest(name: str, names: list[str]) -> str:
    """The nearest keys of this section, else the same key elsewhere, else all of this section."""
    elsewhere = [path for path in SPELLINGS if path.rpartition(".")[2] == name]
    otherwise = (
        f"it goes in {elsewhere[0].rpartition('.')[0]}:" if elsewhere else f"known: {', '.join(names)}"
    )
    return otherwise if elsewhere else did_you_mean(name, names, otherwise)


def _part(tree: Tree, name: str) -> Placed:
    """The entries of `expect` or `matrix`."""
    node = tree.items.get(name)
    if node is None:
        return {}
    if not isinstance(node, Tree):
        raise node.mark.error(f"{name} is no mapping", f"write keys below {name}:")
    if not node.items:
        raise node.mark.error(f"{name} is empty", "leave the key out")
    return {key: (inner, node.keys[key]) for key, inner in node.items.items()}


def _check_matrix(matrix: Placed) -> None:
    for key, (node, mark) in matrix.items():
        if key not in SPELLINGS:
            sections = [path for path in SPELLINGS if path.rpartition(".")[2] == key]
            hint = did_you_mean(key, SPELLINGS, "write a key with its section: workload.users")
            hint = f"write it with its section: {' or '.join(sections)}" if sections else hint
            raise mark.error(f"unknown key {shown(key)} in matrix", hint)
        if not isinstance(node, Sequence) or not node.items:
            raise node.mark.error(f"matrix.{key} is no list of values", f"write {key}: [a, b]")
        for item in node.items:
            SPELLINGS[key].kind.read(item, key)


def _check_once(keys: Placed, prefix: str) -> None:
    """No quantity in two units."""
    lines: dict[str, int] = {}
    for written, (_, mark) in keys.items():
        name = SPELLINGS[written].name
        if name in lines:
            raise mark.error(f"{prefix}{written} is given twice", f"as on line {lines[name]}: keep one")
        lines[name] = mark.line


def _over(base: Placed, own: Placed) -> Placed:
    """The keys of a file over those it extends; another spelling of the same quantity wins too."""
    names = {SPELLINGS[key].name for key in own}
    return {key: value for key, value in base.items() if SPELLINGS[key].name not in names} | own


def _variants(raw: _Raw) -> Iterator[tuple[Placed, dict[str, str]]]:
    """Keys of each combination of the matrix, the last key fastest, and what was chosen."""
    lists = [node.items for node, _ in raw.matrix.values() if isinstance(node, Sequence)]
    if math.prod(map(len, lists)) > MAX_VARIANTS:
        first = next(iter(raw.matrix.values()))[1]
        raise first.error(f"{math.prod(map(len, lists)):,} combinations", f"at most {MAX_VARIANTS:,} a file")
    for chosen in product(*lists):
        picked: Placed = {key: (node, node.mark) for key, node in zip(raw.matrix, chosen, strict=True)}
        yield _over(raw.keys, picked), {key: _text(node) for key, (node, _) in picked.items()}


def _text(node: Node) -> str:
    """A value as written, for the variant's name."""
    if isinstance(node, Scalar):
        return node.text
    return "+".join(_text(item) for item in node.items) if isinstance(node, Sequence) else ""
