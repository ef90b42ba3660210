"""Collectives by size through torch.distributed: NCCL on GPUs, Gloo on CPUs.

`measure` starts the processes of one node itself; under `torchrun` each process calls `measure_here`.
Times are the slowest rank's: a collective is over when its last rank is.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

from capplan.calibrate import forms, search
from capplan.calibrate.clock import Timing
from capplan.calibrate.fit import rounded
from capplan.calibrate.points import Point, point
from capplan.calibrate.tables import Table
from capplan.errors import InputError
from capplan.local_calibration import LOCAL
from capplan.specs import Gpu

OPS: Final = ("all_reduce", "all_gather", "send")
SIZES: Final = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
GPU_SIZES: Final = (*SIZES, 1 << 24, 1 << 26, 1 << 28)
WARM: Final = 3
REPEATS: Final = 20
GRAPH_CALLS: Final = 20
"""Calls of a CUDA graph: the same number on every rank, or they would wait for each other forever."""
Call = Callable[..., object]


def backend_of(device_type: str) -> str:
    """The library for a kind of device."""
    return "nccl" if device_type == "cuda" else "gloo"


def measure(*, ranks: int, device_type: str, sizes: Sequence[int] | None = None) -> list[Point]:
    """Points of every collective and size over `ranks` processes of this machine.

    Raises InputError where there are fewer GPUs than ranks, or the processes fail.
    """
    import torch

    processes: Any = import_module("torch.multiprocessing")
    if ranks < 2:
        raise InputError("a collective needs two ranks", where="--gpus", hint="--gpus 2 or more")
    if device_type == "cuda" and torch.cuda.device_count() < ranks:
        raise InputError(
            f"{ranks} GPUs, and torch sees {torch.cuda.device_count()}", where="--gpus", hint="fewer"
        )
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, device_type, tuple(sizes or _sizes(device_type)), folder)
        try:
            processes.spawn(_worker, args=arguments, nprocs=ranks, join=True)
        except Exception as error:  # a rank that died: its own message is what helps
            raise InputError(
                f"the processes failed: {str(error).strip().splitlines()[-1][:160]}",
                where="--gpus",
                hint="run it again, or leave --gpus out",
            ) from None
        samples = [np.load(Path(folder) / f"{rank}.npy") for rank in range(ranks)]
    return _points(np.max(samples, axis=0), arguments[2], backend_of(device_type), ranks)


def _sizes(device_type: str) -> tuple[int, ...]:
    return GPU_SIZES if device_type == "cuda" else SIZES


def _worker(rank: int, ranks: int, device_type: str, sizes: tuple[int, ...], folder: str) -> None:
    """One process of `measure`: they find each other through a file."""
    import torch.distributed as group

    group.init_process_group(
        backend_of(device_type), init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
    )
    try:
        np.save(Path(folder) / f"{rank}.npy", _samples(rank, device_type, sizes))
    finally:
        group.destroy_process_group()


def measure_here(device_type: str, sizes: Sequence[int] | None = None) -> list[Point]:
    """Points of the group that torchrun has made; all ranks call it, and all have the result."""
    import torch
    import torch.distributed as group

    try:
        group.init_process_group(backend_of(device_type))
    except ValueError as error:  # no rank, no size, no address: torchrun sets them
        raise InputError(
            f"not started by torchrun: {error}", where="capplan profile", hint="torchrun … capplan profile"
        ) from None
    try:
        chosen = tuple(sizes or _sizes(device_type))
        mine = torch.from_numpy(_samples(group.get_rank(), device_type, chosen))
        mine = mine.to(device_type)
        group.all_reduce(mine, op=group.ReduceOp.MAX)
        return _points(mine.cpu().numpy(), chosen, backend_of(device_type), group.get_world_size())
    finally:
        group.destroy_process_group()


def _samples(rank: int, device_type: str, sizes: tuple[int, ...]) -> Any:
    """Seconds [operation, size, repeat] as this rank saw them; 0 for a message between two others."""
    import torch

    group: Any = import_module("torch.distributed")
    place = _place(rank, device_type)
    timed = _replayed if device_type == "cuda" else _called
    ranks = group.get_world_size()
    made = np.zeros((len(OPS), len(sizes), REPEATS))
    for column, size in enumerate(sizes):
        buffer = torch.ones(size // 2, dtype=torch.bfloat16, device=place)
        parts = list(torch.empty(ranks, len(buffer) // ranks, dtype=buffer.dtype, device=place))
        own = buffer[: len(parts[0])].clone()
        calls: dict[str, Call] = {
            "all_reduce": lambda b=buffer: group.all_reduce(b),
            "all_gather": lambda p=parts, o=own: group.all_gather(p, o),
        }
        if rank < 2 <= ranks:
            message, other = (group.recv if rank else group.send), 1 - rank
            calls["send"] = lambda m=message, b=buffer, o=other: m(b, o)
        for row, op in enumerate(OPS):
            if op in calls:
                made[row, column] = timed(calls[op])
            elif device_type == "cpu":
                timed(lambda: None)  # the barriers of the two that exchange a message are everyone's
    return made


def _place(rank: int, device_type: str) -> Any:
    """The device of a rank: the GPUs of a node in turn."""
    import torch

    if device_type == "cpu":
        return torch.device("cpu")
    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _called(call: Call) -> list[float]:
    """Seconds of every call, by the host's clock."""
    group: Any = import_module("torch.distributed")
    made = []
    for _ in range(WARM + REPEATS):
        group.barrier()
        begun = time.perf_counter()
        call()
        made.append(time.perf_counter() - begun)
    return made[WARM:]


