"""One profile from start to end: ceilings, points of every format, whole steps, and the file made of them."""

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from capplan.calibrate.bench import Bench, Conditions
from capplan.calibrate.clock import GpuClock, Timing
from capplan.calibrate.loop import STEPS, DecodeLoop, loop_shape
from capplan.calibrate.operations import product, timed
from capplan.calibrate.points import Journal, Key, Point, point
from capplan.calibrate.profile_question import ProfileQuestion, Say
from capplan.calibrate.weights import Matrix, matrix, rotated
from capplan.specs import Model

RESERVE: Final = 0.06
"""Share of the budget that is left for the fit."""
GRID_SHARE: Final = 0.32
"""Share of a format's time that a pass over its grid may take; the rest is for the steps held out."""
# (batch, context): the grid, whose steps are anchors, and the steps held out; never one in both.
GRID: Final = ((1, 128), (1, 1024), (2, 512), (4, 128), (4, 1024), (8, 256), (8, 1024), (16, 256), (32, 128))
QUICK_GRID: Final = ((1, 128), (1, 1024), (2, 512), (4, 128), (4, 768), (8, 256))
HELD_OUT: Final = (
    (1, 400),
    (2, 900),
    (3, 300),
    (3, 700),
    (1, 1500),
    (5, 200),
    (6, 500),
    (12, 200),
    (24, 150),
)
SHALLOW: Final = ((1, 128), (2, 512), (4, 128))
"""Of the grid, the steps that are timed with half of the layers too."""
DEEP: Final = ((1, 256), (3, 256))
DEEP_HELD_OUT: Final = ((1, 600), (2, 300))
"""Steps of the whole model, where the grid has fewer layers: they tell how far a cut model carries."""
PROMPTS: Final = (64, 256, 1024)
QUICK_PROMPTS: Final = (32, 128)
# (n, k) of --grid general, beside the model's own, and its m.
GENERAL: Final = ((1024, 1024), (4096, 2048), (2560, 2560), (4096, 4096), (12288, 4096), (4096, 11008))
EXTRA_ROWS: Final = (3, 5, 6, 12, 24)
GENERAL_ROWS: Final = (1, 2, 4, 8)
PROMPTS_HELD_OUT: Final = (24, 48)
PROMPT_LAYERS: Final = 2
ENERGY_S: Final = 2.0
"""The counter ticks every 20 to 100 ms: shorter, and the error passes 5 %."""
ENERGY_AT: Final = ((1, 400), (6, 500), (24, 150))
"""Of the steps held out, those whose energy is read."""
STEP_S: Final = 0.3
OP_S: Final = 0.05
"""How long a whole step, and an operation by itself, are timed at least."""
PROBE_LAYERS: Final = 2
LEAST_LAYERS: Final = 2
LEAST_HELD_OUT: Final = 3
LEAST_STEPS: Final = 2
FIRST_STEPS: Final = 6
"""Steps after which a run keeps its clock."""
STEPS_A_FORMAT: Final = 155
"""Steps of batch 1 that grid, steps held out and prompts together take, about."""
LEAST_BATCH: Final = 4
"""Batches up to this are measured however little time there is."""


