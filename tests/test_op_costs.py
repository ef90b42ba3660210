"""Whose numbers an operation takes, and what a GPU really runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from capplan import catalog, op_costs
from capplan.errors import InputError
from capplan.latency_estimate import latency
from capplan.op_costs import Bounds, OpCosts, Rates
from capplan.work import Collective, Elementwise, Experts, Gemm

GEMM = Gemm(name="x", n=4096, k=4096, dtype="bf16", weight_bits=16)


def test_a_measured_gpu_takes_its_own_numbers() -> None:
    found = OpCosts(catalog.gpu("h100"), "vllm").choice("gemm", "bf16")
    assert (found.gpu_id, found.engine, found.dtype) == ("h100-sxm-80gb", "vllm", "bf16")


def test_an_engine_takes_its_own_kernels_first() -> None:
    found = OpCosts(catalog.gpu("h100"), "tensorrt-llm").choice("gemm", "bf16")
    assert found.engine == "trtllm"


@pytest.mark.parametrize(("gpu", "choices"), [("b200-sxm-180gb", 2), ("h100", 1)])
def test_whole_experts_take_the_faster_of_an_engines_own_kernels(gpu: str, choices: int) -> None:
    # TensorRT-LLM's trtllm-gen kernels were measured in vLLM, on compute capability 10 alone.
    own, other = OpCosts(catalog.gpu(gpu), "tensorrt-llm"), OpCosts(catalog.gpu(gpu), "vllm")
    whole = Experts(
        count=1, hidden=7168, inter=2048, top_k=8, experts=256, tp=8, ep=1, gated=True,
        dtype="fp8_block", weight_bits=8, activation_bits=8, name="experts",
    )  # fmt: skip
    assert len(own._experts("fp8_block")) == choices
    if choices == 2:
        assert own.experts(whole, 4) <= other.experts(whole, 4)
        assert own.experts(replace(whole, tp=1, ep=8), 4) > other.experts(replace(whole, tp=1, ep=8), 4)


def test_a_dtype_comes_from_a_like_gpu_before_another_dtype() -> None:
    # Four-bit weights were measured on an H200, not on an H100.
    found = OpCosts(catalog.gpu("h100"), "vllm").choice("gemm", "w4a16")
    assert (found.gpu_id, found.dtype) == ("h200-sxm-141gb", "w4a16")


@pytest.mark.parametrize(
    ("gpu", "lender"),
    [
        ("gh200-96gb", "h100-sxm-80gb"),
        ("a100-sxm-40gb", "a100-sxm-80gb"),
        ("rtx-5090-32gb", "rtx-pro-6000-blackwell-server-96gb"),
    ],
)
def test_a_gpu_without_measurements_borrows_from_its_family(gpu: str, lender: str) -> None:
    costs = OpCosts(catalog.gpu(gpu), "vllm")
    assert costs.choice("gemm", "bf16").gpu_id == lender
    assert lender in costs.borrowed()


def test_every_gpu_with_a_peak_has_numbers_for_every_format() -> None:
    for name in catalog.ids("gpus"):
        gpu = catalog.load_gpu(name)
        if not any(gpu.flop_per_s.get(key) for key in ("bf16", "fp16", "fp32")):
            continue
        costs = OpCosts(gpu, "vllm")
        for dtype in op_costs.STAND_INS:
            time = costs.gemm(replace(GEMM, dtype=dtype), 8)
            assert 0 < time < 60, (name, dtype)


def test_formats_a_gpu_cannot_multiply_run_weight_only() -> None:
    ampere, hopper = Rates(catalog.gpu("a100-sxm-80gb")), Rates(catalog.gpu("h100"))
    assert ampere.runs("fp8") == "w8a16"
    assert ampere.runs("nvfp4") == "w4a16"
    assert hopper.runs("fp8") == "fp8"
    assert hopper.runs("nvfp4") == "w4a16"


def test_links_count_one_direction() -> None:
    assert Rates(catalog.gpu("h100")).link_bytes_per_s == 450e9
    # PCIe 4.0 × 16: 2 · 0.985 · 16 GB/s.
    assert Rates(catalog.gpu("l40s")).link_bytes_per_s == pytest.approx(31.52e9)


def test_bounds_by_hand() -> None:
    bounds = Bounds(catalog.gpu("a100-sxm-80gb"))
    moved = 4096 * 4096 * 2 + 2 * (4096 + 4096)
    assert bounds.gemm(GEMM, 1) == pytest.approx(moved / 2.039e12)
    reduce = Collective(name="block", op="all_reduce", bytes_each=8192, ranks=4)
    assert bounds.collective(reduce, 10) == pytest.approx(2 * 0.75 * 81_920 / 300e9)
    table = Elementwise(name="embedding", bytes_each=16, resident_bytes=2.039e9)
    assert bounds.elementwise(table, 0) == pytest.approx(1e-3)


def test_estimates_are_never_below_the_bound() -> None:
    for gpu in ("h100", "a100-sxm-80gb", "b200"):
        costs, bounds = OpCosts(catalog.gpu(gpu), "vllm"), Bounds(catalog.gpu(gpu))
        for m in (1, 16, 256, 4096):
            assert costs.gemm(GEMM, m) >= bounds.gemm(GEMM, m)


def test_a_message_is_one_ranks_half_of_an_all_gather_between_two() -> None:
    message = Collective(name="stage", op="send", bytes_each=8192, ranks=2)
    gathered = Collective(name="stage", op="all_gather", bytes_each=2 * 8192, ranks=2)
    costs = OpCosts(catalog.gpu("h100"), "vllm")
    assert costs.collective(message, 64) == costs.collective(gathered, 64)
    # No floor but the measured one: the shortest message takes an all-gather's t0.
    shortest = costs.order[0].fit["all_gather"]["nccl"][2]["t0_us"] * 1e-6
    assert costs.collective(message, 1e-3) == pytest.approx(shortest, rel=0.05)
    assert Bounds(catalog.gpu("h100")).collective(message, 64) == pytest.approx(8192 * 64 / 450e9)


def test_a_measured_message_stands_for_itself() -> None:
    own = {"send": {"nccl": {2: {"t0_us": 7.0, "memory": 1.0, "p": 1000.0}}}}
    measured = replace(op_costs.shipped()[0], gpu_id="h100-sxm-80gb", fit=own)
    costs = OpCosts(catalog.gpu("h100"), "vllm", (measured,))
    message = Collective(name="stage", op="send", bytes_each=1, ranks=2)
    assert costs.collective(message, 1) == pytest.approx(7e-6)
    assert costs.collective(message, 450e6) == pytest.approx(1e-3)


def test_links_and_processors_that_nobody_states_are_refused() -> None:
    alone = Rates(replace(catalog.gpu("l40s"), pcie_gen=None))
    with pytest.raises(InputError, match="the link between several L40S is not known") as caught:
        _ = alone.link_bytes_per_s
    assert caught.value.where == "--gpu l40s-48gb"
    with pytest.raises(InputError, match="multiprocessors of TPU v6e"):
        _ = Rates(catalog.gpu("tpu-v6e")).sms


def test_processors_that_are_not_known_are_the_lenders_and_the_answer_says_so() -> None:
    made = latency("8b", gpu="tpu-v6e", figures_alone=True)
    lender = OpCosts(catalog.gpu("tpu-v6e"), "vllm").sms_gpu
    assert f"the {lender.sm_count} of {lender.name} stand for them" in " ".join(made.notes)
    known = latency("8b", gpu="h100", figures_alone=True)
    assert not [note for note in known.notes if "multiprocessors" in note]


def test_more_ranks_than_measured_take_the_largest() -> None:
    costs = OpCosts(catalog.gpu("h100"), "vllm")
    few = Collective(name="block", op="all_reduce", bytes_each=8192, ranks=8)
    many = replace(few, ranks=16)
    assert costs.collective(many, 64) >= costs.collective(few, 64) > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("schema: capplan.calibration/2\n", "is not capplan.calibration/1"),
        ("schema: capplan.calibration/1\nid: x\n", "hardware"),
        ("- 1\n", "not a YAML mapping"),
        ("{", "broken YAML"),
    ],
)
def test_files_that_are_no_calibration_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        op_costs.load_calibration(path)
