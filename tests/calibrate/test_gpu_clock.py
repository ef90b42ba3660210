"""The GPU's clock and bench on a CPU: torch.cuda is a stand-in that replays what it captured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from capplan.calibrate.bench import Bench
from capplan.calibrate.clock import GRAPH_S, Canary, GpuClock, Timing
from capplan.calibrate.loop import STEPS, DecodeLoop, LoopShape
from capplan.calibrate.operations import timed
from capplan.calibrate.telemetry import State

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch", reason="the decode loop runs on torch")

SHAPE = LoopShape(hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=300, layers=2)


class Device:
    """What torch.cuda has: calls made inside of `graph` are kept, and made again by `replay`.

    Time is told by `took` calls, each of `call_s`, so that nothing here depends on the machine.
    """

    def __init__(self, call_s: float) -> None:
        self.call_s, self.calls = call_s, 0
        self.captured: list[int] = []
        self.capturing = False
        self.replays = 0

    def call(self, number: int) -> None:
        """An operation: counted, and while capturing only kept."""
        if self.capturing:
            self.captured.append(number)
        else:
            self.calls += 1

    def CUDAGraph(self) -> SimpleNamespace:  # noqa: N802
        def replay() -> None:
            self.calls += len(self.captured)
            self.replays += 1

        return SimpleNamespace(replay=replay)

    @contextmanager
    def graph(self, _: object) -> Iterator[None]:
        self.captured, self.capturing = [], True
        yield
        self.capturing = False

    def Stream(self, _: object) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(wait_stream=lambda other: None)

    @contextmanager
    def stream(self, _: object) -> Iterator[None]:
        yield

    def current_stream(self, _: object) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: None)

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802
        assert enable_timing
        made = SimpleNamespace(at=0, synchronize=lambda: None)
        made.record = lambda: setattr(made, "at", self.calls)
        made.elapsed_time = lambda last: (last.at - made.at) * self.call_s * 1e3
        return made


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Device]:
    def install(call_s: float) -> Device:
        made = Device(call_s)
        for name in ("CUDAGraph", "graph", "Stream", "stream", "current_stream", "Event"):
            monkeypatch.setattr(torch.cuda, name, getattr(made, name))
        return made

    return install


@pytest.mark.parametrize(
    ("call_s", "rotation", "calls"),
    [
        pytest.param(10e-6, 1, 100, id="a graph of a millisecond"),
        pytest.param(10e-6, 32, 96, id="whole rotations"),
        pytest.param(10e-6, 500, 500, id="a rotation that takes longer"),
        pytest.param(20e-3, 1, 1, id="one call that takes longer"),
        pytest.param(20e-3, STEPS, STEPS, id="a run of steps"),
    ],
)
def test_graph_holds_whole_rotations(
    fake: Callable[[float], Device], call_s: float, rotation: int, calls: int
) -> None:
    device = fake(call_s)
    made = GpuClock(device="cuda:0").time(device.call, seconds=0.0, least=3, rotation=rotation)
    assert device.captured == list(range(calls))
    assert len(made.samples) == 3
    assert made.p50_s == pytest.approx(call_s)
    assert calls * call_s >= GRAPH_S * 0.9


def test_replayed_counts_the_calls(fake: Callable[[float], Device]) -> None:
    device = fake(1e-3)
    clock = GpuClock(device="cuda:0")
    graph = clock.capture(device.call, STEPS)
    before = device.replays
    assert clock.replayed(graph, 0.01) == (device.replays - before) * STEPS > 0


# -- data that no cache holds


class Rotations:
    """A clock that keeps how many buffers each operation went through."""

    name = "cuda-graph-events"

    def __init__(self) -> None:
        self.seen: list[int] = []

    def time(self, call: Callable[[int], object], *, rotation: int = 1, **_: object) -> Timing:
        for number in range(rotation):
            call(number)
        self.seen.append(rotation)
        return Timing(samples=(1e-3,))


def test_operations_by_themselves_rotate_over_cold_data() -> None:
    """Every product's weights, the head's too, and the KV cache, have 1 MB in all."""
    cold = 1_000_000
    loop = DecodeLoop(SHAPE, dtype="bf16", device=torch.device("cpu"))
    loop.start(batch=2, context=40, cold_bytes=cold)
    clock = Rotations()
    with torch.inference_mode():
        timed(loop, clock, step_s=0.0, op_s=0.0, cold_bytes=cold)
    expected = [-(-cold // matrices[0].bytes) for _, matrices in loop.products()]
    one = sum(each.numel() * each.element_size() for each in (loop.caches[0].keys, loop.caches[0].values))
    assert clock.seen[: len(expected)] == expected
    assert clock.seen[len(expected)] == len(loop.caches) == -(-cold // one)
    assert len(loop.contiguous()) == SHAPE.layers


# -- the run of steps that a graph holds


def test_run_of_steps_feeds_each_token_to_the_next() -> None:
    """As decode does, and the second run of STEPS is the first again."""
    loop, plain = (DecodeLoop(SHAPE, dtype="bf16", device=torch.device("cpu"), seed=3) for _ in range(2))
    loop.start(batch=2, context=40)
    plain.start(batch=2, context=40)
    plain.at(40 - (STEPS - 1) // 2)
    expected = plain.decode(STEPS)
    first = [loop.advance(number).tolist() for number in range(STEPS)]
    assert first == expected
    assert loop.lengths.tolist() == [40 - (STEPS - 1) // 2 + STEPS] * 2
    loop.advance(STEPS)
    assert loop.lengths.tolist() == [40 - (STEPS - 1) // 2 + 1] * 2


def test_run_of_steps_is_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph replays on the same memory: none of the loop's tensors may be another one afterwards."""
    loop = DecodeLoop(SHAPE, dtype="bf16", device=torch.device("cpu"))
    loop.start(batch=2, context=40)
    held = {name: getattr(loop, name) for name in ("tokens", "positions", "lengths", "table")}
    for number in range(STEPS + 2):
        loop.advance(number)
    assert all(getattr(loop, name) is tensor for name, tensor in held.items())


