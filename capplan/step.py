"""Time of one engine step: some sequences decode a token each, some prompts advance by a chunk.

    step = host + fused · prompts · Σ (products + attention + experts + collectives + small kernels)

`compile` turns a model, a GPU and a layout into a StepTable, which everything downstream reads. Products and
experts are exact at whole numbers of tokens, attention is piecewise affine in the tokens kept. What fusion
leaves of any part is no less than physics' time of it (`OpCosts.floor`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from capplan import op_range
from capplan.errors import InputError
from capplan.formulas.queueing import prompt_pairs as pairs_of
from capplan.op_costs import Bounds, OpCosts
from capplan.specs import Format, Gpu, Model, Parallelism
from capplan.work import Mix, StepWork, work_of

KNOTS_PER_OCTAVE: Final = 8
"""Knots of attention's time over the tokens kept: with 8 a curve's chord is within 0.1 % of it."""

CHUNKS_KEPT: Final = 65536
"""Times of prompt chunks kept, for prompts of the same length come again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What an engine adds to a step's kernels: a fixed time, and one for each sequence.

    `fused` is how much of the kernels' summed time remains where the engine fuses them; `prompts` how much
    longer than that a step of prompts takes, outside graphs and with the GPU at its power limit.
    """

    step_s: float = 0.0
    sequence_s: float = 0.0
    fused: float = 1.0
    prompts: float = 1.0

    def kernels(self, tokens: float, prompt_tokens: float) -> float:
        """A step's time over its kernels' summed: fused · (1 + (prompts − 1) · share of prompt tokens)."""
        if not prompt_tokens:
            return self.fused
        return self.fused * (1 + (self.prompts - 1) * prompt_tokens / tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one step computes, over the whole replica.

    `kv_tokens` sums the contexts of the `decode_sequences`; `prompt_pairs` the query-key pairs of the
    `prompt_tokens` new tokens of `prompt_sequences` chunks (n · past + n · (n + 1) / 2 each).
    """

    decode_sequences: float = 0
    kv_tokens: float = 0
    prompt_sequences: float = 0
    prompt_tokens: float = 0
    prompt_pairs: float = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """One kind of operation of a step: all its calls together.

    `bound_s` is physics alone; `outside` says what of its shape no calibration measured.
    """

    kind: str
    name: str
    dtype: str
    count: int
    flop: float
    bytes: float
    bound_s: float
    time_s: float
    outside: str = ""


Piece = tuple[float, float, float, float]
"""Over contexts from `first` to `end`, a time of base + slope · contexts: (base_s, slope_s, first, end)."""


