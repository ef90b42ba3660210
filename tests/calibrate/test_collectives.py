"""Collectives between two processes of this machine, over Gloo."""

import pytest

from capplan.calibrate import collectives_bench
from capplan.calibrate.clock import Timing
from capplan.calibrate.points import point
from capplan.errors import InputError
from capplan.formulas import op_cost
from capplan.local_calibration import device

pytest.importorskip("torch", reason="collectives run on torch")
HARDWARE = {
    "key": "cpu-x-2t", "kind": "cpu", "name": "x", "vendor": "x", "architecture": "CPU",
    "instructions": "avx2", "memory_bytes": 1 << 34, "bandwidth_bytes_per_s": 4e10,
    "flop_per_s": {"fp32": 1e11},
    "cache_bytes": 1 << 25, "units": 2,
}  # fmt: skip


def test_two_processes() -> None:
    points = collectives_bench.measure(ranks=2, device_type="cpu", sizes=(1024, 65_536, 1 << 20))
    assert {one.op for one in points} == set(collectives_bench.OPS)
    assert len(points) == 3 * len(collectives_bench.OPS)
    assert all(one.us_p50 and one.us_p50 > 0 and one.ranks == 2 and one.backend == "gloo" for one in points)
    fit = collectives_bench.fit(points, device(HARDWARE, "x"))
    assert set(fit) == {"all_reduce", "all_gather"}


def test_fit_finds_a_law_again() -> None:
    """20 µs, then 10 GB/s: the form reaches 1 MiB (105 µs) within a tenth."""
    points = [
        point("collective", ("all_reduce", "nccl", 2, size), Timing(samples=(max(20e-6, size / 1e10),)))
        for size in (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
    ]
    numbers = collectives_bench.fit(points, device(HARDWARE, "x"))["all_reduce"]["local"]["2"]
    made = op_cost.collective_s(
        bytes_moved=1 << 20, ranks=2, link_bytes_per_s=numbers["link_bytes_per_s"], fit=numbers
    )
    assert made == pytest.approx(105e-6, rel=0.1)


def test_one_rank_is_no_collective() -> None:
    with pytest.raises(InputError, match="two ranks"):
        collectives_bench.measure(ranks=1, device_type="cpu")


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="torch sees 1"):
        collectives_bench.measure(ranks=2, device_type="cuda")


def test_not_under_torchrun() -> None:
    with pytest.raises(InputError, match="torchrun"):
        collectives_bench.measure_here("cpu")
