"""A whole run as on a GPU, on a tiny model: graphs, NVML, energy, collectives, the file and its report.

torch.cuda is a stand-in whose replays count as long as what was captured took. No GPU ran this.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "calibrate"))

from capplan.calibrate import profile as profiles
from capplan.calibrate.clock import GpuClock
from capplan.calibrate.telemetry import POWER_CAP, State
from capplan.cli import run
from capplan.local_calibration import read

torch = pytest.importorskip("torch", reason="profiling runs on torch")
TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256,
    "vocab_size": 512, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


GPU = {
    "key": "test-gpu", "kind": "gpu", "name": "Test GPU", "vendor": "x", "architecture": "sm 9.0",
    "instructions": "9.0", "memory_bytes": 80 << 30, "bandwidth_bytes_per_s": 1e13,
    "flop_per_s": {"bf16": 1e12, "fp32": 1e12}, "cache_bytes": 1 << 16, "units": 132,
}  # fmt: skip


class Cuda:
    """Captures run at once; a replay takes as long as its capture took, by the events' time only."""

    def __init__(self) -> None:
        self.captured_s = 0.0
        self.replayed_s = 0.0

    def now(self) -> float:
        """Seconds, with those that replays would have taken."""
        return time.perf_counter() + self.replayed_s

    @contextmanager
    def graph(self, _: object) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.captured_s = time.perf_counter() - begun

    def CUDAGraph(self) -> SimpleNamespace:  # noqa: N802
        def replay() -> None:
            self.replayed_s += self.captured_s

        return SimpleNamespace(replay=replay)

    def Stream(self, _: object) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(wait_stream=lambda other: None)

    @contextmanager
    def stream(self, _: object) -> Iterator[None]:
        yield

    def current_stream(self, _: object) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: None)

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802
        made = SimpleNamespace(at=0.0, synchronize=lambda: None)
        made.record = lambda: setattr(made, "at", self.now())
        made.elapsed_time = lambda last: (last.at - made.at) * 1e3
        return made


@pytest.fixture
def profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], State]], int]:
    """Profiles the tiny model on this CPU as if it were a GPU whose state is read by what is given."""
    from capplan.calibrate import bench, clock, hardware
    from capplan.calibrate import run as running

    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY))
    cuda = Cuda()
    for name in ("CUDAGraph", "graph", "Stream", "stream", "current_stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    for module, name, value in (
        (running, "STEP_S", 0.0),
        (running, "OP_S", 0.0),
        (running, "ENERGY_S", 0.02),
        (bench, "RETRIES", 0),
        (bench, "CANARY_LIMIT", 100.0),
        (clock, "CANARY_REPEATS", 1),
        (clock, "GRAPH_S", 1e-5),
    ):
        monkeypatch.setattr(module, name, value)
    rates = {"read_bytes_per_s": 1e13, "bf16_flop_per_s": 1e12, "fp32_flop_per_s": 1e12}
    monkeypatch.setattr(hardware, "ceilings", lambda *_: rates)
    monkeypatch.setattr(hardware, "cpu_hardware", lambda *_: GPU)

    def start(state: Callable[[], State]) -> int:
        setting = profiles.Setting(
            clock=GpuClock(device=None), threads=1, cache_bytes=1 << 16, read=state, every_s=0.001,
            idle={"power_w": 70.0}, software={"driver": "580.1"}, warnings=("a warning of the set-up",),
        )  # fmt: skip
        monkeypatch.setattr(profiles, "cpu_setting", lambda *_: replace(setting))
        return run(
            ["profile", "--device", "cpu", "--model", str(tmp_path / "tiny"), "--formats", "bf16,int4",
             "--quick", "--budget", "10s", "--out", str(tmp_path / "own.yaml"), "-o", "json"]
        )  # fmt: skip

    return start


def joules() -> Callable[[], State]:
    """A GPU that draws 400 W by its counter, under its power cap in every second reading."""
    begun, count = time.perf_counter(), [0]

    def read() -> State:
        count[0] += 1
        return State(
            sm_mhz=1980, memory_mhz=2619, power_w=400, limit_w=700, processes=1,
            energy_j=400 * (time.perf_counter() - begun), reasons=POWER_CAP * (count[0] % 2),
        )  # fmt: skip

    return read


def test_whole_run(
    profiled: Callable[[Callable[[], State]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profiled(joules()) == 0
    out, err = capsys.readouterr()
    assert "warning: a warning of the set-up" in err
    made = json.loads(out)
    local = read(tmp_path / "own.yaml")
    assert local.data["software"]["driver"] == "580.1"
    assert local.data["state"]["idle"] == {"power_w": 70.0}
    assert local.data["run"]["clock"] == "cuda-graph-events"
    assert not local.host_inside
    energy = made["energy"]
    assert {row["precision"] for row in energy} == {"bf16", "int4"}
    for row in energy:
        assert row["joules_per_token"] > 0
        assert row["tokens_per_joule"] == pytest.approx(1 / row["joules_per_token"], abs=1e-3)
    assert any("power cap of 700 W" in each for each in made["warnings"])
    columns = local.data["points"]["step"]["cols"]
    row = local.data["points"]["step"]["rows"][0]
    assert (row[columns.index("sm_mhz")], row[columns.index("power_w")]) == (1980, 400)


def test_gpu_that_throttles_all_along_gives_no_profile(
    profiled: Callable[[Callable[[], State]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every point has a reading of a thermal slowdown during it, none before and after."""
    count = [0]

    def read_state() -> State:
        count[0] += 1
        return State(sm_mhz=1980, reasons=0x40, processes=1)

    assert profiled(read_state) == 2
    assert "no point of products counts: thermal slowdown" in capsys.readouterr().err
    assert not (tmp_path / "own.yaml").exists()
