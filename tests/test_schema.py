"""The JSON Schema of scenario files and their loader accept the same files."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capplan.errors import InputError
from capplan.expectation import dimension_of
from capplan.scenario import load_scenarios
from capplan.scenario_keys import SECTIONS, SPELLINGS, children
from capplan.schema import COMMON_FIGURES, FILE_NAME, scenario_schema, schema_text

jsonschema = pytest.importorskip("jsonschema", reason="the dev extra brings it")
ROOT = Path(__file__).parent.parent
SCHEMA = scenario_schema()
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)


class Memory:
    """Files of a test: one JSON document, which is YAML too."""

    def __init__(self, data: Any) -> None:
        self.raw = json.dumps(data, ensure_ascii=False).encode()

    def read(self, path: str) -> bytes:
        if path != "test.yaml":
            raise InputError("not there", where=path, hint="")
        return self.raw

    def local(self, path: str) -> str:
        return path


def loads(data: Any) -> bool:
    try:
        load_scenarios("test.yaml", Memory(data))
    except InputError:
        return False
    return True


# What people write, right or wrong, under any key; every kind of the table is met by some of it.
POOL: list[Any] = [
    0, 1, 64, 0.9, 1.0, 1.5, -1, 1e3, 1e16, 2**53, 2**53 + 2, 1e30, True, False, None, "", " ", "8b", "auto",
    "all", "Local",
    "8k", "8K", "1.5k", "1.5K", "0k", "08k", "8 k", "70b",
    "1.5Mi", "500ms", "500 ms", "0.5s", "5", "5m", "1h",
    "24GiB", "24 GB", "24gib", "1.5TB", "no", "true", "1e3", "2026-01-31", "on-demand", "spot", "poisson",
    "chat",
    "p90", "5% of baseline", "5 % of baseline", "5% of 40GiB", "5% of 3s", "5% of 12",
    "a\u2028b", "a\nb", "\u0007",
    [], {}, [1], [1, 2], ["a"], ["a", ""], [True], ["8k", 1], [[1]], {"a": 1}, "é", "x" * 70,
]  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(POOL),
    st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False),
    st.integers(),
)


def valid(schema: dict[str, Any]) -> list[Any]:
    """The values of the pool that a schema takes, its examples included."""
    known = [example for part in (schema, *schema.get("anyOf", [])) for example in part.get("examples", [])]
    return [value for value in (*POOL, *known) if jsonschema.Draft7Validator(schema).is_valid(value)]


FITTING = {path: valid(spelling.kind.schema()) for path, spelling in SPELLINGS.items()}
OPERANDS = {
    name: {"number": valid(dimension.number.schema()), "scalar": valid(dimension.scalar.schema()),
           "within": valid(dimension.within.schema())}
    for name in ("vram.max_users", "latency.ttft_ms", "vram.total.bytes")
    for dimension in (dimension_of(name),)
}  # fmt: skip


def sometimes_wrong(fitting: list[Any]) -> st.SearchStrategy[Any]:
    """Nine of ten values that fit."""
    return st.integers(0, 9).flatmap(lambda dice: VALUES if dice == 0 else st.sampled_from(fitting))


def expectations(name: str) -> st.SearchStrategy[Any]:
    """What may stand under a figure of the dimension of `name`."""
    operands = OPERANDS[name]
    mappings = st.fixed_dictionaries(
        {},
        optional={
            "at_most": sometimes_wrong(operands["number"]),
            "at_least": sometimes_wrong(operands["number"]),
            "equals": sometimes_wrong(operands["scalar"]),
            "within": sometimes_wrong(operands["within"]),
            "between": sometimes_wrong([[1, 2], [1.5, 2e9]]),
            "confidence": sometimes_wrong(["p10", "p50", "p90"]),
            **({"att_most": VALUES} if name == "vram.max_users" else {}),
        },
    )
    return st.one_of(sometimes_wrong(operands["scalar"]), mappings)


FIGURES = st.sampled_from([
    *COMMON_FIGURES, "vram.total.gib", "latency.x_us", "vram", "vram.", "plan.x", "vram.a b",
    "latency.x_per_s",
    "latency.queue.p99_s", "vram.kv_cache.bytes_per_token", "vram.overhead.parts.cuda_graphs.bytes",
    "cost._s",
    "vram.x.",
])  # fmt: skip


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, name = path.split(".")
        here = made
        for section in sections:
            here = here.setdefault(section, {})
        here[name] = value
    return made


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """A scenario with a few keys of the table, some of them with values they do not take."""
    flat = {"model": "8b"} if draw(st.integers(0, 9)) else {}
    for path in draw(st.lists(st.sampled_from(sorted(SPELLINGS)), max_size=3)):
        flat[path] = draw(sometimes_wrong(FITTING[path]))
    made: dict[str, Any] = {"capplan": draw(sometimes_wrong([1]))} | nested(flat)
    if draw(st.booleans()):
        name = draw(st.sampled_from(sorted(OPERANDS)))
        figure = draw(st.sampled_from([name, name, name]) | FIGURES)
        made["expect"] = {figure: draw(expectations(name))}
    if draw(st.integers(0, 3)) == 0:
        path = draw(st.sampled_from(sorted(SPELLINGS)))
        made["matrix"] = {path: draw(st.lists(sometimes_wrong(FITTING[path]), max_size=2))}
    if draw(st.integers(0, 9)) == 0:
        made[draw(st.sampled_from(["modell", "fleet", "engine", "slo", "matrix", "expect"]))] = draw(VALUES)
    return made


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(documents())
def test_loader_and_schema_agree(data: dict[str, Any]) -> None:
    assert loads(data) == VALIDATOR.is_valid(data), data


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(documents())
def test_loader_and_schema_agree_on_many(data: dict[str, Any]) -> None:
    assert loads(data) == VALIDATOR.is_valid(data), data


def test_generated_files_are_partly_right_and_partly_wrong() -> None:
    """The agreement says something: both kinds of file are tried."""
    seen: list[bool] = []

    @settings(max_examples=100, deadline=None, database=None, derandomize=True)
    @given(documents())
    def collect(data: dict[str, Any]) -> None:
        seen.append(loads(data))

    collect()
    assert 0.2 < sum(seen) / len(seen) < 0.9


@pytest.mark.parametrize("path", sorted(SPELLINGS))
def test_every_key_takes_its_example_and_refuses_null(path: str) -> None:
    schema = SPELLINGS[path].kind.schema()
    parts = [schema, *schema.get("anyOf", [])]
    candidates = [example for part in parts for example in part.get("examples", part.get("enum", []))]
    candidates += [64, 0.9, True, [1], ["a"], "24GiB", "500ms", "8k", "70b", "2026-01-31"]
    taken = [value for value in candidates if loads({"capplan": 1, "params": 1} | nested({path: value}))]
    if path not in ("params",):
        assert taken, path
    for value in (*candidates, None, {"a": 1}):
        data = {"capplan": 1, "model": "8b"} | nested({path: value})
        assert loads(data) == VALIDATOR.is_valid(data), data


def test_every_section_refuses_a_key_it_does_not_have() -> None:
    for section in SECTIONS:
        child = next(iter(children(section)))
        assert child != "unknown"
        data = {"capplan": 1, "model": "8b"} | nested({f"{section}.unknown": 1})
        assert not loads(data)
        assert not VALIDATOR.is_valid(data)


def test_the_schema_is_a_schema_and_the_published_one_is_current() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    published = ROOT / "scenarios" / FILE_NAME
    assert published.read_text(encoding="utf-8") == schema_text(), f"capplan schema > scenarios/{FILE_NAME}"
