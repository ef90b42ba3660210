"""Real vLLM runs replayed: tokens/s and TPOT within 6 %, TTFT within 10 % in overload; `-s` shows all."""

import numpy as np
import pytest

from tests.accuracy import real_runs
from tests.accuracy.real_runs import Figure, Replayed

pytestmark = pytest.mark.usefixtures("data")
NO_PEERS = (
    "its two cards have no NVLink, and their steps show no peer access either: 10 GB/s an all-reduce, where "
    "the calibration's box has 38"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Replayed]:
    """Every run by its name."""
    folder = tmp_path_factory.mktemp("traces")
    made = real_runs.everything(folder)
    print("\n" + "\n".join(real_runs.lines(made)))
    return {run.name: run for run in made}


@pytest.mark.parametrize(
    "name",
    [
        "rtx4090_llama-3.1-8b",
        pytest.param("rtxpro6000_qwen3-32b", marks=pytest.mark.xfail(strict=True, reason=NO_PEERS)),
    ],
)
def test_a_replayed_run_reaches_the_targets(runs: dict[str, Replayed], name: str) -> None:
    missed = [f"{figure.name} {100 * figure.error:+.1f} %" for figure in runs[name].missed]
    assert not missed, ", ".join(missed)


def test_every_request_is_served_and_all_runs_are_overloaded(runs: dict[str, Replayed]) -> None:
    assert {run.requests for run in runs.values()} == {300, 150}
    assert all(run.utilization > real_runs.OVERLOADED for run in runs.values() if run.requests == 300)
    assert {name for name, run in runs.items() if run.preemptions} == {"rtx4090_llama-3.1-8b"}


def test_kv_usage_is_compared_where_it_was_recorded(runs: dict[str, Replayed]) -> None:
    with_usage = {name: run for name, run in runs.items() if any("KV" in f.name for f in run.figures)}
    assert set(with_usage) == {"rtx4090_llama-3.1-8b"}
    usage = next(f for f in with_usage["rtx4090_llama-3.1-8b"].figures if "KV" in f.name)
    assert abs(usage.simulated - usage.measured) < 0.05


def test_a_miss_is_shown_as_one() -> None:
    figures = (
        Figure(name="tokens/s", measured=100.0, simulated=107.0, target=0.06),
        Figure(name="TTFT mean, s", measured=2.0, simulated=2.1, target=0.10),
        Figure(name="KV usage, mean", measured=0.5, simulated=1.0, target=None),
    )
    run = Replayed(name="run", utilization=2.0, figures=figures, requests=1, preemptions=0)
    assert [figure.name for figure in run.missed] == ["tokens/s"]
    rows = real_runs.lines([run])[-3:]
    assert rows[0] == "| run | tokens/s | 100 | 107 | +7.0 % **missed** | ≤ 6 % |"
    assert rows[1] == "| run | TTFT mean, s | 2 | 2.1 | +5.0 % | ≤ 10 % |"
    assert rows[2].endswith("| +100.0 % | shown only |")


def test_limits_are_those_of_the_run() -> None:
    limits = real_runs.limits_of("rtx4090_llama-3.1-8b")
    assert limits["kv_blocks"] == 2588
    assert limits["max_num_seqs"] == 256
    assert "kv_blocks" not in real_runs.limits_of("rtxpro6000_qwen3-32b")


def test_usage_is_sampled_by_the_second() -> None:
    ends, usage = np.array([0.5, 1.5, 2.5]), np.array([0.1, 0.2, 0.4])
    assert real_runs.sampled(ends, usage, 4).tolist() == [0.1, 0.2, 0.0, 0.0]
