"""Operations of a step, timed inside of it and one by one; the second is a GPU's way, here on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from capplan.calibrate.clock import CpuClock, Timing
from capplan.calibrate.loop import DecodeLoop, LoopShape
from capplan.calibrate.operations import timed

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch", reason="the decode loop runs on torch")

SHAPE = LoopShape(hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=300, layers=2)
OPERATIONS = {*SHAPE.linears, *SHAPE.small_bytes, "attention", "lm_head"}
OF_A_PROMPT = OPERATIONS - {"lm_head", "sampling"}


class Graphs:
    """Stands for the GPU's clock: not a CpuClock, so that nothing is watched inside of a step."""

    name = "cuda-graph-events"

    def __init__(self) -> None:
        self.timed = CpuClock(threads=1)

    def time(
        self, call: object, *, seconds: float, least: int = 2, warm: bool = False, rotation: int = 1
    ) -> Timing:
        return self.timed.time(call, seconds=0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("clock", [CpuClock(threads=1), Graphs()], ids=["inside", "one by one"])
def test_every_operation_is_timed(clock: CpuClock | Graphs) -> None:
    torch.set_num_threads(1)
    loop = DecodeLoop(SHAPE, dtype="bf16", device=torch.device("cpu"))
    loop.start(batch=2, context=40)
    with torch.inference_mode():
        found = timed(loop, clock, step_s=0.0, op_s=0.0)
        assert set(found) == OPERATIONS
        assert all(made.p50_s > 0 for made in found.values())
        loop.start_prompt(tokens=20)
        assert set(timed(loop, clock, step_s=0.0, op_s=0.0)) == OF_A_PROMPT
        loop.start(batch=2, context=40)
        assert loop.step().shape == (2,)  # nothing watches any more
