"""Collectives between two processes of this machine, over Gloo."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from capplan.calibrate import collectives_bench
from capplan.calibrate.clock import Timing
from capplan.calibrate.points import point, tables
from capplan.errors import InputError
from capplan.formulas import op_cost
from capplan.local_calibration import device, read
from capplan.work import Collective

torch = pytest.importorskip("torch", reason="collectives run on torch")
TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256,
    "vocab_size": 512, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
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
    assert set(fit) == set(collectives_bench.OPS)
    yaml.safe_dump([tables(iter(points)), fit])  # refuses numpy's numbers, which a file cannot hold


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


def test_message_is_fitted_between_two_of_any_number() -> None:
    """12 µs, then 5 GB/s, timed among four: kept under two ranks, and found again."""
    points = [
        point("collective", ("send", "nccl", 4, size), Timing(samples=(max(12e-6, size / 5e9),)))
        for size in (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
    ]
    fit = collectives_bench.fit(points, device(HARDWARE, "x"))
    assert set(fit["send"]["local"]) == {"2"}
    numbers = fit["send"]["local"]["2"]
    message = Collective(name="stage", op="send", bytes_each=1, ranks=2)
    for size, seconds in ((1 << 10, 12e-6), (1 << 22, (1 << 22) / 5e9)):
        made = op_cost.collective_s(
            bytes_moved=message.buffer_bytes(size),
            ranks=2,
            link_bytes_per_s=numbers["link_bytes_per_s"],
            fit=numbers,
        )
        assert made == pytest.approx(seconds, rel=0.1)


def test_one_rank_is_no_collective() -> None:
    with pytest.raises(InputError, match="two ranks"):
        collectives_bench.measure(ranks=1, device_type="cpu")


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="torch sees 1"):
        collectives_bench.measure(ranks=2, device_type="cuda")


def test_not_under_torchrun() -> None:
    with pytest.raises(InputError, match="torchrun"):
        collectives_bench.measure_here("cpu")


def test_message_between_two_of_three() -> None:
    """The third only waits: a barrier that it missed would never end."""
    points = collectives_bench.measure(ranks=3, device_type="cpu", sizes=(1024, 65_536))
    assert len(points) == 2 * len(collectives_bench.OPS)
    assert all(one.us_p50 and one.ranks == 3 for one in points)


def test_graphs_of_collectives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NCCL's way, with Gloo and one rank: torch.cuda is a stand-in. No GPU ran this."""
    import torch.distributed as group

    captured: list[int] = []

    @contextmanager
    def graph(made: object, *, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        before = calls[0]
        yield
        captured.append(calls[0] - before)

    def event(enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        return SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda last: 0.4)

    calls = [0]
    whole = group.all_reduce

    def counted(*arguments: object, **options: object) -> object:
        calls[0] += 1
        return whole(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(group, "all_reduce", counted)
    monkeypatch.setattr(collectives_bench, "_place", lambda rank, device_type: torch.device("cpu"))
    for name, stand_in in (
        ("synchronize", lambda: None),
        ("CUDAGraph", lambda: SimpleNamespace(replay=lambda: None)),
        ("graph", graph),
        ("Event", event),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    group.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        samples = collectives_bench._samples(0, "cuda", (1024, 65_536))
    finally:
        group.destroy_process_group()
    # A replay of 0.4 ms holds 20 calls; alone there is nobody to send to.
    assert captured == [collectives_bench.GRAPH_CALLS, 0] * 2
    assert samples[0].max() == samples[1].min() == pytest.approx(0.4e-3 / 20)
    assert not samples[2].any()


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    """`torchrun … -m capplan profile` with two processes: one profile, and their collectives in it."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY))
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "capplan",
        "profile",
    ]
    options = ["--device", "cpu", "--model", str(tmp_path / "tiny"), "--formats", "bf16", "--quick"]
    more = ["--budget", "15s", "--clock", "thread-cpu", "--threads", "1", "--out", str(tmp_path / "own.yaml")]
    made = subprocess.run(
        [sys.executable, *launch, *options, *more], capture_output=True, text=True, timeout=300, check=False
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.count("steps held out, predicted from the file") == 1
    local = read(tmp_path / "own.yaml")
    assert set(local.fit["all_reduce"]["local"]) == {"2"}
    rows = local.data["points"]["collective"]["rows"]
    assert {tuple(row[:3]) for row in rows} == {(op, "gloo", 2) for op in collectives_bench.OPS}
