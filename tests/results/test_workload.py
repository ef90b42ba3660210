"""How a run's requests were sent: as its client or document is known to, else as its columns say."""

from dataclasses import replace

import pytest

from capplan.results.measured import MeasuredRun
from capplan.results.notes import read_notes
from capplan.results.workload import attention_dp, requests_of, traffic_of

OVERVIEW = "github:NVIDIA/TensorRT-LLM/docs/source/performance/perf-overview.md@00f37686aa85"
RUN = MeasuredRun(
    line=2, source="somewhere", engine="vllm", engine_version=None, model="m", gpu="g", n_gpu=8, tp=8, pp=1,
    weight_dtype=None, kv_dtype=None, isl=1024.0, osl=1024.0, concurrency=None, request_per_s=None,
    output_token_per_s=None, total_token_per_s=None, ttft_s=None, tpot_s=None, e2e_s=None,
    mode="offline_max", statistic="mean", notes=read_notes(""),
)  # fmt: skip


def noted(text: str) -> MeasuredRun:
    return replace(RUN, notes=read_notes(text))


def test_columns_alone_are_requests_of_one_length() -> None:
    traffic = traffic_of(RUN, 1024, 1024)
    assert (traffic.isl, traffic.osl, traffic.equal) == (1024, 1024, True)


def test_a_client_of_varied_lengths() -> None:
    traffic = traffic_of(noted("origin=InferenceX/InferenceMAX dump; measured=2026-03-01"), 1000, 1000)
    # Uniform from 800 to 1,000: mean 900, deviation 200 / √12.
    assert (traffic.isl, traffic.osl, traffic.requests_per_user) == (900, 900, 10)
    assert traffic.variation == pytest.approx(57.735 / 900, rel=1e-4)
    assert not traffic.equal


def test_a_client_of_equal_lengths() -> None:
    traffic = traffic_of(noted("origin=in-house collection by NVIDIA; measured="), 4000, 500)
    assert (traffic.isl, traffic.osl, traffic.equal, traffic.requests_per_user) == (4000, 500, True, 20)


@pytest.mark.parametrize(
    ("isl", "equal"),
    [
        pytest.param(217.4, False, id="conversations"),
        pytest.param(127.7, True, id="128, less what the tokenizer merges"),
        pytest.param(1996.3, True, id="2,000"),
        pytest.param(8204.0, True, id="8,192 and a template"),
        pytest.param(342.1, False, id="longer conversations"),
    ],
)
def test_means_of_varied_lengths(isl: float, equal: bool) -> None:
    traffic = traffic_of(noted("requests=1000; isl/osl are means"), isl, 200)
    assert traffic.equal == equal
    assert traffic.variation == 1


def test_requests_as_stated_else_as_the_document_says() -> None:
    assert requests_of(noted("requests=984")) == 984
    assert requests_of(RUN) is None
    assert requests_of(replace(RUN, source=OVERVIEW)) == 3000
    assert requests_of(replace(RUN, source=OVERVIEW, isl=777.0)) is None


@pytest.mark.parametrize(
    ("version", "source", "expected"),
    [
        ("1.0", OVERVIEW, True),
        ("0.17", OVERVIEW, False),
        (None, OVERVIEW, False),
        ("1.0", "somewhere else", False),
    ],
)
def test_attention_ranks_of_the_document(version: str | None, source: str, expected: bool) -> None:
    assert attention_dp(replace(RUN, engine_version=version, source=source)) is expected


def test_attention_ranks_as_the_run_says() -> None:
    assert not attention_dp(replace(noted("attn_dp=1"), engine_version="1.0", source=OVERVIEW))
    assert attention_dp(noted("attn_dp=8"))
