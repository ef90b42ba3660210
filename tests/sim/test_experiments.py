"""The lessons' claims over sweeps: the rows, where a claim holds, and the same again."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from capplan.errors import DoesNotFitError, InputError
from capplan.sim import experiments
from capplan.sim.experiment import Claim, Experiment
from capplan.sim.trial import Trial, against, run_trial, subject


def experiment(rows: list[dict[str, Any]]) -> Experiment:
    return Experiment(
        name="any",
        source="none",
        claims=(Claim(text="it is large", column="large"),),
        variables=("batch", "cv"),
        measure="gain",
        rows=tuple(rows),
        model="m",
        gpu="g",
    )


@cache
def whole(name: str) -> Experiment:
    """An experiment's whole sweep, on all cores; once for the tests that read it."""
    return experiments.run(name)


def test_where_a_claim_holds_is_counted_by_value() -> None:
    made = experiment(
        [
            {"batch": 8, "cv": 0.0, "gain": 1.0, "large": False},
            {"batch": 8, "cv": 1.0, "gain": 2.0, "large": True},
            {"batch": 32, "cv": 0.0, "gain": 1.5, "large": False},
            {"batch": 32, "cv": 1.0, "gain": 3.0, "large": True},
        ]
    )
    assert made.where(made.claims[0]) == {
        "batch": {"8": (1, 2), "32": (1, 2)},
        "cv": {"0.0": (0, 2), "1.0": (2, 2)},
    }
    assert made.holds == (
        "it is large: holds in 2 of 4 workloads (batch: 8 1/2, 32 1/2; cv: 0.0 0/2, 1.0 2/2)",
    )
    assert made.span == (1.0, 3.0)


@pytest.mark.parametrize(("large", "word"), [(True, "all"), (False, "none")])
def test_a_claim_that_always_or_never_holds(large: bool, word: str) -> None:
    made = experiment([{"batch": 8, "cv": 0.0, "gain": 1.0, "large": large}] * 3)
    assert made.holds == (f"it is large: holds in {word} of 3 workloads",)


def test_the_straggler_over_its_sweep() -> None:
    told: list[tuple[int, int]] = []
    made = experiments.run("straggler", jobs=1, told=lambda done, of: told.append((done, of)))
    assert told[-1] == (36, 36)
    assert (made.model, made.gpu) == ("meta-llama/Llama-3.1-8B", "h100-sxm-80gb")
    for row in made.rows:
        # A batch with one long request among short ones is the worst: no mix idles more on average.
        assert 0 < row["bubble"] <= row["bubble_of_one_straggler"] + 0.02
        assert row["bubble_at_least_48"] == (row["bubble"] >= experiments.LESSON_BUBBLE)
        # Rows that idle are what continuous batching fills: kernels are not faster for fewer rows.
        assert row["gain"] > 1
    assert pytest.approx(580 / 1200) == experiments.LESSON_BUBBLE
    assert 0 < sum(row["bubble_at_least_48"] for row in made.rows) < len(made.rows)
    assert json.loads(json.dumps(made.to_dict()))["claims"][0]["workloads"] == 36


def test_larger_batches_give_more_tokens_and_longer_gaps() -> None:
    made = experiments.run("batch-against-tpot", jobs=1)
    assert all(row["more_tokens"] and row["longer_tpot"] for row in made.rows)
    gains = [row["tokens_gain"] for row in made.rows if (row["isl"], row["osl"]) == (512, 256)]
    # A row a doubling: nearly twice while memory bounds the step, much less in the end.
    assert len(made.rows) == 27
    assert min(row["batch"] for row in made.rows) == 2
    assert gains[0] > 1.8
    assert gains[-1] < 1.5


def test_the_same_seed_in_processes_gives_the_same_bytes() -> None:
    here, apart, other = (
        json.dumps(experiments.run("straggler", jobs=jobs, seed=seed).to_dict())
        for jobs, seed in ((1, 5), (2, 5), (1, 6))
    )
    assert here == apart
    assert here != other