def test_nothing_of_a_step_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a number from the device would end a capture. The kernels' CPU routes do: taken out."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from capplan.kernels import paged_attention_decode

    class NoWaiting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert "_local_scalar_dense" not in str(function)
            assert "nonzero" not in str(function)
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(
        paged_attention_decode, "paged_attention_decode", lambda query, *_, **__: query.contiguous()
    )
    loop = DecodeLoop(SHAPE, dtype="bf16", device=torch.device("cpu"))
    loop.start(batch=2, context=40)
    with NoWaiting():
        for number in range(2):
            loop.advance(number)


# -- a point between two canaries


def bench(states: Iterator[State], canary: Iterator[float]) -> Bench:
    class Given:
        name = "given"

        def time(self, call: object, **_: object) -> Timing:
            return Timing(samples=(next(canary, 1.0),))

    clock = Given()
    return Bench(
        device=torch.device("cpu"), clock=clock, threads=1, canary=Canary(clock, lambda _: None),
        read_state=lambda: next(states, State(sm_mhz=1980, power_w=400, processes=1)),
        read_bytes_per_s=1e12, cache_bytes=1 << 20,
    )  # fmt: skip


def test_void_point_is_timed_again_while_time_remains() -> None:
    hot = State(sm_mhz=1980, reasons=0x40, processes=1)
    found = bench(iter([hot, hot]), iter(()))
    times = iter([1.0, 2.0, 3.0])
    made, conditions = found.watched(lambda: next(times), until=time.perf_counter() + 60)
    assert (made, conditions.void, conditions.sm_mhz, conditions.power_w) == (2.0, None, 1980, 400)
    assert len(found.states) == 4


def test_void_point_is_kept_with_its_reason_where_no_time_remains() -> None:
    found = bench(iter([State(sm_mhz=1980), State(sm_mhz=1200)]), iter(()))
    _, conditions = found.watched(lambda: 1.0, until=0.0)
    assert conditions.void == "SM clock fell from 1980 to 1200 MHz"


def test_moving_canary_voids_a_point() -> None:
    # Two readings to warm up, five of the reference; then half as slow again after the point.
    found = bench(iter(()), iter([1.0] * 8 + [1.5]))
    _, conditions = found.watched(lambda: 1.0, until=0.0)
    assert conditions.void == "canary moved 50%"
