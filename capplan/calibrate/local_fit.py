"""From a device's points to the numbers that predictions read, and how wrong they are on steps held out."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import median
from typing import Any, Final

import numpy as np

from capplan import catalog
from capplan.calibrate import forms, search
from capplan.calibrate.fit import band, rounded
from capplan.calibrate.loop import LoopShape
from capplan.calibrate.points import Point
from capplan.calibrate.tables import Table
from capplan.errors import InputError
from capplan.local_calibration import LOCAL, LocalCalibration
from capplan.local_costs import Anchor, LocalCosts, anchored, host
from capplan.specs import Gpu, Model, Parallelism
from capplan.step import Host, StepTable
from capplan.work import StepWork, work_of

Array = Any
RIDGE: Final = 0.03
"""How much a factor's distance from 1 counts beside a step's relative error."""


def rising(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """The nearest values that do not fall: neighbours that do are pooled (isotonic regression)."""
    pools: list[list[float]] = []
    for place, value in enumerate(values):
        pools.append([value, 1.0 if weights is None else weights[place], 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, wa, na), (b, wb, nb) = pools[-2:]
            pools[-2:] = [[(a * wa + b * wb) / (wa + wb), wa + wb, na + nb]]
    return [rounded(value) for value, _, count in pools for _ in range(int(count))]


def nonnegative(rows: Array, target: Array) -> Array:
    """Least squares without negative numbers: of all subsets of the columns, the best that has none."""
    best, least = np.zeros(rows.shape[1]), float("inf")
    for size in range(1, rows.shape[1] + 1):
        for chosen in combinations(range(rows.shape[1]), size):
            found = np.linalg.lstsq(rows[:, chosen], target, rcond=None)[0]
            left = float(((rows[:, chosen] @ found - target) ** 2).sum())
            if (found >= 0).all() and left < least - 1e-15:
                best, least = np.zeros(rows.shape[1]), left
                best[list(chosen)] = found
    return best


def relative(columns: Sequence[Sequence[float]], times: Sequence[float]) -> Array:
    """Non-negative least squares of relative errors."""
    rows = np.array(columns, dtype=float).T / np.array(times)[:, None]
    return nonnegative(rows, np.ones(len(times)))


def fit(points: Iterable[Point], shape: LoopShape, gpu: Gpu) -> dict[str, Any]:
    """Everything but the anchors. Raises InputError where points are too few."""
    by_kind: dict[str, list[Point]] = defaultdict(list)
    reasons: Counter[str] = Counter()
    for each in points:
        if each.void is None and each.us_p50:
            by_kind[each.kind].append(each)
        elif each.void is not None:
            reasons[each.void] += 1
    for kind, name in (("gemm", "products"), ("attention", "attention"), ("small", "small kernels")):
        if not by_kind[kind]:
            raise InputError(
                f"no point of {name} counts: {reasons.most_common(1)[0][0] if reasons else 'none was timed'}",
                where="capplan profile",
                hint="run it while nothing else uses the device; a busy CPU goes with --clock thread-cpu",
            )
    made: dict[str, Any] = {"gemm": _gemm(by_kind["gemm"])}
    made["decode_attention"] = _decode(by_kind["attention"], shape, gpu)
    if by_kind["prefill"]:
        made["prefill_attention"] = {"bf16": {LOCAL: _prefill(by_kind["prefill"], shape)}}
    made["elementwise"] = {"bf16": {LOCAL: _small(by_kind["small"], gpu)}}
    return made


def _medians(points: Iterable[Point], *names: str) -> dict[tuple[Any, ...], float]:
    """Median microseconds of the points that share these columns."""
    found: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for each in points:
        found[tuple(getattr(each, name) for name in names)].append(each.us_p50 or 0.0)
    return {key: median(values) for key, values in sorted(found.items())}


def _gemm(points: Sequence[Point]) -> dict[str, Any]:
    """By dtype: a table over m of every (n, k), and an affine form in n · k at every m."""
    made = {}
    for dtype in sorted({each.dtype for each in points}):
        times = _medians((each for each in points if each.dtype == dtype), "n", "k", "m")
        shapes: dict[str, Any] = {}
        for n, k in sorted({key[:2] for key in times}):
            ms = [m for a, b, m in times if (a, b) == (n, k)]
            shapes[f"{n} x {k}"] = {"m": ms, "us": rising([times[n, k, m] for m in ms])}
        made[dtype] = {LOCAL: {"shapes": shapes, "affine": _affine(times)}}
    return made


def _affine(times: Mapping[tuple[Any, ...], float]) -> dict[str, Any]:
    """t = fixed + weight · n · k at every m, by relative error."""
    ms, fixed, weight = sorted({m for _, _, m in times}), [], []
    for m in ms:
        own = {(n, k): us for (n, k, at), us in times.items() if at == m}
        a, b = relative([[1.0] * len(own), [n * k * 1e-3 for n, k in own]], list(own.values()))
        fixed.append(float(a))
        weight.append(float(b))
    return {"m": ms, "fixed_us": rising(fixed), "weight_ns": rising(weight)}


def _decode(points: Sequence[Point], shape: LoopShape, gpu: Gpu) -> dict[str, Any]:
    """By KV dtype: a line over the context at every batch, and the general form for other heads."""
    own = {
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "k_width": shape.head_dim,
        "v_width": shape.head_dim,
    }
    made = {}
    for kv in sorted({each.kv for each in points}):
        times = _medians((each for each in points if each.kv == kv), "batch", "context")
        table = _lines(times)
        columns = {
            "batch": np.array([b for b, _ in times], dtype=float),
            "kv_tokens": np.array([b * c for b, c in times], dtype=float),
            "copies": np.full(len(times), 1e9),
            **{name: np.full(len(times), float(value)) for name, value in own.items()},
        }
        seconds = np.array(list(times.values())) * 1e-6
        general = _searched("decode_attention", "fp8" if kv == "fp8" else "bf16", columns, seconds, gpu)
        made[kv] = {LOCAL: {"shape": own, "table": table, "general": general}}
    return made


def _lines(times: Mapping[tuple[Any, ...], float]) -> dict[str, Any]:
    """At every batch fixed + token · context; where one context was timed, all batches' share of a token."""
    keys, values = list(times), list(times.values())
    whole = relative([[1.0] * len(keys), [b for b, _ in keys], [b * c * 1e-3 for b, c in keys]], values)
    batches, fixed, token = sorted({b for b, _ in keys}), [], []
    for batch in batches:
        own = {c: us for (b, c), us in times.items() if b == batch}
        slope = float(whole[2]) * batch
        start = median(us - slope * c * 1e-3 for c, us in own.items())
        if len(own) > 1:
            a, b = relative([[1.0] * len(own), [c * 1e-3 for c in own]], list(own.values()))
            start, slope = float(a), float(b)
        fixed.append(max(0.0, start))
        token.append(slope)
    return {"batch": batches, "fixed_us": rising(fixed), "token_ns": rising(token)}


