"""Topics compute what they say, every formula has one, and --explain repeats the answer's own numbers."""

import importlib
import inspect
import math
import pkgutil
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import capplan.formulas
from capplan import catalog
from capplan.errors import InputError
from capplan.estimate import VramEstimate, vram
from capplan.explain import Topic, explain_vram, find, topics


def formula_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function defined in capplan.formulas, as "module.name"."""
    for info in pkgutil.iter_modules(capplan.formulas.__path__):
        module = importlib.import_module(f"capplan.formulas.{info.name}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if not name.startswith("_") and function.__module__ == module.__name__:
                yield f"{info.name}.{name}", function


# Forms that calibrations fill with fitted numbers, and arithmetic without a subject: no topics of their own.
FORMS = ("op_cost", "attention_cost", "measured_cost", "blend", "search")
ALL = dict(formula_functions())
FORMULAS = {name: function for name, function in ALL.items() if name.split(".")[0] not in FORMS}


def each_topic() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("topic", topics(), ids=lambda topic: topic.id)


def each_formula() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", FORMULAS)


def test_every_formula_has_a_topic_and_every_topic_a_formula() -> None:
    named = {name for topic in topics() for name in topic.functions}
    assert named == set(FORMULAS)
    assert all(topic.functions for topic in topics())


@each_formula()
def test_a_formula_says_what_it_is(name: str) -> None:
    function = FORMULAS[name]
    doc = inspect.getdoc(function) or ""
    assert any(line.startswith("    ") for line in doc.splitlines()), "no formula as text"
    for label in ("Holds for: ", "Source: ", "Example: "):
        assert label in doc
    parameters = inspect.signature(function).parameters.values()
    assert parameters
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters)


@pytest.mark.parametrize("name", sorted(set(ALL) - set(FORMULAS)))
def test_a_form_takes_named_arguments_and_is_described(name: str) -> None:
    function = ALL[name]
    assert inspect.getdoc(function)
    parameters = inspect.signature(function).parameters.values()
    if name.endswith("_s"):
        assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters)


@each_topic()
def test_a_topic_computes_finite_numbers_with_its_own_formulas(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: set[str] = set()

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            called.add(name)
            return function(**arguments)

        return call

    for name, function in FORMULAS.items():
        module = inspect.getmodule(function)
        monkeypatch.setattr(module, function.__name__, recorded(name, function))
    lines = topic.compute()
    assert lines
    for line in lines:
        assert math.isfinite(line.value)
        assert line.text
        assert line.unit
    assert set(topic.functions) <= called
    assert len({line.text for line in lines}) == len(lines)


@each_topic()
def test_a_topic_is_whole(topic: Topic) -> None:
    assert topic.title
    assert topic.formula
    assert topic.holds
    assert topic.source
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", topic.id)
    assert topic.to_dict()["example"] == [line._asdict() for line in topic.compute()]


@each_topic()
def test_a_topic_is_found_by_id_and_alias(topic: Topic) -> None:
    for name in (topic.id, *topic.aliases):
        assert find(name) is topic
        assert find(name.upper().replace("-", "_")) is topic
        assert find(name.replace("-", " ")) is topic


def test_no_name_means_two_topics() -> None:
    names = [re.sub("[-_ ]", "", name.lower()) for topic in topics() for name in (topic.id, *topic.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["kv-cach", "tpott", "pagedatention"])
def test_a_misspelt_topic_gets_the_nearest(name: str) -> None:
    with pytest.raises(InputError) as caught:
        find(name)
    assert "did you mean" in caught.value.hint
    assert repr(name) in caught.value.message


@pytest.mark.parametrize("name", ["", " ", "\0", "x" * 10_000, "../kv", "%s{0}"])
def test_nonsense_is_an_input_error(name: str) -> None:
    with pytest.raises(InputError) as caught:
        find(name)
    assert len(str(caught.value).splitlines()) == 3
    assert len(str(caught.value)) < 500


STUDIO = {
    "params": 8 * 10**9,
    "kv_from": "llama-3-8b",
    "precision": "int4",
    "overhead_bytes": 1_500_000_000,
    "gpu_memory_bytes": 24 * 10**9,
}
QUESTIONS: dict[str, dict[str, Any]] = {
    "the studio": STUDIO,
    "a catalog model, no GPU": {"model": "llama-3-8b"},
    "AWQ on an L4": {"model": "llama-3-8b", "precision": "awq", "gpus": ("l4",)},
    "two cards, four ranks, a shared prefix, a ragged context": {
        "model": "llama-3-70b",
        "precision": "fp16",
        "tp": 4,
        "gpus": ("a100-sxm-80gb", "h100"),
        "prefix_shared": 1000,
        "context": 4099,
    },
    "replicated KV heads": {"model": "llama-3-8b", "tp": 16, "gpus": ("l4",)},
    "a given share of overhead": {"model": "llama-3-8b", "overhead_fraction": 0.1, "gpus": ("l4",)},
    "fp8 KV cache that does not fit": {
        "model": "llama-3-70b",
        "kv_dtype": "fp8",
        "gpus": ("l4",),
    },
    "sliding and full layers": {"model": "gpt-oss-20b", "gpus": ("h100",), "context": 5000},
    "a latent": {"model": "deepseek-v3", "tp": 8, "gpus": ("h200",)},
    "latents and states": {"model": "kimi-linear-48b-a3b", "gpus": ("h200",), "users": 3},
    "a checkpoint in its own format": {
        "model": "casperhansen/llama-3-8b-instruct-awq",
        "gpus": ("l4",),
    },
    "parameters alone": {"params": 70 * 10**9, "gpu_memory_bytes": 80 * 10**9},
}


def each_question() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS.keys())


@each_question()
def test_the_lines_hold_the_numbers_of_the_answer(question: dict[str, Any]) -> None:
    estimate = vram(**question)
    text = "\n".join(explain_vram(estimate))
    answer = estimate.to_dict()
    figures = [
        answer["weights"]["bytes"],
        answer["weights"]["headline_bytes"],
        answer["per_gpu"]["weights"]["bytes"],
        answer["per_gpu"]["overhead"]["low_bytes"],
        answer["per_gpu"]["overhead"]["high_bytes"],
        answer["per_gpu"]["total"]["bytes"],
        answer["per_gpu"]["total"]["low_bytes"],
        *(role["bytes"] for role in answer["weights"]["roles"]),
    ]
    if answer["kv_cache"]:
        figures += [answer["per_gpu"]["kv_cache"]["bytes"], answer["kv_cache"]["bytes_per_token"]]
    for gpu in answer["gpus"]:
        figures += [gpu["usable_bytes"], abs(gpu["headroom_bytes"])]
        if answer["kv_cache"]:
            figures += [gpu["kv_pool"]["bytes"], gpu["max_users"], gpu["max_context"]]
    for figure in figures:
        assert f"{figure:,}" in text, figure
    assert "nan" not in text
    assert "inf" not in text


@each_question()
def test_the_arithmetic_of_the_lines_holds(question: dict[str, Any]) -> None:
    estimate = vram(**question)
    lines = explain_vram(estimate)
    totals = [line for line in lines if line.startswith("total")]
    parts, _, total = totals[0].partition(": ")[2].partition(" = ")
    assert sum(int(part.replace(",", "")) for part in parts.split(" + ")) == int(
        total.split(" B")[0].replace(",", "")
    )
    checked = 0
    for line in lines:
        if " · " in line and " = " in line and "KV per entry" not in line and "P ·" not in line:
            left, _, right = line.partition(": ")[2].rpartition(" = ")
            product = math.prod(float(re.sub(r"[^0-9.]", "", factor)) for factor in left.split(" · "))
            assert product == pytest.approx(float(right.split(" B")[0].replace(",", "")), abs=1)
            checked += 1
        if "headroom = " in line:
            usable, demand, rest = re.split(r" − | = ", line.partition("headroom = ")[2])
            gone = int(usable.replace(",", "")) - int(demand.replace(",", ""))
            assert gone == int(rest.split(" B")[0].replace(",", ""))
            checked += 1
    assert checked


def entry_bytes(lines: tuple[str, ...]) -> float:
    """KV bytes per token summed over the lines of the single cache shapes."""
    total = 0.0
    for line in lines:
        if line.startswith("KV per entry"):
            every = re.search(r"every (\d+) tokens", line)
            size = float(line.rpartition(" = ")[2].removesuffix(" B").replace(",", ""))
            total += size / (int(every.group(1)) if every else 1)
    return total


@pytest.mark.parametrize("model", catalog.ids("models"))
def test_kv_lines_of_every_catalog_model_sum_to_its_bytes_per_token(model: str) -> None:
    estimate = vram(model, context=64)
    assert estimate.whole_layout is not None
    assert entry_bytes(explain_vram(estimate)) == pytest.approx(
        estimate.whole_layout.bytes_per_token, abs=1e-3
    )


def test_the_studio_line_by_line() -> None:
    lines = explain_vram(vram(**STUDIO))
    assert lines[0] == (
        "weights, headline at 4 bits: P · B / 8 = 8,000,000,000 · 4 / 8 = 4,000,000,000 B (3.73 GiB)"
    )
    assert "KV per entry, full: 32 layers · (8 heads · (128 + 128) · 16 bits / 8) = 131,072 B" in lines
    assert "KV cache, full: 131,072 B · 4,096 entries · 16 users = 8,589,934,592 B (8.00 GiB)" in lines
    assert "total: 4,000,000,000 + 8,589,934,592 + 0 + 1,500,000,000 = 14,089,934,592 B (13.12 GiB)" in lines
    assert lines[-2].endswith("536,870,912 B in blocks: 34")


def test_max_users_is_the_last_that_fits() -> None:
    def total(users: int) -> VramEstimate:
        return vram(**STUDIO, users=users)

    assert total(34).fits is True
    assert total(35).fits is False