class StepTable:
    """Step times of one model on one GPU layout, worked out as they are asked for.

    A decoding sequence brings `work.queries` tokens to a step, each of them sampled.
    """

    def __init__(self, work: StepWork, costs: Bounds, host: Host | None = None) -> None:
        self.work, self.costs, self.host = work, costs, host or Host()
        self._floor = costs.floor()
        # Sequences of one attention rank in one pipeline slot.
        self.share = 1 / (work.parallel.dp * work.parallel.pp)
        self._tokens: dict[int, float] = {}
        self._sequences: dict[int, float] = {}
        self._attention: dict[tuple[int, int, int], float] = {}
        self._pieces: dict[tuple[int, int], Piece] = {}
        self._steps: dict[tuple[int, int], Piece] = {}
        self._chunks: dict[tuple[float, float, float], float] = {}

    def step_s(
        self,
        *,
        decode_sequences: float,
        kv_tokens: float,
        prompt_tokens: float = 0,
        prompt_pairs: float | None = None,
        prompt_sequences: float | None = None,
    ) -> float:
        """Time of a step, in seconds; arguments as in `Load`, prompts from their beginning unless said.

        `prompt_sequences` defaults to one chunk, `prompt_pairs` to chunks without a past.
        """
        if prompt_sequences is None:
            prompt_sequences = 1.0 if prompt_tokens else 0.0
        if prompt_pairs is None:
            chunk = prompt_tokens / prompt_sequences if prompt_sequences else 0.0
            prompt_pairs = prompt_sequences * pairs_of(new_tokens=chunk)
        sequences = decode_sequences + prompt_sequences
        if not sequences:
            return 0.0
        brought = decode_sequences * self.work.queries
        time = self._dense(brought + prompt_tokens, brought + prompt_sequences)
        if isinstance(decode_sequences, int):
            if decode_sequences:
                base, slope, _, _ = self._attention_piece(decode_sequences, kv_tokens)
                time += base + slope * kv_tokens
        elif decode_sequences:
            time += self._decode(decode_sequences * self.share, kv_tokens * self.share)
        if prompt_tokens:
            time += self._prompts(
                prompt_sequences * self.share, prompt_tokens * self.share, prompt_pairs * self.share
            )
        kernels = self.host.kernels(brought + prompt_tokens, prompt_tokens)
        return self.host.step_s + self.host.sequence_s * sequences + kernels * time

    def _dense(self, tokens: float, sequences: float) -> float:
        """Everything but attention: exact at whole numbers, linear between."""
        if isinstance(tokens, int) and isinstance(sequences, int):
            return self._at_tokens(tokens) + self._at_sequences(sequences)
        return _between(self._at_tokens, tokens) + _between(self._at_sequences, sequences)

    def _at_tokens(self, tokens: int) -> float:
        found = self._tokens.get(tokens)
        if found is None:
            found = self._tokens[tokens] = self._no_less(lambda costs: self._by_tokens(costs, tokens))
        return found

    def _by_tokens(self, costs: Bounds, tokens: int) -> float:
        own, slot = tokens * self.share, tokens / self.work.parallel.pp
        time = sum(gemm.count * costs.gemm(gemm, own) for gemm in self.work.gemms if gemm.each == "token")
        time += sum(entry.count * costs.experts(entry, slot) for entry in self.work.experts)
        return time + self._small(costs, "token", own, slot)

    def _no_less(self, seconds: Callable[[Bounds], float]) -> float:
        """A part's time, of which `host.fused` leaves no less than the part's bound."""
        time = seconds(self.costs)
        return time if self._floor is None else max(time, seconds(self._floor) / self.host.fused)

    def _small(self, costs: Bounds, each: str, own: float, slot: float) -> float:
        """Collectives and small kernels; experts' collectives carry the tokens of all attention ranks."""
        time = 0.0
        for collective in self.work.collectives:
            if collective.each == each:
                count = slot if collective.name == "experts" else own
                time += collective.count * costs.collective(collective, count)
        for entry in self.work.elementwise:
            if entry.each == each:
                time += entry.count * costs.elementwise(entry, own)
        return time

    def _at_sequences(self, sequences: int) -> float:
        found = self._sequences.get(sequences)
        if found is None:
            found = self._no_less(lambda costs: self._by_sequences(costs, sequences))
            self._sequences[sequences] = found
        return found

    def _by_sequences(self, costs: Bounds, sequences: int) -> float:
        own = sequences * self.share
        time = sum(gemm.count * costs.gemm(gemm, own) for gemm in self.work.gemms if gemm.each == "sequence")
        return time + self._small(costs, "sequence", own, own)

    def _decode(self, batch: float, contexts: float) -> float:
        """Attention of the decoding sequences of one rank."""
        return sum(
            mix.count * _between(lambda at, i=i: self._knotted(i, at, contexts), max(1.0, batch))
            for i, mix in enumerate(self.work.mixes)
        )

    def _knotted(self, index: int, batch: int, contexts: float) -> float:
        """One mixing's time, affine between knots of the entries kept."""
        kept = self.work.mixes[index].kept(contexts, batch)
        if kept < 1:
            return self._knot(index, batch, -1)
        place = math.log2(kept) * KNOTS_PER_OCTAVE
        low = math.floor(place)
        first, second = 2 ** (low / KNOTS_PER_OCTAVE), 2 ** ((low + 1) / KNOTS_PER_OCTAVE)
        share = (kept - first) / (second - first)
        return self._knot(index, batch, low) * (1 - share) + self._knot(index, batch, low + 1) * share

    def _knot(self, index: int, batch: int, knot: int) -> float:
        key = (index, batch, knot)
        found = self._attention.get(key)
        if found is None:
            kept = 2 ** (knot / KNOTS_PER_OCTAVE) if knot >= 0 else 0.0
            found = self._no_less(lambda costs: costs.decode(self.work.mixes[index], batch, kept))
            self._attention[key] = found
        return found

    def decode_piece(self, decode_sequences: int, kv_tokens: float) -> Piece:
        """A decode-only step of whole sequences as an affine function of the contexts around these.

        The same as `step_s`, which is affine between the knots of attention's time.
        """
        key = (decode_sequences, int(math.log2(kv_tokens) * KNOTS_PER_OCTAVE) if kv_tokens > 1 else -1)
        found = self._steps.get(key)
        if found is None or not found[2] <= kv_tokens < found[3]:
            found = self._steps[key] = self._step_piece(decode_sequences, kv_tokens)
        return found

    def _step_piece(self, decode_sequences: int, kv_tokens: float) -> Piece:
        base, slope, first, end = self._attention_piece(decode_sequences, kv_tokens)
        brought = decode_sequences * self.work.queries
        host = self.host.step_s + self.host.sequence_s * decode_sequences
        kernels = self.host.kernels(brought, 0)
        return host + kernels * (self._dense(brought, brought) + base), kernels * slope, first, end

    def _attention_piece(self, sequences: int, contexts: float) -> Piece:
        key = (sequences, int(math.log2(contexts) * KNOTS_PER_OCTAVE) if contexts > 1 else -1)
        found = self._pieces.get(key)
        if found is None or not found[2] <= contexts < found[3]:
            found = self._pieces[key] = self._new_piece(sequences, contexts)
        return found

    def _new_piece(self, sequences: int, contexts: float) -> Piece:
        batch = max(1.0, sequences * self.share)
        low = math.floor(batch)
        base = slope = 0.0
        end = math.inf
        for whole, weight in ((low, 1 - (batch - low)), (low + 1, batch - low)):
            if not weight:
                continue
            for index, mix in enumerate(self.work.mixes):
                piece = self._piece(index, whole, contexts * self.share)
                base += weight * mix.count * piece[0]
                slope += weight * mix.count * piece[1]
                end = min(end, piece[2])
        return base, slope * self.share, contexts, end / self.share

    def _piece(self, index: int, batch: int, contexts: float) -> tuple[float, float, float]:
        """One mixing's time as base + slope · contexts, and the contexts up to which that holds."""
        mix = self.work.mixes[index]
        kept = mix.kept(contexts, batch)
        if kept < 1:
            # Below one entry the time is that of none, up to the contexts of the first one.
            return self._knot(index, batch, -1), 0.0, mix.contexts_of(1.0, batch)
        low = math.floor(math.log2(kept) * KNOTS_PER_OCTAVE)
        first, second = 2 ** (low / KNOTS_PER_OCTAVE), 2 ** ((low + 1) / KNOTS_PER_OCTAVE)
        at_first, at_second = self._knot(index, batch, low), self._knot(index, batch, low + 1)
        slope = (at_second - at_first) / (second - first)
        end = mix.contexts_of(second, batch)
        if mix.kept(contexts * 2, batch) == kept:
            # The window is full: contexts no longer matter.
            return at_first + slope * (kept - first), 0.0, math.inf
        return at_first - slope * first, slope / mix.mixing.stride, end

    def decode_steps_s(self, decode_sequences: Any, kv_tokens: Any) -> Any:
        """Decode-only steps of many (sequences, contexts summed) at once: numpy arrays in, seconds out.

        Sequences are whole numbers. The same table as `step_s`.
        """
        import numpy as np

        sequences = np.asarray(decode_sequences, dtype=np.int64)
        contexts = np.asarray(kv_tokens, dtype=np.float64)
        times = np.empty(np.broadcast(sequences, contexts).shape)
        sequences, contexts = np.broadcast_arrays(sequences, contexts)
        for count in np.unique(sequences):
            chosen = sequences == count
            brought = int(count) * self.work.queries
            dense = self._dense(brought, brought)
            attention = self._decode_array(float(count) * self.share, contexts[chosen] * self.share)
            host = self.host.step_s + self.host.sequence_s * float(count)
            times[chosen] = host + self.host.fused * (dense + attention)
        return times

    def _decode_array(self, batch: float, contexts: Any) -> Any:
        import numpy as np

        batch = max(1.0, batch)
        low = math.floor(batch)
        made = np.zeros(contexts.shape)
        for whole, weight in ((low, 1 - (batch - low)), (low + 1, batch - low)):
            if not weight:
                continue
            for mix in self.work.mixes:
                kept = np.maximum(mix.kept_array(contexts, whole), 1.0)
                place = np.log2(kept) * KNOTS_PER_OCTAVE
                first, last = int(place.min()), int(place.max()) + 1
                knots = 2 ** (np.arange(first, last + 1) / KNOTS_PER_OCTAVE)
                times = np.broadcast_to(self.costs.decode_array(mix, whole, knots), knots.shape)
                if self._floor is not None:
                    bounds = self._floor.decode_array(mix, whole, knots)
                    times = np.maximum(times, bounds / self.host.fused)
                made += weight * mix.count * np.interp(kept, knots, times)
        return made

    def _prompts(self, sequences: float, tokens: float, pairs: float) -> float:
        key = (sequences, tokens, pairs)
        found = self._chunks.get(key)
        if found is None:
            found = self._no_less(
                lambda costs: sum(
                    mix.count * costs.prefill(mix, sequences, tokens, windowed_pairs(mix, tokens, pairs))
                    for mix in self.work.mixes
                )
            )
            if len(self._chunks) >= CHUNKS_KEPT:
                self._chunks.clear()
            self._chunks[key] = found
        return found

    def ops(self, load: Load) -> tuple[OpTime, ...]:
        """The step's operations, each with its work, its bound and its time."""
        prompts = load.prompt_tokens
        factor = self.host.kernels(load.decode_sequences * self.work.queries + prompts, prompts)
        made = tuple(self._ops(load))
        raised: dict[str, float] = {}
        for part in {part for part, _ in made if part and self._floor is not None}:
            own = [op for at, op in made if at == part]
            time, bound = sum(op.time_s for op in own), sum(op.bound_s for op in own)
            raised[part] = max(1.0, bound / (self.host.fused * time)) if time else 1.0
        return tuple(
            replace(op, time_s=op.time_s * factor * raised.get(part, 1.0)) if part else op
            for part, op in made
        )

    @cached_property
    def _bounds(self) -> Bounds:
        return Bounds(self.costs.rates.gpu, self.costs.skew)

    def _ops(self, load: Load) -> Iterator[tuple[str, OpTime]]:
        """Every operation by its costs, and the part of the step that is no less than physics with it.

        "" is the engine's own, which nothing scales.
        """
        brought = load.decode_sequences * self.work.queries
        tokens, sampled = brought + load.prompt_tokens, brought + load.prompt_sequences
        own = {"token": tokens * self.share, "sequence": sampled * self.share}
        slot = tokens / self.work.parallel.pp
        for gemm in self.work.gemms:
            m = own[gemm.each]
            yield gemm.each, self._op("gemm", gemm.name, gemm, gemm.load(m), "gemm", (gemm, m))
        for index, mix in enumerate(self.work.mixes):
            batch = load.decode_sequences * self.share
            if batch:
                kept = mix.kept(load.kv_tokens * self.share, batch)
                work, call = mix.decode_load(batch, kept), (mix, batch, kept)
                yield f"decode {index}", self._op("decode attention", mix.name, mix, work, "decode", call)
            new = load.prompt_tokens * self.share
            if new:
                chunks = load.prompt_sequences * self.share
                pairs = windowed_pairs(mix, new, load.prompt_pairs * self.share)
                work, prompt = mix.prefill_load(chunks, new, pairs), (mix, chunks, new, pairs)
                yield "prefill", self._op("prefill attention", mix.name, mix, work, "prefill", prompt)
        for entry in self.work.experts:
            yield "token", self._op("experts", entry.name, entry, entry.load(slot), "experts", (entry, slot))
        for collective in self.work.collectives:
            count = slot if collective.name == "experts" else own[collective.each]
            name = f"{collective.op} ({collective.name})"
            moved = (0.0, collective.wire_bytes(count))
            yield (
                collective.each,
                self._op("collective", name, collective, moved, "collective", (collective, count)),
            )
        for small in self.work.elementwise:
            count = own[small.each]
            moved = (0.0, small.bytes_each * count)
            yield small.each, self._op("elementwise", small.name, small, moved, "elementwise", (small, count))
        sequences = load.decode_sequences + load.prompt_sequences
        host = self.host.step_s + self.host.sequence_s * sequences
        if host:
            yield (
                "",
                OpTime(
                    kind="host", name="engine", dtype="", count=1, flop=0, bytes=0, bound_s=0, time_s=host
                ),
            )

    def _op(
        self,
        kind: str,
        name: str,
        shape: Any,
        load: tuple[float, float],
        method: str,
        arguments: tuple[Any, ...],
    ) -> OpTime:
        """All `count` calls of one shape."""
        count = shape.count
        return OpTime(
            kind=kind,
            name=name,
            dtype=getattr(shape, "dtype", ""),
            count=count,
            flop=load[0] * count,
            bytes=load[1] * count,
            bound_s=getattr(self._bounds, method)(*arguments) * count,
            time_s=getattr(self.costs, method)(*arguments) * count,
            outside=op_range.outside(self.costs, method, arguments),
        )


