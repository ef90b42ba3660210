"""Measured online runs simulated: their launches and requests by hand, errors no larger than they are."""

from collections import Counter
from statistics import median

import pytest

from capplan.sim.around import around
from capplan.sim.request import Request
from tests.accuracy import oracles, serving, simulated
from tests.accuracy.launches import Launch, launch_of
from tests.accuracy.serving import Row
from tests.accuracy.simulated import Beside

# Skipped with a reason where the measured data is absent, red in CI: see conftest.py.
pytestmark = pytest.mark.usefixtures("data")

INFERENCEX = "InferenceX/InferenceMAX dump"
IN_HOUSE = "in-house collection by NVIDIA"


def a_row(engine: str, origin: str, **given: object) -> Row:
    """The first closed loop of an engine and origin with these fields."""
    rows, _ = serving.rows()
    return next(
        row
        for row in rows
        if row.run.mode == "online_closed_loop"
        and (row.run.engine, row.run.notes.origin) == (engine, origin)
        and all(getattr(row.run, name) == value for name, value in given.items())
    )


def sent(row: Row, launch: Launch) -> list[Request]:
    """The requests of the row's run, each answered at once."""
    found = simulated.requests_of(row.run, launch, 1)
    assert found is not None
    made = list(found.arrivals())
    for request in made:
        request.done_s = request.first_token_s = request.arrival_s + 1
        request.made_tokens = request.output_tokens
        following = found.after(request, request.arrival_s + 1)
        if following is not None:
            made.append(following)
    return made


def test_limits_of_a_launch_by_hand() -> None:
    row = a_row("vllm", IN_HOUSE, engine_version="0.12.0", isl=1024, concurrency=8)
    assert launch_of(row) == Launch(client=IN_HOUSE, max_num_batched_tokens=1024 + 8 + 1500)
    row = a_row("tensorrt-llm", IN_HOUSE, isl=1024, concurrency=8)
    assert launch_of(row).max_num_batched_tokens == 2560  # 2532, up to a multiple of 32
    row = a_row("tensorrt-llm", INFERENCEX, isl=8192, concurrency=64, engine_version="1.2.0rc6.post3")
    assert launch_of(row).max_num_batched_tokens == 8320
    row = a_row("tensorrt-llm", INFERENCEX, isl=1024, concurrency=64, engine_version="1.2.0rc6.post3")
    assert launch_of(row).max_num_batched_tokens == 8192


def test_looks_of_a_launch_follow_its_users() -> None:
    few = a_row("sglang", INFERENCEX, model="Qwen/Qwen3.5-397B-A17B", concurrency=8, weight_dtype="bf16")
    many = a_row("sglang", INFERENCEX, model="Qwen/Qwen3.5-397B-A17B", concurrency=16, weight_dtype="bf16")
    assert (launch_of(few).poll_steps, launch_of(many).poll_steps) == (10, 30)


def test_runs_of_another_publisher_have_its_client() -> None:
    row = a_row("vllm", IN_HOUSE, engine_version="0.15.1")
    assert launch_of(row).client == INFERENCEX


def test_equal_requests_are_sent_twenty_times_by_each_user() -> None:
    row = a_row("vllm", IN_HOUSE, engine_version="0.12.0", isl=1024, osl=128, concurrency=8)
    made = sent(row, launch_of(row))
    assert Counter((r.prompt_tokens, r.output_tokens) for r in made) == {(1024, 128): 160}
    assert [r.arrival_s for r in made[:9]] == [0] * 8 + [1]


def test_varied_requests_are_drawn_from_four_fifths_up() -> None:
    row = a_row("vllm", INFERENCEX, isl=1024, osl=1024, concurrency=64)
    made = sent(row, launch_of(row))
    assert len(made) == 640
    for lengths in ([r.prompt_tokens for r in made], [r.output_tokens for r in made]):
        assert 819 <= min(lengths) < 830
        assert 1014 < max(lengths) <= 1024
        assert sum(lengths) / len(lengths) == pytest.approx(921.5, rel=0.01)


def test_ratios_and_errors_by_hand() -> None:
    rows, _ = serving.rows()
    one = Beside(row=rows[0], figure="TTFT", simulated=1.2, closed=0.7, measured=1.0)
    assert one.error == pytest.approx(0.2)
    assert one.closed_error == pytest.approx(0.3)


def test_the_engines_that_were_fitted_are_known() -> None:
    for engine in serving.ENGINES:
        for experts in (False, True):
            found = around(engine, experts=experts)
            assert found is not None
            assert 0 <= found.first_token_s < 1
            assert found.looking(30).poll_steps == 30
    assert around("tgi", experts=False) is None


Figures = tuple[tuple[Beside, ...], int]


def error(found: Figures, figure: str, *, moe: bool) -> float:
    """The simulator's median error."""
    own = [one.error for one in found[0] if one.figure == figure and one.row.moe == moe]
    assert len(own) > 400
    return median(own)


LIMITS = pytest.mark.parametrize(
    ("figure", "moe", "shipped", "held_out"),
    [
        ("TTFT", False, 0.17, 0.24),
        ("TTFT", True, 0.29, 0.29),
        ("TPOT", False, 0.09, 0.12),
        ("TPOT", True, 0.13, 0.14),
    ],
)


# Medians by the shipped numbers, and over both halves by numbers fitted on the other; a little above them.
@pytest.mark.slow
@LIMITS
def test_medians_stay(figure: str, moe: bool, shipped: float, held_out: float) -> None:
    assert error(simulated.shipped(), figure, moe=moe) <= shipped
    assert error(simulated.held_out(), figure, moe=moe) <= held_out


@pytest.mark.slow
def test_the_readme_has_this_table() -> None:
    readme = (oracles.ROOT / "README.md").read_text(encoding="utf-8")
    made = "\n".join(simulated.readme_lines())
    assert made in readme, "put the first table of `python -m tests.accuracy.simulated` into README.md"


@pytest.mark.slow
def test_dense_models_beat_the_closed_form() -> None:
    for found in (simulated.shipped(), simulated.held_out()):
        own = [one for one in found[0] if one.figure == "TTFT" and not one.row.moe]
        assert median(one.error for one in own) < median(one.closed_error for one in own)


@pytest.mark.slow
def test_nearly_every_online_row_is_simulated() -> None:
    found, left = simulated.held_out()
    assert left < 0.01 * len({one.row.run.line for one in found})
    assert all(one.simulated > 0 for one in found)
