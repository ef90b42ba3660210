"""`capplan profile`, without its command line: a question → the file's content, and what to tell of it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from capplan import catalog, model_source
from capplan.calibrate import collectives_bench, hardware, telemetry
from capplan.calibrate.clock import Canary, Clock, GpuClock
from capplan.calibrate.loop import LoopShape, loop_shape
from capplan.calibrate.points import Journal, Point
from capplan.calibrate.profile_file import document, save, software
from capplan.calibrate.profile_question import ProfileQuestion, Say, cpu_clock, runs_as
from capplan.calibrate.run import Bench, MachineBusyError, Profiler, Progress
from capplan.calibrate.step_check import check_step
from capplan.errors import ExtraMissingError, InputError
from capplan.specs import Model

PIP: str = "pip install 'capplan[profile]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """What a run made: the file's content, where it is, and what to be told beside it."""

    data: Mapping[str, Any]
    path: Path
    warnings: tuple[str, ...]
    seconds: float


def torch_or_error() -> Any:
    """The torch module. Raises ExtraMissingError with the command that installs it."""
    try:
        import torch
    except ImportError:
        raise ExtraMissingError(
            "profiling needs torch", where="capplan profile", hint=f"run: {PIP}"
        ) from None
    return torch


def device_of(name: str | None, torch: Any) -> Any:
    """The device to profile. Raises InputError where there is no GPU, or not this one."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError(
            "torch sees no GPU here" + _driver(torch),
            where="capplan profile" if name is None else f"--device {name}",
            hint="--device cpu profiles the CPU",
        )
    kind, _, index = (name or "cuda:0").partition(":")
    number = int(index) if index.isdigit() else 0 if not index else -1
    if kind != "cuda" or not 0 <= number < torch.cuda.device_count():
        raise InputError(
            f"no device {name!r}",
            where="--device",
            hint=f"cpu, or cuda:0 to cuda:{torch.cuda.device_count() - 1}",
        )
    return torch.device("cuda", number)


def _driver(torch: Any) -> str:
    """Why, where it is known: a build without CUDA, or a driver that does not go with it."""
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return " (this build of it is for CPUs only)"
    try:
        torch.cuda.init()
    except Exception as error:  # whatever the driver says is worth telling
        return f" ({str(error).splitlines()[0][:120]})"
    return ""


@contextmanager
def subnormals_flushed(torch: Any, device: Any) -> Iterator[None]:
    """On a CPU tiny numbers count as nought meanwhile, as on a GPU: they are slow, and a model has few."""
    if device.type != "cpu":
        yield
        return
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def profile(
    question: ProfileQuestion,
    *,
    path_of: Callable[[str], Path],
    resume: bool = False,
    say: Say,
) -> Profiled:
    """Profile a device and write its calibration to `path_of(hardware key)`.

    Raises ExtraMissingError without torch; InputError for a device, model or format that cannot be profiled,
    a folder that cannot be written, and a machine too busy to be measured.
    """
    torch = torch_or_error()
    model = model_source.load(question.model)
    shape = loop_shape(model)
    device = device_of(question.device, torch)
    with subnormals_flushed(torch, device):
        return _profile(question, torch, model, shape, device, path_of=path_of, resume=resume, say=say)


def _profile(
    question: ProfileQuestion,
    torch: Any,
    model: Model,
    shape: LoopShape,
    device: Any,
    *,
    path_of: Callable[[str], Path],
    resume: bool,
    say: Say,
) -> Profiled:
    """The run itself, on a device that is there."""
    begun = time.perf_counter()
    arithmetic = hardware.arithmetic(device)
    formats = {name: runs_as(catalog.weight_format(name), arithmetic) for name in question.formats}
    wrong = sorted(set(question.kv_dtypes) - {"bf16", "fp8"})
    if wrong:
        raise InputError(f"no KV cache in {wrong[0]}", where="--kv-dtypes", hint="bf16, fp8")
    started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    torch.manual_seed(question.seed)
    warnings: list[str] = []
    clock: Clock
    if device.type == "cpu":
        own_clock, share = cpu_clock(question, hardware.cpu_threads(), say)
        clock, threads, cache = own_clock, own_clock.threads, hardware.last_level_cache_bytes()
        read = telemetry.CpuTelemetry().read
    else:
        clock, share, threads = GpuClock(device=device), 1.0, 1
        cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
        found = telemetry.gpu_telemetry(device.index)
        read = found.read if found else telemetry.State
        if found is None:
            warnings.append("nvidia-ml-py does not answer: clocks, power and other processes are not known")
    say("ceilings: memory bandwidth and FLOP rate")
    with torch.inference_mode():
        rates = hardware.ceilings(
            device, lambda call, seconds: clock.time(call, seconds=seconds).samples, cache
        )
    block = (
        hardware.cpu_hardware(threads, rates)
        if device.type == "cpu"
        else hardware.gpu_hardware(device.index, rates)
    )
    if device.type == "cuda" and getattr(torch.cuda.get_device_properties(device), "is_integrated", False):
        warnings.append("the GPU's memory is the system's own: what the CPU does slows it down")
    path = path_of(block["key"])
    header = {
        "hardware": block["key"], "model": question.model_label, "clock": clock.name, "threads": threads,
        "seed": question.seed,
    }  # fmt: skip
    journal = Journal(path.with_name(path.name + ".points.jsonl"), header, resume=resume)
    with torch.inference_mode():
        checks = _checked(formats, shape, device, warnings)
        canary = Canary(clock, _canary(torch, device, cache))
    bench = Bench(
        device=device, clock=clock, threads=threads, canary=canary, read_state=read,
        read_bytes_per_s=rates["read_bytes_per_s"], cache_bytes=cache,
    )  # fmt: skip
    profiler = Profiler(question, model, bench, journal, Progress(say, question.budget_s), begun)
    try:
        profiler.run(formats)
    except MachineBusyError:
        say("others use this CPU: again with one thread, timed by its own CPU time")
        left = question.budget_s - (time.perf_counter() - begun)
        again = replace(question, clock="thread-cpu", threads=1, budget_s=max(30.0, left))
        return profile(again, path_of=path_of, say=say)
    if question.ranks > 1 or question.launched:
        say("collectives")
        for made in (
            collectives_bench.measure_here(device.type)
            if question.launched
            else collectives_bench.measure(ranks=question.ranks, device_type=device.type)
        ):
            journal.add(made)
    points = list(journal.points.values())
    about = {
        "software": software(torch),
        "run": {
            "started": started,
            "seconds": round(time.perf_counter() - begun),
            "model": question.model_label,
            "formats": formats,
            "clock": clock.name,
            "threads": threads,
            "seed": question.seed,
            "canary_spread": round(canary.spread, 4),
            "cpu_share": round(share, 3),
        },
        "state": telemetry.summary(profiler.states),
        "ceilings": {name: float(f"{rate:.4g}") for name, rate in rates.items()},
        "checks": checks,
    }
    _raise_ceilings(block, points)
    data = document(points, model, hardware=block, about=about)
    save(data, path)
    journal.done()
    warnings += profiler.warnings
    warnings += [
        f"{name}: no step held out counts, so its error is not known; run it again on a quiet machine"
        for name, dtype in formats.items()
        if dtype not in data["error"]["step"]
    ]
    if canary.spread > 0.1:
        warnings.append(f"the canary moved by {canary.spread:.0%}: the machine is not quiet")
    return Profiled(data=data, path=path, warnings=tuple(warnings), seconds=time.perf_counter() - begun)


def _raise_ceilings(block: dict[str, Any], points: Sequence[Point]) -> None:
    """What a product reached counts as a ceiling, where the ceiling's own measurement was disturbed."""
    best = max((2 * one.m * one.n * one.k / one.seconds for one in points if _counts(one)), default=0.0)
    rates = block["flop_per_s"]
    rates["bf16"] = max(rates["bf16"], best)


