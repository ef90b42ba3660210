"""`capplan profile`, without its command line: a question → the file's content, and what to tell of it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from capplan import catalog, model_source
from capplan.calibrate import collectives_bench, hardware, telemetry
from capplan.calibrate.bench import Bench
from capplan.calibrate.clock import Canary, Clock, GpuClock
from capplan.calibrate.loop import LoopShape, loop_shape
from capplan.calibrate.points import Journal, Point
from capplan.calibrate.profile_file import document, save, software
from capplan.calibrate.profile_question import ProfileQuestion, Say, cpu_clock, runs_as
from capplan.calibrate.run import MachineBusyError, Profiler, Progress
from capplan.calibrate.step_check import check_step
from capplan.errors import ExtraMissingError, InputError
from capplan.specs import Model
from capplan.units import format_bytes

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
    collectives = _collectives(question, device, say)
    with subnormals_flushed(torch, device):
        try:
            return _profile(
                question, torch, model, shape, device, collectives, path_of=path_of, resume=resume, say=say
            )
        except MachineBusyError as busy:
            say("others use this CPU: again with one thread, timed by its own CPU time")
            left = question.budget_s - busy.seconds
            question = replace(question, clock="thread-cpu", threads=1, budget_s=max(30.0, left))
        return _profile(
            question, torch, model, shape, device, collectives, path_of=path_of, resume=False, say=say
        )


def _collectives(question: ProfileQuestion, device: Any, say: Say) -> list[Point]:
    """Points over several devices: before all else, because torchrun's other processes wait for them."""
    if question.ranks == 1 and not question.launched:
        return []
    say("collectives")
    if question.launched:
        return collectives_bench.measure_here(device.type)
    return collectives_bench.measure(ranks=question.ranks, device_type=device.type)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a device is timed: its clock, its cache (None: not known), how its state is read, what to tell."""

    clock: Clock
    threads: int
    cache_bytes: int | None
    read: Callable[[], telemetry.State]
    every_s: float | None = None
    share: float = 1.0
    idle: Mapping[str, float] = field(default_factory=dict)
    software: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def larger_than_bytes(self) -> int:
        """What buffers must exceed to be cold: the last-level cache, assumed where the system tells none."""
        return self.cache_bytes or hardware.ASSUMED_CACHE_BYTES


def cpu_setting(question: ProfileQuestion, say: Say) -> Setting:
    """A CPU: the wall or one thread's own time, and the load average."""
    clock, share = cpu_clock(question, hardware.cpu_threads(), say)
    return Setting(
        clock=clock, threads=clock.threads, cache_bytes=hardware.last_level_cache_bytes(),
        read=telemetry.CpuTelemetry().read, share=share,
    )  # fmt: skip


def gpu_setting(device: Any, torch: Any, sleep: Callable[[float], None] = time.sleep) -> Setting:
    """A GPU: graphs, and NVML where it answers. Raises InputError for a slice of a GPU."""
    properties = torch.cuda.get_device_properties(device)
    hardware.refuse_slice(properties.name, device.index)
    clock, warnings = GpuClock(device=device), []
    if getattr(properties, "is_integrated", False):
        warnings.append("the GPU's memory is the system's own: what the CPU does slows it down")
    cache = hardware.gpu_cache_bytes(properties)
    found = telemetry.gpu_telemetry(device.index)
    if isinstance(found, str):
        warnings.append(f"{found}: clocks, power and other processes are not known, and void no point")
        return Setting(
            clock=clock, threads=1, cache_bytes=cache, read=telemetry.State, warnings=tuple(warnings)
        )
    driver = found.driver()
    return Setting(
        clock=clock, threads=1, cache_bytes=cache, read=found.read, every_s=telemetry.EVERY_S,
        idle=telemetry.idle(found.read, sleep, seconds=telemetry.IDLE_S),
        software={} if driver is None else {"driver": driver}, warnings=tuple(warnings),
    )  # fmt: skip


def _profile(
    question: ProfileQuestion,
    torch: Any,
    model: Model,
    shape: LoopShape,
    device: Any,
    collectives: Sequence[Point],
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
    setting = cpu_setting(question, say) if device.type == "cpu" else gpu_setting(device, torch)
    clock, warnings = setting.clock, list(setting.warnings)
    assumed = [] if setting.cache_bytes else ["cache_bytes"]
    if assumed:
        size = format_bytes(setting.larger_than_bytes)
        warnings.append(f"the system does not tell the last-level cache: {size} are assumed")
    say("ceilings: memory bandwidth and FLOP rate")
    with torch.inference_mode():
        rates = hardware.ceilings(
            device, lambda call, seconds: clock.time(call, seconds=seconds).samples, setting.larger_than_bytes
        )
    block = (
        hardware.cpu_hardware(setting.threads, rates)
        if device.type == "cpu"
        else hardware.gpu_hardware(device.index, rates)
    )
    path = path_of(block["key"])
    header = {
        "hardware": block["key"], "model": question.model_label, "clock": clock.name,
        "threads": setting.threads, "seed": question.seed,
    }  # fmt: skip
    kept = path.with_name(path.name + ".points.jsonl")
    if kept.is_file() and not resume:
        count = len(kept.read_text(encoding="utf-8", errors="replace").splitlines()) - 1
        say(f"anew: {max(0, count)} points of a run that was stopped are given up (--resume keeps them)")
    journal = Journal(kept, header, resume=resume)
    for made in collectives:
        journal.add(made)
    with torch.inference_mode():
        checks = _checked(formats, shape, device, warnings)
        canary = Canary(clock, _canary(torch, device, setting.larger_than_bytes))
    bench = Bench(
        device=device, clock=clock, threads=setting.threads, canary=canary, read_state=setting.read,
        read_bytes_per_s=rates["read_bytes_per_s"], cache_bytes=setting.larger_than_bytes,
        every_s=setting.every_s,
    )  # fmt: skip
    profiler = Profiler(question, model, bench, journal, Progress(say, question.budget_s), begun)
    profiler.run(formats)
    points = list(journal.points.values())
    about = {
        "software": {**software(torch), **setting.software},
        "run": {
            "started": started,
            "seconds": round(time.perf_counter() - begun),
            "model": question.model_label,
            "formats": formats,
            "clock": clock.name,
            "threads": setting.threads,
            "seed": question.seed,
            "canary_spread": round(canary.spread, 4),
            "cpu_share": round(setting.share, 3),
            **({"assumed": assumed} if assumed else {}),
        },
        "state": telemetry.summary(bench.states) | ({"idle": dict(setting.idle)} if setting.idle else {}),
        "ceilings": {name: float(f"{rate:.4g}") for name, rate in rates.items()},
        "checks": checks,
    }
    _raise_ceilings(block, points)
    data = document(points, model, hardware=block, about=about)
    save(data, path)
    journal.done()
    warnings += dict.fromkeys(profiler.warnings)
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
