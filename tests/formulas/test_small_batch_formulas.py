"""One sequence alone: hand-worked values and properties."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.formulas import small_batch

RTX_4090: dict[str, Any] = {
    "weight_bytes": 4.6e9,
    "flop": 15e9,
    "kv_bytes": 0,
    "kernels": 291,
    "bytes_per_s": 1.008e12,
    "flop_per_s": 82.6e12,
    "bandwidth_fraction": 0.8,
    "compute_fraction": 0.05,
    "kv_fraction": 0.5,
    "launch_s": 5e-6,
}
PROMPT: dict[str, Any] = {
    "flop": 8e12,
    "attention_flop": 0.2e12,
    "weight_bytes": 4.6e9,
    "kernels": 291,
    "chunks": 1,
    "bytes_per_s": 1.008e12,
    "flop_per_s": 165e12,
    "bandwidth_fraction": 0.8,
    "compute_fraction": 0.4,
    "attention_fraction": 0.2,
    "launch_s": 5e-6,
}
size = st.floats(min_value=1e3, max_value=1e12)
rate = st.floats(min_value=1e9, max_value=1e16)
share = st.floats(min_value=0.001, max_value=1)
more = st.floats(min_value=1, max_value=100)


@pytest.mark.parametrize(
    ("memory_s", "compute_s", "expected"),
    [
        pytest.param(3e-3, 4e-3, 91 ** (1 / 3) * 1e-3, id="27 + 64"),
        pytest.param(1e-3, 1e-3, 2 ** (1 / 3) * 1e-3, id="equal limits"),
        pytest.param(1.0, 1e-9, 1.0, id="one alone"),
    ],
)
def test_hand_over(memory_s: float, compute_s: float, expected: float) -> None:
    assert small_batch.hand_over_s(memory_s=memory_s, compute_s=compute_s) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, 7.6131e-3, id="no context"),
        # 0.504 GB at half of 1,008 GB/s: 1 ms more.
        pytest.param({"kv_bytes": 0.504e9}, 8.6131e-3, id="a past of 0.5 GB"),
        # Half the loads and arithmetic, 3.0790 ms; 64 all-reduces of 10 µs.
        pytest.param({"ranks": 2, "collectives": 64, "collective_s": 1e-5}, 5.1740e-3, id="two ranks"),
        pytest.param({"hops": 3, "hop_s": 1e-4}, 7.9131e-3, id="layers over four GPUs: no faster"),
    ],
)
def test_decode_step(changes: dict[str, Any], expected: float) -> None:
    assert small_batch.decode_step_s(**RTX_4090 | changes) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, 128.732e-3, id="one chunk"),
        # Arithmetic as before in two halves of 60.606 ms, each beside loads of 5.704: 60.623; launches twice.
        pytest.param({"chunks": 2}, 130.217e-3, id="two chunks read the weights twice"),
        pytest.param({"stages": 2}, 128.732e-3, id="a pipeline of two with one chunk is empty half the time"),
        pytest.param({"chunks": 2, "stages": 2}, 0.75 * 130.217e-3, id="two chunks in a pipeline of two"),
    ],
)
def test_prompt(changes: dict[str, Any], expected: float) -> None:
    assert small_batch.prompt_s(**PROMPT | changes) == pytest.approx(expected, rel=1e-4)


@given(size, size, size, rate, rate, share, share, more)
def test_more_is_never_slower(
    weights: float, flop: float, kv: float, bandwidth: float, peak: float, one: float, other: float, by: float
) -> None:
    base = RTX_4090 | {
        "weight_bytes": weights,
        "flop": flop,
        "kv_bytes": kv,
        "bytes_per_s": bandwidth,
        "flop_per_s": peak,
        "bandwidth_fraction": one,
        "compute_fraction": other,
    }
    step_s = small_batch.decode_step_s(**base)
    assert step_s >= weights / bandwidth
    slack = step_s * 1e-9
    for name in ("bytes_per_s", "flop_per_s", "ranks"):
        assert small_batch.decode_step_s(**base | {name: base.get(name, 1) * by}) <= step_s + slack, name
    for name in ("kv_bytes", "weight_bytes", "flop", "kernels"):
        assert small_batch.decode_step_s(**base | {name: base[name] * by}) >= step_s - slack, name
    prompt = PROMPT | {"flop": flop, "weight_bytes": weights, "bytes_per_s": bandwidth, "flop_per_s": peak}
    prompt_s = small_batch.prompt_s(**prompt)
    for name in ("bytes_per_s", "flop_per_s"):
        assert small_batch.prompt_s(**prompt | {name: prompt[name] * by}) <= prompt_s * (1 + 1e-9), name
    assert small_batch.prompt_s(**prompt | {"attention_flop": by * 0.2e12}) >= prompt_s * (1 - 1e-9)