def windowed_pairs(mix: Mix, tokens: float, pairs: float) -> float:
    """Query-key pairs that a mixing's window, stride and selection leave of all `pairs`."""
    if not tokens:
        return 0.0
    mean = pairs / tokens
    # The mean of min(position, w) over a prompt of n = 2 · mean tokens is w − w²/2n once n > w.
    if mix.mixing.window is not None and 2 * mean > mix.mixing.window:
        window = mix.mixing.window
        mean = min(mean, window - window**2 / (4 * mean))
    mean /= mix.mixing.stride
    if mix.mixing.selected is not None and 2 * mean > mix.mixing.selected:
        most = mix.mixing.selected
        mean = min(mean, most - most**2 / (4 * mean))
    return tokens * mean


def _between(function: Any, value: float) -> float:
    """A function of whole numbers at a value between two of them."""
    low = math.floor(value)
    share = value - low
    at_low: float = function(low)
    return at_low if not share else at_low * (1 - share) + function(low + 1) * share


def compile(
    model: Model,
    gpu: Gpu,
    *,
    precision: Format | None = None,
    kv_bits: float = 16,
    parallel: Parallelism | None = None,
    engine: str = "vllm",
    host: Host | None = None,
    bounds: bool = False,
) -> StepTable:
    """The step times of `model` on `gpu`: physics with `bounds`, else by the shipped calibrations.

    Errors: InputError for a model whose layers are not known, and for a GPU without a peak rate.
    """
    if not model.groups:
        raise InputError(
            f"the layers of {model.name} are not known",
            where="--model",
            hint="give its config.json, or a catalog name",
        )
    work = work_of(model, precision, kv_bits=kv_bits, parallel=parallel or Parallelism())
    return StepTable(work, Bounds(gpu) if bounds else OpCosts(gpu, engine), host)