def _replayed(call: Call) -> list[float]:
    """Seconds a call: events around a graph of GRAPH_CALLS, so that no launch by the host is in it."""
    import torch

    for _ in range(WARM):  # NCCL connects here, outside of the capture
        call()
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    # NCCL's own thread may ask about events meanwhile: only this thread's calls may end the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(GRAPH_CALLS):
            call()
    graph.replay()
    made = []
    events: Any = torch.cuda.Event
    for _ in range(REPEATS):
        first, last = (events(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        made.append(float(first.elapsed_time(last)) / 1e3 / GRAPH_CALLS)
    return made


def _points(samples: Any, sizes: Sequence[int], backend: str, ranks: int) -> list[Point]:
    rows = samples.tolist()  # a file cannot hold numpy's numbers
    return [
        point("collective", (op, backend, ranks, size), Timing(samples=tuple(rows[number][place])))
        for number, op in enumerate(OPS)
        for place, size in enumerate(sizes)
    ]


def fit(points: Sequence[Point], gpu: Gpu) -> dict[str, Any]:
    """By operation and rank count: the shipped form's numbers, over the best rate that a message had.

    A message is between two, however many ranks there are, and counts as the all-gather of two such messages
    (work.Collective.buffer_bytes).
    """
    made: dict[str, Any] = {}
    counted = [one for one in points if one.kind == "collective" and one.void is None and one.us_p50]
    for op, ranks in sorted({(one.op, _ranks(one)) for one in counted}):
        own = [one for one in counted if (one.op, _ranks(one)) == (op, ranks)]
        if len(own) < 3:
            continue
        sizes = np.array([float(one.bytes) for one in own])
        seconds = np.array([one.seconds for one in own])
        link = float((sizes / seconds).max())
        table = Table(
            op=op, gpu_id=gpu.id, dtype=str(ranks), engine=LOCAL,
            columns={
                "bytes_moved": sizes * (2 if op == "send" else 1), "ranks": np.full(len(own), ranks),
            },
            seconds=seconds, groups=("",) * len(own),
        )  # fmt: skip
        numbers = search.chosen(_form(table, link), forms.variants(table), seconds)
        found = {name: rounded(value) for name, value in numbers.items()}
        made.setdefault(op, {}).setdefault(LOCAL, {})[str(ranks)] = {**found, "link_bytes_per_s": round(link)}
    return made


def _ranks(one: Point) -> int:
    """How many ranks a collective's point is of."""
    return 2 if one.op == "send" else int(one.ranks)


def _form(table: Table, link: float) -> search.Form:
    """The collective's form at a link's rate."""
    from capplan.formulas import op_cost

    def seconds(fit: Mapping[str, Any]) -> Any:
        return op_cost.collective_s(
            bytes_moved=table.columns["bytes_moved"],
            ranks=int(table.columns["ranks"][0]),
            link_bytes_per_s=link,
            fit=fit,
        )

    return seconds
