"""The JSON Schema of scenario files, made from the table of keys that the loader reads with.

Editors complete and check by it: the first line of a file names it, as `capplan init` writes it.
"""

import itertools
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from capplan.expectation import (
    CONFIDENCES,
    OPERATORS,
    OTHER_PATH,
    SIZE_PATH,
    TIME_PATH,
    Dimension,
    dimension_of,
)
from capplan.scenario_keys import KEYS, SECTIONS, SPELLINGS, VERSION, children
from capplan.scenario_values import Many, Text

DIALECT: Final = "http://json-schema.org/draft-07/schema#"
"""Draft 7: what YAML language servers support best."""
FILE_NAME: Final = "scenario.schema.json"
_ANNOTATIONS: Final = ("description", "examples")
_WORTH: Final = 60
"""Characters from which a repeated part is shared."""
# Offered by editors first; any figure of an answer may be named.
COMMON_FIGURES: Final = {
    "vram.fits": "Whether the GPUs hold model, KV cache and overhead.",
    "vram.total.bytes": "Need of all GPUs of a replica together; vram.total.gib in GiB.",
    "vram.max_users": "Most users of a replica with a full context each.",
    "vram.max_context": "Longest context of these users.",
    "vram.headroom_bytes": "What is left on the fullest GPU.",
    "vram.per_gpu.kv_pool.tokens": "Tokens in the KV pool of a GPU.",
    "vram.engine.starts": "Whether the engine starts.",
    "latency.ttft_ms": "Time to first token.",
    "latency.tpot_ms": "Time per output token.",
    "latency.e2e_s": "Time of a whole answer.",
    "latency.output_token_per_s": "Output tokens a second of a replica.",
    "cost.usd_per_month": "The bill of the whole fleet.",
    "cost.usd_per_million_output_token": "Cost of a million output tokens.",
}
# What a path pattern is matched by, one of each dimension.
_EXAMPLES: Final = {TIME_PATH: "latency.ttft_s", SIZE_PATH: "vram.total.bytes", OTHER_PATH: "vram.fits"}


def scenario_schema() -> dict[str, Any]:
    """The JSON Schema of version 1."""
    return _shared(_whole())


def _whole() -> dict[str, Any]:
    """The schema with every part written out where it is used."""
    properties = _section("")["properties"]
    subject = [{"required": ["model"]}, {"required": ["params"]}]
    from_file = [*subject, {"required": ["extends"]}]
    return {
        "$schema": DIALECT,
        "title": "capplan scenario",
        "description": "A deployment, its load, and what is expected of the answers.",
        "type": "object",
        "additionalProperties": False,
        "required": ["capplan"],
        # Of a file that extends another or has a matrix, the model may come from there.
        "anyOf": [*from_file, {"required": ["matrix"], "properties": {"matrix": {"anyOf": subject}}}],
        **_units_once(children("")),
        "properties": {
            "capplan": {"const": VERSION, "description": "Version of the format."},
            "extends": Text(example="_base.yaml").schema()
            | {"description": "A file whose keys this one's replace, relative to it."},
            **properties,
            "matrix": _matrix(),
            "expect": _expect(),
        },
    }


def schema_text() -> str:
    """The schema as a file."""
    return json.dumps(scenario_schema(), indent=2, ensure_ascii=False) + "\n"


def _shared(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with parts that occur more than once under `definitions`, each by its number."""
    counts: Counter[str] = Counter()

    def seen(node: Any) -> None:
        for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            if isinstance(inner, dict):
                counts[json.dumps(_bare(inner))] += 1
            seen(inner)

    seen(schema)
    definitions: dict[str, dict[str, Any]] = {}
    names: dict[str, str] = {}

    def shared(node: Any) -> Any:
        if isinstance(node, list):
            return [shared(inner) for inner in node]
        if not isinstance(node, dict):
            return node
        text = json.dumps(_bare(node))
        is_schema = isinstance(node.get("type"), str) or isinstance(node.get("anyOf"), list)
        if not is_schema or len(text) < _WORTH or counts[text] < 2:
            return {key: shared(inner) for key, inner in node.items()}
        if text not in names:
            names[text] = f"part{len(names) + 1}"
            definitions[names[text]] = {}
            definitions[names[text]] = {key: shared(inner) for key, inner in _bare(node).items()}
        said = {key: node[key] for key in _ANNOTATIONS if key in node}
        return {"$ref": f"#/definitions/{names[text]}", **said}

    made: dict[str, Any] = shared(schema)
    return made | {"definitions": definitions}


def _bare(node: dict[str, Any]) -> dict[str, Any]:
    """A schema without what only people read."""
    return {key: value for key, value in node.items() if key not in _ANNOTATIONS}


def _section(name: str) -> dict[str, Any]:
    """A mapping of the format, strict; a quantity in one spelling."""
    made: dict[str, Any] = {}
    for child, path in children(name).items():
        if path in SECTIONS:
            made[child] = _section(path) | {"description": SECTIONS[path]}
        else:
            spelling = SPELLINGS[path]
            made[child] = spelling.kind.schema() | {"description": KEYS[spelling.key].doc}
    return {
        "type": "object",
        "additionalProperties": False,
        "minProperties": 1,
        **_units_once(children(name)),
        "properties": made,
    }


def _units_once(names: Mapping[str, str]) -> dict[str, Any]:
    """No quantity in two units; `names` are keys and the spellings they are."""
    by_name: dict[str, list[str]] = {}
    for name, path in names.items():
        if path not in SECTIONS:
            by_name.setdefault(SPELLINGS[path].name, []).append(name)
    pairs = [pair for same in by_name.values() for pair in itertools.combinations(same, 2)]
    return {"allOf": [{"not": {"required": list(pair)}} for pair in pairs]} if pairs else {}


def _matrix() -> dict[str, Any]:
    return {
        "type": "object",
        "description": "Values to combine, by key with its section: workload.users: [16, 32].",
        "additionalProperties": False,
        "minProperties": 1,
        **_units_once({path: path for path in SPELLINGS}),
        "properties": {path: Many(of=spelling.kind).schema() for path, spelling in SPELLINGS.items()},
    }


def _expect() -> dict[str, Any]:
    named = {
        key: _expectation(dimension_of(key)) | {"description": doc} for key, doc in COMMON_FIGURES.items()
    }
    return {
        "type": "object",
        "description": "Figures of vram, latency and cost by their path in the JSON, and what must hold.",
        "additionalProperties": False,
        "minProperties": 1,
        "properties": named,
        "patternProperties": {
            pattern: _expectation(dimension_of(example)) for pattern, example in _EXAMPLES.items()
        },
    }


def _expectation(dimension: Dimension) -> dict[str, Any]:
    """A value that must be equalled, or operators with an optional confidence."""
    number = dimension.number.schema()
    values: dict[str, Any] = {
        "at_most": number,
        "at_least": number,
        "between": {"type": "array", "minItems": 2, "maxItems": 2, "items": number},
        "equals": dimension.scalar.schema(),
        "within": dimension.within.schema(),
    }
    properties = {name: values[name] | {"description": doc} for name, doc in OPERATORS.items()}
    properties["confidence"] = Text(choices=CONFIDENCES).schema() | {
        "description": "p90: the pessimistic side of the band; p10: the optimistic; p50: the estimate."
    }
    mapping = {
        "type": "object",
        "additionalProperties": False,
        "anyOf": [{"required": [name]} for name in OPERATORS],
        "properties": properties,
    }
    return {"anyOf": [dimension.scalar.schema(), mapping]}