def test_static_and_continuous_on_one_workload_that_does_not_vary() -> None:
    on = subject("8b", "h100")
    trial = Trial(scheduler="static", isl="256", osl="128", requests=64, max_num_seqs=16)
    static, continuous = run_trial(trial, on), run_trial(against(trial, scheduler="vllm_v1"), on)
    assert static.bubble == 0
    assert continuous.output_token_per_s == pytest.approx(static.output_token_per_s, rel=0.1)


@pytest.mark.parametrize("reserve", ["max", "pow2", "exact"])
def test_the_shares_of_memory_are_all_of_it(reserve: Any) -> None:
    trial = Trial(
        scheduler="orca",
        isl="uniform:128-384",
        osl="lognormal:mean=256,cv=1,max=1500",
        requests=300,
        max_model_len=2048,
        reserve=reserve,
        kv_share=0.1,
    )
    for name in ("orca", "vllm_v1"):
        made = run_trial(against(trial, scheduler=name), subject("8b", "h100"))
        shares = (made.held, made.reserved, made.internal, made.tail, made.external)
        assert all(share is not None and share >= 0 for share in shares)
        assert sum(share or 0 for share in shares) == pytest.approx(1, abs=2e-3)
        assert made.wasted == pytest.approx(1 - (made.held or 0))


def test_reserving_less_wastes_less_and_paging_least() -> None:
    trial = Trial(
        scheduler="orca",
        isl="uniform:128-384",
        osl="lognormal:mean=256,cv=1,max=1500",
        requests=600,
        max_model_len=2048,
        kv_share=0.1,
    )
    on = subject("8b", "h100")
    wasted = [run_trial(against(trial, reserve=reserve), on).wasted for reserve in ("max", "pow2", "exact")]
    wasted.append(run_trial(against(trial, scheduler="vllm_v1"), on).wasted)
    assert wasted == sorted(wasted, key=lambda share: -(share or 0))
    assert (wasted[0] or 0) > 0.6


def test_unknown_names_and_what_does_not_fit() -> None:
    with pytest.raises(InputError, match="no experiment 'stragler'") as caught:
        experiments.run("stragler")
    assert "did you mean straggler?" in str(caught.value)
    with pytest.raises(DoesNotFitError, match="does not start"):
        experiments.run("straggler", model="70b", gpu="l4")


def test_a_gpu_that_holds_less_than_the_longest_request(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(subject("8b", "h100"), kv_tokens=5000)
    monkeypatch.setattr(experiments, "subject", lambda model, gpu: small)
    with pytest.raises(DoesNotFitError, match="has room for 5,000 tokens of KV") as caught:
        experiments.run("straggler")
    assert "--gpu h100" in str(caught.value)


@pytest.mark.parametrize(("gpu", "kv_tokens"), [("l4", 12_000), ("b200", 10_000_000)])
def test_how_much_memory_a_gpu_has_does_not_change_what_share_is_wasted(gpu: str, kv_tokens: int) -> None:
    plan = experiments.EXPERIMENTS["contiguous-waste"]
    point = next(point for point in plan.points() if point["reserve"] == "max")
    row = plan.row(point, replace(subject("8b", gpu), kv_tokens=kv_tokens), 0)
    here = plan.row(point, subject("8b", "h100"), 0)
    assert row["contiguous_wasted"] == pytest.approx(here["contiguous_wasted"], abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(experiments.EXPERIMENTS))
def test_every_experiment_runs_and_says_where_its_claims_hold(name: str) -> None:
    made = whole(name)
    assert len(made.holds) == len(made.claims)
    for row in made.rows:
        assert all(row[variable] is not None for variable in made.variables)
        assert row[made.measure] > 0
    json.dumps(made.to_dict(), allow_nan=False)


@pytest.mark.slow
def test_what_the_lessons_claim_holds_somewhere_and_not_everywhere() -> None:
    shares = {}
    for name in ("contiguous-waste", "continuous-over-static", "over-hf-generate"):
        made = whole(name)
        for claim in made.claims:
            shares[claim.column] = sum(bool(row[claim.column]) for row in made.rows) / len(made.rows)
    assert shares.pop("paged_wastes_under_4") == 1
    assert all(0.1 < share < 0.9 for share in shares.values()), shares
