"""Collectives by size through torch.distributed: NCCL on GPUs, Gloo on CPUs.

`measure` starts the processes of one node itself; under `torchrun` each process calls `measure_here`.
Times are the slowest rank's: a collective is over when its last rank is.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
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
    """Seconds [operation, size, repeat] as this rank saw them."""
    import torch

    group: Any = import_module("torch.distributed")
    if device_type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    ranks = group.get_world_size()
    made = np.zeros((len(OPS), len(sizes), REPEATS))
    for place, size in enumerate(sizes):
        buffer = torch.ones(size // 2, dtype=torch.bfloat16, device=device_type)
        parts = list(torch.empty(ranks, len(buffer) // ranks, dtype=buffer.dtype, device=device_type))
        own = buffer[: len(parts[0])].clone()
        calls: tuple[Any, ...] = (
            lambda b=buffer: group.all_reduce(b),
            lambda p=parts, o=own: group.all_gather(p, o),
            lambda b=buffer: group.send(b, 1) if rank == 0 else group.recv(b, 0) if rank == 1 else None,
        )
        for number, call in enumerate(calls):
            for repeat in range(-WARM, REPEATS):
                group.barrier()
                begun = time.perf_counter()
                call()
                if device_type == "cuda":
                    torch.cuda.synchronize()
                if repeat >= 0:
                    made[number, place, repeat] = time.perf_counter() - begun
    return made


def _points(samples: Any, sizes: Sequence[int], backend: str, ranks: int) -> list[Point]:
    return [
        point("collective", (op, backend, ranks, size), Timing(samples=tuple(samples[number, place])))
        for number, op in enumerate(OPS)
        for place, size in enumerate(sizes)
    ]


def fit(points: Sequence[Point], gpu: Gpu) -> dict[str, Any]:
    """By operation and rank count: the shipped form's numbers, over the best rate that a message had."""
    made: dict[str, Any] = {}
    for op, ranks in sorted({(one.op, one.ranks) for one in points if one.kind == "collective"}):
        own = [one for one in points if one.kind == "collective" and (one.op, one.ranks) == (op, ranks)]
        own = [one for one in own if one.void is None and one.us_p50]
        if op == "send" or len(own) < 3:
            continue
        sizes = np.array([float(one.bytes) for one in own])
        seconds = np.array([one.seconds for one in own])
        link = float((sizes / seconds).max())
        table = Table(
            op=op, gpu_id=gpu.id, dtype=str(ranks), engine=LOCAL,
            columns={"bytes_moved": sizes, "ranks": np.full(len(own), ranks)}, seconds=seconds,
            groups=("",) * len(own),
        )  # fmt: skip
        numbers = search.chosen(_form(table, link), forms.variants(table), seconds)
        found = {name: rounded(value) for name, value in numbers.items()}
        made.setdefault(op, {}).setdefault(LOCAL, {})[str(ranks)] = {**found, "link_bytes_per_s": round(link)}
    return made


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