def _counts(one: Point) -> bool:
    return one.kind == "gemm" and one.void is None and bool(one.us_p50)


def _checked(
    formats: dict[str, str], shape: LoopShape, device: Any, warnings: list[str]
) -> dict[str, dict[str, float]]:
    """The step's error in every kernel dtype; formats whose kernel does not run here are taken out.

    Raises InputError where none is left, or a kernel is wrong.
    """
    checks: dict[str, dict[str, float]] = {}
    for name, dtype in list(formats.items()):
        try:
            if dtype not in checks:
                checks[dtype] = check_step(shape, dtype, device)
        # torch has no one error for a missing kernel, an unsupported dtype or a full device. The format is
        # left out and told in torch's own words; a kernel that runs and is wrong raises InputError.
        except (NotImplementedError, RuntimeError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
            warnings.append(f"{name} does not run on this device ({reason}): left out")
            del formats[name]
    if not formats:
        raise InputError(warnings[-1], where="--formats", hint="bf16 runs everywhere")
    return checks


def _canary(torch: Any, device: Any, cache_bytes: int) -> Callable[[int], object]:
    """A product of one row, and a sum over as much memory: one short of arithmetic, one of bandwidth.

    Both are larger than the cache: what others take of either shows.
    """
    rows = min(16_384, max(2_048, cache_bytes // (2 * 2048)))
    weights = torch.randn(rows, 2048, device=device).to(torch.bfloat16)
    stream = torch.ones(2 * rows, 1024, device=device)
    x = torch.randn(1, 2048, device=device).to(torch.bfloat16)
    return lambda number: (torch.nn.functional.linear(x, weights), stream.sum())