def _prefill(points: Sequence[Point], shape: LoopShape) -> dict[str, float]:
    """A line over tokens and pairs; of few points, the pairs before the rest."""
    times = _medians(points, "tokens")
    tokens = [float(one) for (one,) in times]
    columns = [[1.0] * len(tokens), [n * 1e-3 for n in tokens], [n * (n + 1) / 2 * 1e-3 for n in tokens]]
    kept = [2, 1, 0][: len(tokens)]
    found = relative([columns[place] for place in kept], list(times.values()))
    numbers = dict(zip(kept, found, strict=True))
    return {
        "width": shape.heads * 2 * shape.head_dim,
        "fixed_us": rounded(float(numbers.get(0, 0.0))),
        "token_ns": rounded(float(numbers.get(1, 0.0))),
        "pair_ns": rounded(float(numbers.get(2, 0.0))),
    }


def _small(points: Sequence[Point], gpu: Gpu) -> dict[str, Any]:
    """A table over bytes of every kernel by name, and the general form for others."""
    times = _medians(points, "name", "bytes")
    named: dict[str, Any] = {}
    for name in sorted({one for one, _ in times}):
        sizes = [size for one, size in times if one == name]
        named[name] = {"bytes": sizes, "us": rising([times[name, size] for size in sizes])}
    columns = {"bytes_moved": np.array([float(size) for _, size in times])}
    seconds = np.array(list(times.values())) * 1e-6
    return {"named": named, "general": _searched("elementwise", "bf16", columns, seconds, gpu)}


def _searched(
    op: str, dtype: str, columns: Mapping[str, Array], seconds: Array, gpu: Gpu
) -> dict[str, float]:
    """The numbers of an operation's shipped form."""
    table = Table(
        op=op, gpu_id=gpu.id, dtype=dtype, engine=LOCAL, columns=columns, seconds=seconds,
        groups=("",) * len(seconds),
    )  # fmt: skip
    numbers = search.chosen(forms.form(table, gpu), forms.variants(table), seconds, rounds=15)
    return {name: rounded(value) for name, value in numbers.items()}


