"""Versions that an engine's numbers were fitted on, and what an answer makes of another one."""

import pytest

from capplan import catalog, engine_speed
from capplan.engine_speed import within
from capplan.latency_estimate import latency

ENGINES = ("vllm", "sglang", "tensorrt-llm")


@pytest.mark.parametrize(
    ("version", "verified", "inside"),
    [
        ("0.9.1", "0.9–0.19", True),
        ("v0.19.3", "0.9–0.19", True),
        ("0.8.5", "0.9–0.19", False),
        ("0.20", "0.9–0.19", False),
        ("1.0", "0.9–0.19", False),
        ("0.5.23", "0.5", True),
        ("0.4.9", "0.5", False),
        ("nightly-dev", "0.9–0.19", False),
    ],
)
def test_versions_inside_a_range_and_outside(version: str, verified: str, inside: bool) -> None:
    assert within(version, verified) is inside


@pytest.mark.parametrize("engine", ENGINES)
def test_every_fitted_engine_says_which_versions(engine: str) -> None:
    found = engine_speed.behaviour(engine, catalog.gpu("h100"), version="0.1")
    assert found.verified
    assert not found.covered


def test_an_engine_that_borrows_claims_no_versions() -> None:
    found = engine_speed.behaviour("tgi", catalog.gpu("h100"), version="3.3.7")
    assert (found.measured, found.verified, found.covered) == (False, "", True)


def test_another_version_widens_the_band_and_the_answer_says_so() -> None:
    inside, outside = (
        latency("8b", gpu="h100", engine_version=version, figures_alone=True) for version in ("0.19", "0.20")
    )
    for made in (inside, outside):
        assert made.tpot.estimate is not None
        assert made.tpot.high is not None
    said = "runs of vllm 0.9–0.19 were fitted, not of 0.20: a wider band"
    assert said in outside.notes
    assert not [note for note in inside.notes if "were fitted" in note]
    assert outside.tpot.estimate == pytest.approx(inside.tpot.estimate)
    assert (outside.tpot.high or 0) > (inside.tpot.high or 0)
