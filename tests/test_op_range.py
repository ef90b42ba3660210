"""What of an operation's shape lies outside the shapes measured, and what the answer makes of it."""

import pytest

from capplan import catalog
from capplan.latency_estimate import latency
from capplan.op_costs import Bounds, OpCosts
from capplan.op_range import outside
from capplan.work import Collective, Gemm

GPU = catalog.load_gpu("h100-sxm-80gb")
GEMM = Gemm(name="up", n=4096, k=4096, dtype="bf16", weight_bits=16)


@pytest.mark.parametrize(
    ("m", "said"),
    [
        (1, ""),
        (8192, ""),
        (16_384, ""),
        (16_385, "m 16,385 (1 to 8,192)"),
        (40_000, "m 40,000 (1 to 8,192)"),
        (0.1, ""),
    ],
)
def test_rows_beyond_twice_the_range_are_named(m: float, said: str) -> None:
    costs = OpCosts(GPU, "vllm")
    costs.gemm(GEMM, m)
    assert outside(costs, "gemm", (GEMM, m)) == said


def test_physics_holds_everywhere() -> None:
    assert outside(Bounds(GPU), "gemm", (GEMM, 1e9)) == ""


def test_collectives_go_by_their_bytes_and_ranks() -> None:
    costs = OpCosts(GPU, "vllm")
    for ranks, said in ((8, ""), (16, ""), (72, "ranks 72 (8 to 8)")):
        shape = Collective(name="block", op="all_reduce", bytes_each=8192, ranks=ranks)
        costs.collective(shape, 64)
        assert outside(costs, "collective", (shape, 64)) == said
    assert "bytes_moved 8,192,000,000,000" in outside(costs, "collective", (shape, 1e9))


def test_small_kernels_are_not_judged() -> None:
    assert outside(OpCosts(GPU, "vllm"), "elementwise", (None, 1.0)) == ""


def test_the_band_widens_outside_and_the_answer_says_so() -> None:
    def told(chunk: int) -> tuple[float, list[str]]:
        asked = {"engine_version": "0.19", "isl": 60_000, "max_num_batched_tokens": chunk}
        made = latency("8b", gpu="h100", figures_alone=True, **asked)
        assert made.e2e.high is not None
        assert made.e2e.estimate is not None
        notes = [note for note in made.notes if note.startswith("outside what was measured")]
        return made.e2e.high / made.e2e.estimate, notes

    inside, silent = told(8192)
    beyond, said = told(60_000)
    assert silent == []
    assert beyond > inside
    assert "m 60,000 (1 to 8,192)" in said[0]
