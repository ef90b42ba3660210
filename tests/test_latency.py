"""The answer of `capplan latency`: bounds worked by hand, loads, limits, changes, and what is refused."""

import json
import math
from itertools import pairwise

import pytest

from capplan import cli
from capplan.errors import InputError
from capplan.latency_estimate import LatencyEstimate, latency


def figures(made: LatencyEstimate) -> dict[str, float]:
    return {
        name: figure.estimate or math.nan
        for name, figure in (
            ("ttft", made.ttft),
            ("tpot", made.tpot),
            ("e2e", made.e2e),
            ("rate", made.throughput),
        )
    }


def test_the_lessons_bound_and_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    question = "latency --model 70b --precision fp16 --gpu a100-sxm-80gb --bounds -o json".split()
    assert cli.run(question) == 4
    answer = json.loads(capsys.readouterr().out)
    # 141 GB over 2,039 GB/s, and the caches of a thousand tokens.
    assert 0.069 <= answer["tpot_s"]["bound"] <= 0.070
    assert math.floor(1 / answer["tpot_s"]["bound"]) == 14
    assert answer["tpot_s"]["estimate"] is None
    assert answer["fits"] is False


def test_every_figure_has_bound_estimate_and_band() -> None:
    made = latency("8b", gpu="h100", concurrency=16)
    for figure in (made.ttft, made.tpot, made.e2e):
        assert figure.bound is not None
        assert figure.estimate is not None
        assert figure.low is not None
        assert figure.high is not None
        assert 0 < figure.bound < figure.estimate
        assert figure.low < figure.high
        assert figure.provenance == "estimate"
    assert made.throughput.estimate is not None
    assert made.throughput.bound is not None
    assert made.throughput.estimate < made.throughput.bound


def test_one_user_decodes_at_the_decode_step() -> None:
    made = latency("8b", gpu="h100", isl=512, osl=128)
    assert made.served is not None
    step = sum(op.time_s for op in made.decode_ops)
    assert made.tpot.estimate == pytest.approx(step, rel=0.03)


def test_the_public_line_of_an_8b_on_one_h100() -> None:
    # ITL = 6.44 ms + 4.37e-5 ms × context (vLLM 0.19.1, one user).
    short = latency("8b", gpu="h100", isl=1000, osl=2).decode_ops
    long = latency("8b", gpu="h100", isl=101_000, osl=2).decode_ops
    first, second = (1e3 * sum(op.time_s for op in ops) for ops in (short, long))
    slope = (second - first) / 100_000
    assert slope == pytest.approx(4.37e-5, rel=0.10)
    assert first - slope * 1001 == pytest.approx(6.44, rel=0.10)


def test_more_users_share_the_throughput_and_wait_longer() -> None:
    points = latency("8b", gpu="h100", concurrency=2).sweep
    assert [point.users for point in points[:4]] == [1, 2, 4, 8]
    for few, many in pairwise(points):
        assert many.ttft_s >= few.ttft_s * (1 - 1e-9)
        assert many.output_token_per_s >= few.output_token_per_s * 0.98


def test_an_open_loop_above_the_stable_rate_has_no_steady_state() -> None:
    made = latency("8b", gpu="h100", request_per_s=500)
    assert made.served is not None
    assert not made.served.steady
    assert made.ttft.estimate is None
    assert any("no steady state" in note for note in made.notes)
    json.dumps(made.to_dict(), allow_nan=False)


def test_an_open_loop_below_it_says_how_far() -> None:
    made = latency("8b", gpu="h100", request_per_s=5)
    assert made.served is not None
    assert made.served.steady
    assert 0 < made.served.utilization < 1
    assert made.served.request_per_s == pytest.approx(5)
    assert made.throughput.bound == pytest.approx(5 * 256)


def test_bursts_and_batches_are_always_answered() -> None:
    burst = latency("8b", gpu="h100", requests=2000)
    assert burst.ttft.estimate is not None
    assert burst.served is not None
    assert burst.served.queue_s > 0
    batch = latency("8b", gpu="h100", batch=64)
    assert batch.tpot.estimate is not None
    assert batch.ttft.estimate is not None
    assert batch.e2e.estimate == pytest.approx(batch.ttft.estimate + 255 * batch.tpot.estimate)


def test_users_beyond_the_kv_pool_wait_and_the_pool_is_named() -> None:
    made = latency("8b", gpu="l4", isl=4096, osl=512, concurrency=64)
    assert made.served is not None
    assert made.served.limit == "kv"
    assert made.served.running < 64
    assert made.bottleneck == "KV capacity"
    assert made.feasible


