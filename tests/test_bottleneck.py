"""What a step waits for."""

import pytest

from capplan import bottleneck, catalog
from capplan.op_costs import Rates
from capplan.step import OpTime

RATES = Rates(catalog.gpu("h100"))


def op(kind: str, *, flop: float = 0, moved: float = 0, time_s: float = 1.0, dtype: str = "bf16") -> OpTime:
    memory = moved / RATES.bytes_per_s
    bound = max(memory, flop / RATES.flop_per_s(dtype))
    return OpTime(
        kind=kind, name=kind, dtype=dtype, count=1, flop=flop, bytes=moved, bound_s=bound, time_s=time_s
    )


def test_time_goes_to_the_limit_that_binds() -> None:
    reads = op("gemm", moved=RATES.bytes_per_s * 0.5, time_s=1.0)
    computes = op("gemm", flop=RATES.flop_per_s("bf16") * 1.5, time_s=2.0)
    link = op("collective", moved=1e9, time_s=1.0)
    found = bottleneck.shares((reads, computes, link), RATES)
    assert found[bottleneck.HBM] == pytest.approx(0.25)
    assert found[bottleneck.COMPUTE] == pytest.approx(0.5)
    assert found[bottleneck.LINK] == pytest.approx(0.25)


def test_kernels_far_from_their_bound_wait_for_launches() -> None:
    tiny = op("elementwise", moved=RATES.bytes_per_s * 0.01, time_s=1.0)
    host = op("host", time_s=1.0)
    found = bottleneck.shares((tiny, host), RATES)
    # Four times its bound of 10 ms counts as memory, the other 960 ms and the engine's second as launches.
    assert found[bottleneck.HBM] == pytest.approx(0.02)
    assert found[bottleneck.LAUNCH] == pytest.approx(0.98)


def test_regime_follows_the_sums() -> None:
    reads = op("gemm", moved=RATES.bytes_per_s)
    computes = op("gemm", flop=RATES.flop_per_s("bf16") * 1.1)
    assert bottleneck.regime((reads,), RATES) == "memory-bound"
    assert bottleneck.regime((reads, computes), RATES) == "compute-bound"


def test_an_empty_step_has_no_shares() -> None:
    assert set(bottleneck.shares((), RATES).values()) == {0.0}
