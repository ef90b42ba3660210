"""Options of `capplan latency` one by one, and what every answer says of load and engine."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from capplan import cli
from capplan.errors import InputError
from capplan.latency_estimate import LatencyEstimate, latency
from capplan.latency_lines import lines

LOADS: dict[str, dict[str, Any]] = {
    "one user": {},
    "closed loop": {"concurrency": 32},
    "beyond the pool": {"concurrency": 2000},
    "open loop": {"request_per_s": 8.0},
    "above the stable rate": {"request_per_s": 400.0},
    "burst": {"requests": 500},
    "static batch": {"batch": 32},
}


def asked(**fields: Any) -> LatencyEstimate:
    return latency("8b", gpu="h100", figures_alone=True, **fields)


def printed(question: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert cli.run(question.split()) == code
    return capsys.readouterr().out


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("slo", [None, "chat"])
def test_every_answer_says_goodput_utilisation_and_the_knee(name: str, slo: str | None) -> None:
    made = asked(**LOADS[name], slo=slo)
    assert made.served is not None
    said = made.to_dict()["served"]
    assert said["stable_request_per_s"] > 0
    assert said["knee_distance"] == pytest.approx(1 / said["utilization"])
    assert 0 <= said["goodput_request_per_s"] <= said["request_per_s"] * (1 + 1e-9)
    if said["steady"]:
        assert said["utilization"] <= 1
        if slo is None:
            assert said["goodput_request_per_s"] == said["request_per_s"]
    else:
        assert said["utilization"] > 1
        assert said["goodput_request_per_s"] == 0
    text = "\n".join(lines(made))
    assert "utilisation" in text
    assert "goodput" in text
    json.dumps(made.to_dict(), allow_nan=False)


def test_the_knee_lies_at_the_stable_rate() -> None:
    calm = asked(request_per_s=8.0)
    assert calm.served is not None
    stable = calm.served.stable_request_per_s
    assert stable == pytest.approx(8.0 * calm.knee_distance)
    below, above = asked(request_per_s=0.99 * stable), asked(request_per_s=1.01 * stable)
    assert below.served is not None
    assert above.served is not None
    assert below.served.steady
    assert not above.served.steady
    assert above.throughput.estimate == pytest.approx(stable * 256)


def test_a_rate_is_given_and_its_band_ends_there() -> None:
    calm = asked(request_per_s=2.0)
    assert (calm.throughput.low, calm.throughput.high) == (pytest.approx(512), pytest.approx(512))
    assert calm.served is not None
    tight = asked(request_per_s=0.95 * calm.served.stable_request_per_s)
    assert tight.throughput.low is not None
    assert tight.throughput.estimate is not None
    assert tight.throughput.low < tight.throughput.estimate == tight.throughput.high


def test_an_overload_is_bound_by_what_runs_at_once_not_by_what_is_asked() -> None:
    over = asked(request_per_s=100_000.0)
    assert over.throughput.bound is not None
    assert over.throughput.estimate is not None
    assert over.throughput.estimate < over.throughput.bound < 100_000 * 256


def test_equal_requests_move_in_step() -> None:
    varied = asked(engine="sglang", concurrency=32)
    equal = asked(engine="sglang", concurrency=32, lengths="equal")
    assert varied.ttft.estimate is not None
    assert equal.ttft.estimate is not None
    # Prompts of all users come at once, and each waits for half of the others.
    assert equal.ttft.estimate > 1.5 * varied.ttft.estimate
    assert equal.to_dict()["workload"]["lengths"] == "equal"
    assert equal.ttft.bound == varied.ttft.bound


def test_the_engines_limits_hold() -> None:
    few = asked(concurrency=64, max_num_seqs=8)
    assert few.served is not None
    assert (few.served.running, few.served.limit) == (8, "max_num_seqs")
    assert few.served.queue_s > 0
    assert any("max_num_seqs 8" in note for note in few.notes)
    twice = asked(concurrency=64, max_num_seqs=8, dp=2)
    assert twice.served is not None
    assert twice.served.running == 16
    shared = asked(concurrency=64, max_num_seqs=8, dp=2, engine="sglang")
    assert shared.served is not None
    assert shared.served.running == 8
    chunked = asked(isl=8000, max_num_batched_tokens=512)
    assert chunked.ttft.estimate is not None
    assert chunked.ttft.estimate > (asked(isl=8000).ttft.estimate or 0)
    assert any(op.kind == "prefill attention" for op in chunked.prefill_ops)


def test_uneven_routing_loads_one_rank_more() -> None:
    bounds: list[float] = []

    def tpot(skew: float) -> float:
        made = latency(
            "deepseek-ai/DeepSeek-V3",
            gpu="h200",
            tp=8,
            ep=8,
            concurrency=256,
            expert_skew=skew,
            figures_alone=True,
        )
        assert made.tpot.estimate is not None
        assert made.tpot.bound is not None
        assert made.tpot.bound < made.tpot.estimate
        assert made.to_dict()["expert_skew"] == skew
        bounds.append(made.tpot.bound)
        return made.tpot.estimate

    even, mild, strong = tpot(0.0), tpot(0.6), tpot(1.2)
    assert even < mild < strong
    # All tokens may choose the same experts: the bound counts those of one.
    assert bounds[1] < 0.8 * bounds[0]
    with pytest.raises(InputError, match="no routed experts"):
        asked(expert_skew=1.01)
    for skew in (-0.1, 1.3, float("nan")):
        with pytest.raises(InputError, match="a skew of"):
            asked(expert_skew=skew)


def test_the_engines_fitted_numbers_are_shown_everywhere() -> None:
    made = asked(concurrency=8)
    fit = made.to_dict()["engine_fit"]
    assert (fit["engine"], fit["family"], fit["measured"]) == ("vllm", "Hopper 9.0", True)
    assert fit["host"]["fused"] == made.behaviour.host.fused
    assert fit["scheduling"]["first_token_s"] == made.behaviour.scheduling.first_token_s
    assert fit["scheduling"]["max_num_batched_tokens"] == 8192
    assert all(count > 0 for count in fit["runs_held_out"].values())
    said = next(line for line in lines(made) if line.startswith("fitted: "))
    assert "vllm on Hopper" in said
    assert f"{fit['runs_held_out']['ttft']:,} of TTFT" in said
    assert "vllm on Ada Lovelace 8.9 (no such runs" in "\n".join(
        lines(latency("8b", gpu="l4", figures_alone=True))
    )


def test_a_format_without_a_kernel_is_slower_in_prefill_by_the_numbers_said() -> None:
    made = latency("8b", gpu="a100-sxm-80gb", precision="fp8", isl=8192, osl=1, figures_alone=True)
    plain = latency("8b", gpu="a100-sxm-80gb", isl=8192, osl=1, figures_alone=True)
    said = next(note for note in made.notes if "multiplies no fp8" in note)
    assert said.count(" ms") == 4
    assert made.ttft.estimate is not None
    assert plain.ttft.estimate is not None
    assert made.ttft.estimate > plain.ttft.estimate
    alone = latency("8b", gpu="a100-sxm-80gb", precision="fp8", bounds=True)
    assert any("multiplies no fp8" in note and " ms" not in note for note in alone.notes)
    # What the note measured beside it is not what the answer was made of.
    assert made.to_dict()["notes"] == list(made.notes)
    assert not any("kernels as measured on" in note for note in made.notes)


@pytest.mark.parametrize("name", LOADS)
def test_csv_and_markdown_repeat_the_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = {
        "concurrency": "--concurrency",
        "request_per_s": "--request-rate",
        "requests": "--requests",
        "batch": "--batch",
    }
    load = " ".join(f"{options[key]} {value}" for key, value in LOADS[name].items())
    question = f"latency --model 8b --gpu h100 --slo chat --no-user-data {load}"
    told = json.loads(printed(f"{question} -o json", capsys))
    rows = list(csv.DictReader(io.StringIO(printed(f"{question} -o csv", capsys))))
    by_kind = {row["kind"]: row for row in rows}
    for figure in ("ttft_s", "tpot_s", "e2e_s", "output_token_per_s"):
        for key, kind in (("bound", "bound"), ("estimate", "estimate"), ("low", "p10"), ("high", "p90")):
            value = told[figure][key]
            assert by_kind[kind][figure] == ("" if value is None else str(value))
    assert sum(row["kind"] == "sweep" for row in rows) == len(told["sweep"])
    assert {f"change: {change['flag']}" for change in told["changes"]} <= set(by_kind)
    text = printed(f"{question} -o md", capsys)
    for note in told["notes"]:
        assert f"- note: {note}\n" in text
    assert text.count("\n| --- |") >= 2


def test_changes_come_the_shortest_wait_first() -> None:
    found = latency("8b", gpu="h100", concurrency=32).changes
    assert len(found) >= 4
    assert [change.e2e_s for change in found] == sorted(change.e2e_s for change in found)


def test_explain_repeats_the_answers_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    question = "latency --model 8b --gpu h100 --speculative-tokens 3 --acceptance-rate 0.7 --explain -o json"
    told = json.loads(printed(f"{question} --no-user-data", capsys))
    text = "\n".join(told["explain"])
    assert "Σ pⁱ for i = 0…3, p = 0.7: 2.533" in text
    assert f"{told['tpot_s']['estimate'] * 1e3:.2f} ms" in text
    assert f"{told['served']['utilization']:.0%}" in text
    assert "vllm on Hopper" in text


def test_reading_speed_is_a_multiple(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed("latency --model 8b --gpu h100 --slo reading --no-user-data", capsys)
    assert "× reading speed" in text


def test_every_key_of_the_json_is_documented() -> None:
    page = (Path(__file__).parent.parent / "docs" / "latency.md").read_text()
    told = asked(speculative_tokens=3, acceptance_rate=0.7, slo="chat").to_dict()
    keys = {*told, *told["served"], *told["engine_fit"], *told["ttft_s"]} - {"schema", "notes"}
    for key in sorted(keys):
        assert f"`{key}`" in page or f"`{key}[]`" in page, key


def test_a_static_batch_beyond_the_pool_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(printed("latency --model 8b --gpu h100 --batch 4000 -o json", capsys, code=4))
    assert told["fits"] is False
    assert told["ttft_s"]["estimate"] is None
    note = next(note for note in told["notes"] if "does not fit the KV pool" in note)
    largest = int(note.rpartition(" ")[2].replace(",", ""))
    assert asked(batch=largest).fits
    assert asked(batch=largest + 1).fits is False
    # Users beyond the pool wait instead.
    assert asked(concurrency=4000).fits