def test_one_output_token_has_no_tpot(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("latency --model 8b --gpu h100 --osl 1 -o json".split()) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["tpot_s"] is None
    assert answer["regime"] == {"prefill": "compute-bound", "decode": None}
    assert {op["phase"] for op in answer["ops"]} == {"prefill"}
    assert answer["bottleneck"] == "compute"


def test_limits_are_met_missed_or_impossible() -> None:
    assert latency("8b", gpu="h100", concurrency=4, slo="chat").meets is True
    missed = latency("8b", gpu="h100", concurrency=256, slo="tpot=35ms")
    assert (missed.meets, missed.feasible) == (False, True)
    impossible = latency("8b", gpu="h100", slo="tpot=1ms")
    assert impossible.below_bound
    assert not impossible.feasible


def test_cached_prompts_and_the_network_move_ttft_only() -> None:
    plain = figures(latency("8b", gpu="h100", isl=4096))
    cached = figures(latency("8b", gpu="h100", isl=4096, prefix_shared=4000))
    far = figures(latency("8b", gpu="h100", isl=4096, network_s=0.1))
    assert cached["ttft"] < plain["ttft"]
    assert cached["tpot"] == pytest.approx(plain["tpot"], rel=0.02)
    assert far["ttft"] == pytest.approx(plain["ttft"] + 0.1, rel=1e-6)


def test_a_format_without_a_kernel_is_emulated_and_said() -> None:
    made = latency("8b", gpu="a100-sxm-80gb", precision="fp8")
    assert any("multiplies no fp8" in note for note in made.notes)
    # Weights of 8 bits still halve what decode reads.
    plain = latency("8b", gpu="a100-sxm-80gb")
    assert figures(made)["tpot"] < figures(plain)["tpot"]


def test_a_borrowed_gpu_widens_the_band_and_says_from_whom() -> None:
    own, borrowed = latency("8b", gpu="h100"), latency("8b", gpu="gh200-96gb")
    assert any("h100-sxm-80gb" in note for note in borrowed.notes)

    def width(made: LatencyEstimate) -> float:
        assert made.tpot.high is not None
        assert made.tpot.low is not None
        return made.tpot.high / made.tpot.low

    assert width(borrowed) >= width(own)


def test_quantized_and_sparse_models_are_answered() -> None:
    for name, gpu, fields in (
        ("deepseek-ai/DeepSeek-V3", "h200", {"tp": 8}),
        ("deepseek-ai/DeepSeek-R1", "b200", {"dp": 8, "ep": 8}),
        ("openai/gpt-oss-120b", "h100", {}),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "h200", {"tp": 2}),
    ):
        made = latency(name, gpu=gpu, concurrency=8, **fields)
        assert made.tpot.estimate is not None, name
        assert made.tpot.bound is not None
        assert made.tpot.bound < made.tpot.estimate


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ("--batch 0", "--batch"),
        ("--isl 0", "--isl"),
        ("--osl 0", "--osl"),
        ("--concurrency 4 --batch 8", "--concurrency, --batch"),
        ("--request-rate 0", "--request-rate"),
        ("--request-rate nan", "--request-rate"),
        ("--request-rate inf", "--request-rate inf"),
        ("--isl 200000", "--isl, --osl"),
        ("--tp 16", "--tp, --dp"),
        ("--tp 3", "--tp 3"),
        ("--prefix-shared 5000", "--prefix-shared"),
        ("--network-ms -1", "--network-ms"),
        ("--network-ms nan", "--network-ms"),
        ("--slo chatt", "--slo"),
        ("--precision int3", "--precision"),
        ("--profile l40s-48gb", "--profile, --gpu"),
        ("--profile nobody", "--profile"),
        ("--engine vlm", "--engine"),
        ("--ep 3", "--ep"),
    ],
)
def test_bad_questions_are_three_lines(options: str, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["latency", "--model", "8b", "--gpu", "h100", *options.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.rstrip().splitlines()
    assert len(lines) == 3, captured.err
    assert where in lines[1]


def test_a_calibration_file_of_another_gpu_is_refused(tmp_path: object) -> None:
    with pytest.raises(InputError, match="the question of"):
        latency("8b", gpu="h100", profile="a100-sxm-80gb")


def test_layers_left_on_the_host_are_not_given_a_speed() -> None:
    made = latency("70b", gpu="rtx-4090", engine="llama.cpp", precision="q4_k_m")
    assert made.tpot.estimate is None
    assert not made.feasible
    assert any("stay on the host" in note for note in made.notes)
    whole = latency("8b", gpu="rtx-4090", engine="llama.cpp", precision="q4_k_m")
    assert whole.tpot.estimate is not None


def test_a_static_batch_of_one_waits_for_its_own_prompt() -> None:
    alone = latency("8b", gpu="h100", isl=16, osl=8, batch=1)
    assert alone.ttft.bound is not None
    assert alone.ttft.estimate is not None
    assert alone.ttft.estimate > alone.ttft.bound


def test_bands_end_where_physics_does() -> None:
    made = latency("mistralai/Mistral-7B-v0.1", gpu="l40s", concurrency=8, isl=512)
    for figure in (made.ttft, made.tpot, made.e2e):
        assert figure.bound is not None
        assert figure.low is not None
        assert figure.estimate is not None
        assert figure.bound <= figure.low <= figure.estimate
    assert made.throughput.bound is not None
    assert made.throughput.high is not None
    assert made.throughput.high <= made.throughput.bound