class MachineBusyError(Exception):
    """Others use the CPU: the wall clock says nothing here. `seconds` went by until that was known."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class Profiler:
    """Runs the points of a profile, within its time."""

    def __init__(
        self,
        question: ProfileQuestion,
        model: Model,
        bench: Bench,
        journal: Journal,
        progress: "Progress",
        begun: float,
    ) -> None:
        self.question, self.model, self.bench, self.journal = question, model, bench, journal
        self.progress = progress
        self.head: Any = None
        self.workspace: Any = None
        self.by_memory = 0
        self.begun = begun
        self.end = begun + question.budget_s * (1 - RESERVE)
        self.warnings: list[str] = []

    @property
    def left_s(self) -> float:
        """Seconds of the budget that remain."""
        return self.end - time.perf_counter()

    def run(self, formats: Mapping[str, str]) -> None:
        """All formats: {weight format id: kernel dtype}, one KV dtype after another within the first."""
        import torch

        with torch.inference_mode():
            for place, (precision, dtype) in enumerate(formats.items()):
                share = self.left_s / (len(formats) - place)
                self.format(precision, dtype, time.perf_counter() + share)

    def format(self, precision: str, dtype: str, end: float) -> None:
        """One format: grid, steps held out, prompts."""
        loop = self.loop(dtype, end)
        self.progress.section(
            f"{precision}: {loop.shape.layers} of {self.model.layers} layers, {dtype} kernels"
        )
        for place, kv_dtype in enumerate(self.question.kv_dtypes):
            loop.kv_dtype = kv_dtype
            begun = time.perf_counter()
            last = begun + (end - begun) / (len(self.question.kv_dtypes) - place)
            # All of it twice: the machine drifts, and a fit to one moment drifts with it.
            half = begun + (last - begun) / 2
            most = self.grid(loop, precision, 0, begun + GRID_SHARE * (last - begun))
            self.shallow(loop, precision)
            self.deep(loop, precision)
            self.rows(loop, precision, most)
            self.held_out(loop, precision, 0, most, half)
            self.grid(loop, precision, 1, last, most)
            self.held_out(loop, precision, 1, most, last)
        self.prompts(loop, precision, end)
        if self.question.general:
            self.general(dtype, precision)

    def general(self, dtype: str, precision: str) -> None:
        """Products of shapes that many models have: what the form for other shapes rests on."""
        import torch

        generator = torch.Generator().manual_seed(self.question.seed)
        for n, k in GENERAL:
            one = matrix(n=n, k=k, dtype=dtype, device=self.bench.device, generator=generator)
            self.products(dtype, precision, [one], GENERAL_ROWS)

    def products(self, dtype: str, precision: str, matrices: list[Matrix], rows: tuple[int, ...]) -> None:
        """Products of like matrices by themselves, over data that no cache holds, at each missing m."""
        n, k = matrices[0].n, matrices[0].k
        missing = [m for m in rows if ("gemm", (dtype, m, n, k, 0, 0)) not in self.journal.points]
        sets = rotated(matrices, self.bench.cold_bytes) if missing else matrices
        for m in missing:
            if self.left_s < 0:
                return
            self.progress.show(f"{precision} {n} x {k}, m {m}", self.left_s)
            made, conditions = self.bench.watched(
                partial(product, sets, m, self.bench.clock, seconds=OP_S, least=3, workspace=self.workspace),
                until=self.end,
            )
            found = point("gemm", (dtype, m, n, k, 0, 0), made, conditions)
            self.journal.add(replace(found, void=found.void or self.impossible(sets[0].bytes, found)))

    def loop(self, dtype: str, end: float) -> DecodeLoop:
        """As many layers as memory holds and the time allows: the whole model, where it can be."""
        shape = loop_shape(self.model)
        few = replace(shape, layers=min(PROBE_LAYERS, shape.layers))
        loop = DecodeLoop(few, dtype=dtype, device=self.bench.device, head=self.head, seed=self.question.seed)
        self.head, self.workspace = loop.head, loop.workspace
        layer = sum(made.bytes for made in loop.layers[0].values())
        by_memory = self.by_memory = int(self.room_bytes() // layer)
        loop.start(batch=1, context=128)
        loop.step()
        begun = time.perf_counter()
        loop.hidden_state()
        layer_s = (time.perf_counter() - begun) / few.layers
        begun = time.perf_counter()
        loop.step()
        rest_s = max(0.0, time.perf_counter() - begun - layer_s * few.layers)
        by_time = int(((end - time.perf_counter()) / STEPS_A_FORMAT - rest_s) / layer_s)
        grid = {(1, 128), (2, 512)}  # of a run that was stopped: neither deep nor cut alone
        found = [
            one.layers
            for one in self.journal.of("step")
            if one.dtype == dtype and one.use == "anchor" and (one.batch, one.context) in grid
        ]
        wanted = max(found) if found else min(shape.layers, by_memory, max(LEAST_LAYERS, by_time))
        try:
            loop.extend(wanted)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            self.warnings.append(f"memory holds {loop.shape.layers} of {wanted} layers in {dtype}")
        return loop

    def room_bytes(self) -> float:
        """Memory that a model's layers may take."""
        if self.bench.device.type == "cuda":
            import torch

            free: int = torch.cuda.mem_get_info(self.bench.device)[0]
            return 0.6 * free
        from capplan.calibrate.hardware import memory_bytes

        return 0.4 * memory_bytes() - float(self.head.bytes)

    def grid(self, loop: DecodeLoop, precision: str, turn: int, end: float, at_most: int = 1 << 20) -> int:
        """Operations and whole steps over the grid, small batches first; the largest batch measured."""
        most, last, seen = 0, 0.0, 0
        for batch, context in QUICK_GRID if self.question.quick else GRID:
            now = time.perf_counter()
            if batch > at_most or (batch > LEAST_BATCH and now + last * batch / max(1, seen) > end):
                break
            if now > (end if turn else self.end) and most > 1:
                break
            self.sequences(loop, precision, batch, context, turn)
            most, seen, last = max(most, batch), batch, time.perf_counter() - now
        return most

    def sequences(self, loop: DecodeLoop, precision: str, batch: int, context: int, turn: int) -> None:
        """One (batch, context): its operations by themselves, and the step as a whole."""
        key = self._step_key(loop, precision, batch, context, "anchor", turn)
        if ("step", key) in self.journal.points:
            return
        if not self.started(loop, key, batch, context):
            return
        self.progress.show(f"{precision} b{batch} c{context}", self.left_s)
        loop.step()  # the first pass is discarded

        def both() -> tuple[dict[str, Timing], Timing]:
            loop.at(context)
            found = timed(loop, self.bench.clock, step_s=STEP_S, op_s=OP_S, cold_bytes=self.bench.cold_bytes)
            loop.at(context)
            return found, self.bench.clock.time(loop.advance, seconds=STEP_S, warm=True, rotation=STEPS)

        (found, whole), conditions = self.bench.watched(both, until=self.end)
        for name, each in found.items():
            made = self.named(loop, name, batch, context, turn, each, conditions)
            if made.void is None and made.kind in ("gemm", "attention") and self.cold(loop):
                read = loop.kv_bytes() if name == "attention" else loop.matrix(name).bytes
                made = replace(made, void=self.impossible(read, made))
            self.journal.add(made)
        self.journal.add(point("step", key, whole, conditions))
        self.refuse_busy()

    def cold(self, loop: DecodeLoop) -> bool:
        """Whether a product finds none of its weights in the cache: on a CPU a step's others come between."""
        return self.bench.device.type == "cuda" or loop.weight_bytes() >= self.bench.cold_bytes

    def shallow(self, loop: DecodeLoop, precision: str) -> None:
        """Steps of half as many layers: anchors that tell what a layer adds from what every step does."""
        layers, shape = loop.layers, loop.shape
        loop.layers = layers[: max(1, len(layers) // 2)]
        loop.shape = replace(shape, layers=len(loop.layers))
        for batch, context in SHALLOW:
            self.step(loop, precision, batch, context, "anchor", 0)
        loop.layers, loop.shape = layers, shape

    def deep(self, loop: DecodeLoop, precision: str) -> None:
        """A few steps of the whole model, or what memory holds of it, where the grid has fewer layers.

        Without them nothing tells how far a cut model's steps carry.
        """
        layers, shape = loop.layers, loop.shape
        most = min(self.model.layers, self.by_memory)
        if most <= len(layers):
            return
        loop.layers = list(layers)
        try:
            loop.extend(most)
            for use, places in (("anchor", DEEP), ("held out", DEEP_HELD_OUT)):
                for batch, context in places:
                    self.step(loop, precision, batch, context, use, 0)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            self.warnings.append(f"memory holds {len(loop.layers)} of {most} layers in {loop.dtype}")
        finally:
            loop.layers, loop.shape = layers, shape

    def refuse_busy(self) -> None:
        """MachineBusyError where the wall clock was not named and most of the first steps are void."""
        steps = [one for one in self.journal.points.values() if one.kind == "step"]
        voided = sum(one.void is not None and one.void != "out of memory" for one in steps)
        first = self.question.clock == "auto" and len(steps) <= FIRST_STEPS
        if first and self.bench.clock.name == "wall" and voided >= 2 and 2 * voided > len(steps):
            raise MachineBusyError(time.perf_counter() - self.begun)

    def rows(self, loop: DecodeLoop, precision: str, most: int) -> None:
        """Products at more m: kernels take rows in blocks, and a line between two m misses it."""
        wanted = tuple(m for m in EXTRA_ROWS if m <= most)
        for name, matrices in loop.products():
            if name != "lm_head":
                self.products(loop.dtype, precision, matrices, wanted)

    def named(
        self,
        loop: DecodeLoop,
        name: str,
        m: int,
        context: int,
        turn: int,
        made: Timing,
        conditions: Conditions,
    ) -> Point:
        """A timing by the operation's name in the loop, as a point."""
        shape = loop.shape
        key: Key
        if name == "lm_head":
            kind, key = "gemm", ("bf16", m, shape.vocab, shape.hidden, context, turn)
        elif name in shape.linears:
            kind, key = "gemm", (loop.dtype, m, *shape.linears[name], context, turn)
        elif name == "attention" and loop.prompt:
            kind, key = "prefill", (m, loop.dtype)
        elif name == "attention":
            kind, key = "attention", (loop.kv_dtype, m, context, turn)
        else:
            kind, key = "small", (name, m, m * shape.small_bytes[name], context, turn)
        return point(kind, key, made, conditions)

    def held_out(self, loop: DecodeLoop, precision: str, turn: int, most: int, end: float) -> None:
        """Whole steps that no fit sees, and the same without blocks for two of them."""
        twins = 0
        for batch, context in HELD_OUT:
            least = LEAST_HELD_OUT if time.perf_counter() < self.end else 1
            enough = self._count(loop, "held out") >= least
            if batch > most or (time.perf_counter() > end and enough):
                continue
            self.step(loop, precision, batch, context, "held out", turn)
            wanted = 2 if time.perf_counter() < end else 1
            if not turn and twins < wanted and batch > 1 and loop.dtype == "bf16":
                twins += 1
                self.step(loop, precision, batch, context, "contiguous", turn)

    def _count(self, loop: DecodeLoop, use: str) -> int:
        return sum(one.use == use and one.dtype == loop.dtype for one in self.journal.of("step"))

    def step(self, loop: DecodeLoop, precision: str, batch: int, context: int, use: str, turn: int) -> None:
        """One whole step."""
        key = self._step_key(loop, precision, batch, context, use, turn)
        if ("step", key) in self.journal.points or not self.started(loop, key, batch, context):
            return
        flat = loop.contiguous() if use == "contiguous" else None
        self.progress.show(f"{precision} b{batch} c{context} {use}", self.left_s)
        made, conditions = self.bench.watched(
            lambda: self.bench.clock.time(
                lambda number: loop.advance(number, flat=flat),
                seconds=STEP_S,
                least=LEAST_STEPS,
                rotation=STEPS,
            ),
            until=self.end,
        )
        told = use == "held out" and not turn and (batch, context) in ENERGY_AT
        energy = self.joules_per_token(loop, batch) if told else None
        self.journal.add(replace(point("step", key, made, conditions), joules_per_token=energy))

    def joules_per_token(self, loop: DecodeLoop, batch: int) -> float | None:
        """Energy of a GPU over ENERGY_S of replayed steps; None where no counter tells."""
        clock = self.bench.clock
        if not isinstance(clock, GpuClock) or self.bench.read_state().energy_j is None:
            return None
        graph = clock.capture(loop.advance, STEPS)
        before = self.bench.read_state().energy_j or 0.0
        steps = clock.replayed(graph, ENERGY_S)
        after = self.bench.read_state().energy_j or 0.0
        return round((after - before) / (steps * batch), 6) if after > before else None

    def _step_key(
        self, loop: DecodeLoop, precision: str, batch: int, context: int, use: str, turn: int = 0
    ) -> Any:
        return (precision, loop.dtype, loop.kv_dtype, batch, context, loop.shape.layers, use, turn)

    def started(self, loop: DecodeLoop, key: Any, batch: int, context: int) -> bool:
        """Make the sequences' caches; False, and a void point, where memory does not hold them."""
        try:
            # Operations are timed one by one on a GPU only: on a CPU the rest of a step comes between.
            cold = self.bench.cold_bytes if self.bench.device.type == "cuda" else 0
            loop.start(batch=batch, context=context, cold_bytes=cold)
            return True
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            self.journal.add(Point(kind="step", key=key, void="out of memory"))
            self.warnings.append(f"b{batch} c{context} does not fit into memory: left out")
            return False

    def prompts(self, loop: DecodeLoop, precision: str, end: float) -> None:
        """Prompts through the first layers, while time remains; the first one, and one held out, always."""
        shape, whole = loop.shape, loop.layers
        loop.layers = loop.layers[:PROMPT_LAYERS]
        loop.shape = replace(shape, layers=len(loop.layers))
        last = 0.0
        loop.start_prompt(tokens=PROMPTS_HELD_OUT[0])
        loop.hidden_state()  # the first pass is discarded
        for tokens in QUICK_PROMPTS if self.question.quick else PROMPTS:
            if last and time.perf_counter() + 5 * last > end:
                break
            begun = time.perf_counter()
            loop.start_prompt(tokens=tokens)
            self.progress.show(f"{precision} prompt of {tokens}", self.left_s)
            found, conditions = self.bench.watched(
                lambda: timed(
                    loop, self.bench.clock, step_s=STEP_S, op_s=OP_S, cold_bytes=self.bench.cold_bytes
                ),
                until=self.end,
            )
            for name, each in found.items():
                self.journal.add(self.named(loop, name, tokens, 0, 0, each, conditions))
            last = time.perf_counter() - begun
        for tokens in PROMPTS_HELD_OUT:
            loop.start_prompt(tokens=tokens)
            self.progress.show(f"{precision} prompt of {tokens}, held out", self.left_s)
            whole_step, conditions = self.bench.watched(
                lambda: self.bench.clock.time(
                    lambda _: loop.head(loop.hidden_state()[-1:]), seconds=0.0, least=1, warm=True
                ),
                until=self.end,
            )
            key = self._step_key(loop, precision, 1, tokens, "prompt")
            self.journal.add(point("step", key, whole_step, conditions))
        loop.layers, loop.shape = whole, shape

    def impossible(self, read_bytes: int, made: Point) -> str | None:
        """Weights or a cache read faster than memory gives them: a bug, not a result."""
        share = read_bytes / made.seconds / self.bench.read_bytes_per_s if made.us_p50 else 0.0
        return f"{share:.0%} of measured bandwidth" if share > 1 else None


class Progress:
    """Where a run is, told to whoever listens: one line, rewritten."""

    def __init__(self, say: Say, total_s: float) -> None:
        self.say, self.total_s = say, total_s

    def section(self, text: str) -> None:
        """A new part of the run."""
        self.say(text)

    def show(self, text: str, left_s: float) -> None:
        """What is being timed, and how long the rest may take."""
        done = min(1.0, max(0.0, 1 - left_s / self.total_s))
        self.say(f"\r{done:4.0%}  {text:<32} about {max(0, left_s):.0f} s left")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is short, on a CPU or a GPU."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text