def cut(model: Model, layers: int) -> Model:
    """A model of equal layers with only so many of them."""
    group = model.groups[0]
    return replace(model, groups=(replace(group, indices=group.indices[:layers]),))


def step_work(model: Model, step: Point) -> StepWork:
    """The work of a measured step."""
    precision = None if step.precision == "bf16" else catalog.weight_format(step.precision)
    kv_bits = 8.0 if step.kv == "fp8" else 16.0
    return work_of(cut(model, step.layers), precision, kv_bits=kv_bits, parallel=Parallelism())


def predicted_s(local: LocalCalibration, model: Model, step: Point) -> float:
    """A measured step as `capplan latency` works it out from the file: its step table and host term."""
    work = step_work(model, step)
    costs = anchored(local, "vllm", (), work)
    table = StepTable(work, costs, host(costs, Host(), step.layers))
    if step.use == "prompt":
        return table.step_s(decode_sequences=0, kv_tokens=0, prompt_tokens=step.context)
    return table.step_s(decode_sequences=step.batch, kv_tokens=step.batch * step.context)


def together(steps: Iterable[Point]) -> list[Point]:
    """Steps held out, each once: the middle of its measurements, and how far they are apart (`noise`)."""
    found: dict[tuple[Any, ...], list[Point]] = defaultdict(list)
    for each in steps:
        if each.kind == "step" and each.use == "held out" and each.void is None:
            found[each.key[:-1]].append(each)
    made = []
    for own in found.values():
        times = sorted(each.us_p50 or 0.0 for each in own)
        apart = round(times[-1] / times[0] - 1, 4) if len(times) > 1 and times[0] else None
        made.append(replace(own[0], us_p50=median(times), noise=apart))
    return made


def anchors(local: LocalCalibration, model: Model, steps: Sequence[Point]) -> dict[str, Any]:
    """By dtype: factors of products and attention, and times a layer and a step: from sums to whole steps."""
    made = {}
    for dtype in sorted({each.dtype for each in steps}):
        own = [each for each in steps if each.dtype == dtype]
        rows, times = [], np.array([each.seconds for each in own])
        for each in own:
            work = step_work(model, each)
            costs = LocalCosts(local, "vllm", anchor=Anchor())
            context = each.batch * each.context
            attention = sum(mix.count * costs.decode(mix, each.batch, context) for mix in work.mixes)
            table = StepTable(work, costs, Host())
            whole = table.step_s(decode_sequences=each.batch, kv_tokens=context)
            rows.append([whole - attention, attention, each.layers * 1e-6, 1e-6])
        scaled = np.array(rows) / times[:, None]
        if len({each.layers for each in own}) == 1:
            scaled = scaled[:, :3]  # what a step adds is not told from what its layers do
        weight = RIDGE * len(own) ** 0.5
        # Few steps cannot tell them apart: factors are drawn to 1, the parts that are added to 0.
        added = [float(column.mean()) for column in scaled[:, 2:].T]
        ridge = weight * np.diag([1.0, 1.0, *added])
        wanted = [weight, weight, *(0.0 for _ in added)]
        found = [
            rounded(float(one))
            for one in nonnegative(np.vstack([scaled, ridge]), np.concatenate([np.ones(len(own)), wanted]))
        ]
        made[dtype] = dict(zip(("gemm", "attention", "layer_us", "step_us"), [*found, 0.0][:4], strict=True))
    return made


def step_error(local: LocalCalibration, model: Model, steps: Sequence[Point]) -> dict[str, Any]:
    """By dtype: how far predicted steps are from measured ones that no fit saw."""
    made = {}
    for dtype in sorted({each.dtype for each in steps}):
        own = [each for each in steps if each.dtype == dtype]
        ratios = np.array([each.seconds / predicted_s(local, model, each) for each in own])
        off = np.abs(1 / ratios - 1) * 100
        low, high = band(ratios)
        noise = [each.noise for each in own if each.noise is not None]
        made[dtype] = {
            "p10": rounded(low),
            "p50": rounded(float(np.median(ratios))),
            "p90": rounded(high),
            "median_pct": round(float(np.median(off)), 2),
            "p90_pct": round(float(np.percentile(off, 90)), 2),
            "signed_pct": round(float(np.mean(1 / ratios - 1)) * 100, 2),
            "noise_floor_pct": round(100 * median(noise), 2) if noise else None,
            "rows": len(own),
        }
    return made
