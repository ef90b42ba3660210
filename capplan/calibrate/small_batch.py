"""Fit of small-batch speeds: fractions of a device's rates by backend and family of weight formats.

The logarithm of each number is a sum: a mean, and what the engine, the platform, the family and the pair of
engine and family add to it, each drawn to nought (a ridge). So a backend that was measured with one family or
on one card takes the rest from its kin. Least squares on log(predicted / measured), robust to single rows.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from capplan.formulas import small_batch as formulas
from capplan.results.small_batch import SmallBatchRun
from capplan.results.small_batch_names import TENSOR_PARALLEL
from capplan.small_batch import matrix_flop_per_s, vector_flop_per_s
from capplan.small_batch_speed import collectives

Array = NDArray[np.float64]

# How far a term may stand from its mean, as a standard deviation of its logarithm.
_SPREAD: Final = {"mean": 1.8, "engine": 0.58, "platform": 0.58, "family": 0.58, "engine family": 0.32}
# Few cards were measured through two platforms: what looks like a platform's part in a step is mostly a
# card's.
_STEP_SPREAD: Final = _SPREAD | {"platform": 0.18}
_RESIDUAL: Final = 0.15
"""Size of log(predicted / measured) from which a row counts less than by its square."""

MOST_BANDWIDTH: Final = 0.97
"""Share of the bandwidth above which nothing was measured at batch 1."""

_STEPS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One fitted number: where it starts, what else it depends on, and how far that may move it."""

    start: float
    on: tuple[str, ...] = ()
    spread: Mapping[str, float]


_ALL: Final = ("engine", "platform", "family", "engine family")
_DECODE: Final = {
    "bandwidth": Term(start=0.8, on=_ALL, spread=_STEP_SPREAD),
    "compute": Term(start=0.08, on=_ALL, spread=_STEP_SPREAD),
    "launch_us": Term(start=5, on=("engine", "platform"), spread=_STEP_SPREAD),
    "kv": Term(start=0.5, on=("platform",), spread=_STEP_SPREAD),
    "collective_us": Term(start=20, on=("engine",), spread=_STEP_SPREAD),
    "hop_us": Term(start=100, spread=_STEP_SPREAD),
    "board cuda": Term(start=1.7, spread=_STEP_SPREAD),
    "board other": Term(start=1.7, spread=_STEP_SPREAD),
}
_PROMPT: Final = {
    "prompt": Term(start=0.4, on=_ALL, spread=_SPREAD),
    "prompt_attention": Term(start=0.2, on=("engine", "platform"), spread=_SPREAD),
}


@dataclass(slots=True, kw_only=True, eq=False)
class Fit:
    """Fitted logarithms: by number, then by what it depends on ("mean": "") and that thing's name."""

    terms: Mapping[str, Term]
    values: dict[tuple[str, str, str], float]

    def number(self, name: str, keys: Mapping[str, str]) -> float:
        """One number for a run's engine, platform and family; what was never seen adds nothing."""
        total = self.values[name, "mean", ""]
        total += sum(self.values.get((name, kind, keys[kind]), 0.0) for kind in self.terms[name].on)
        return float(np.exp(total))


def run_keys(engine: str, platform: str, family: str) -> dict[str, str]:
    return {
        "engine": engine,
        "platform": platform,
        "family": family,
        "engine family": f"{engine} {family}",
    }


def fit_decode(runs: Sequence[SmallBatchRun]) -> Fit:
    """The numbers of a token's step."""
    arrays = _decode_arrays(runs)
    measured = np.array([1 / (run.decode_token_per_s or 1) for run in runs])
    return _fitted(runs, _DECODE, lambda numbers: _decode_time(arrays, numbers), measured)


def fit_prompt(runs: Sequence[SmallBatchRun], decode: Fit) -> Fit:
    """The numbers of a prompt, given those of a step."""
    arrays = _prompt_arrays(runs, decode)
    measured = np.array([run.prompt / (run.prompt_token_per_s or 1) for run in runs])
    return _fitted(runs, _PROMPT, lambda numbers: _prompt_time(arrays, numbers), measured)


def predict_decode(fit: Fit, runs: Sequence[SmallBatchRun]) -> Array:
    """Tokens per second."""
    numbers = {name: _numbers(fit, name, runs) for name in fit.terms}
    return 1 / _decode_time(_decode_arrays(runs), numbers)


def predict_prompt(fit: Fit, decode: Fit, runs: Sequence[SmallBatchRun]) -> Array:
    """Prompt tokens per second."""
    numbers = {name: _numbers(fit, name, runs) for name in fit.terms}
    return np.array([run.prompt for run in runs]) / _prompt_time(_prompt_arrays(runs, decode), numbers)


def leave_cards_out(
    runs: Sequence[SmallBatchRun],
    fit: Callable[[list[SmallBatchRun]], Fit],
    predict: Callable[[Fit, list[SmallBatchRun]], Array],
) -> Array:
    """Predictions for each run from the runs of all other cards."""
    made = np.zeros(len(runs))
    for card in sorted({run.host.gpu.id for run in runs}):
        places = [place for place, run in enumerate(runs) if run.host.gpu.id == card]
        others = [run for run in runs if run.host.gpu.id != card]
        made[places] = predict(fit(others), [runs[place] for place in places])
    return made


def prompts_with_cards_left_out(decode: Sequence[SmallBatchRun], prompt: Sequence[SmallBatchRun]) -> Array:
    """Prompt speeds of each run from the prompts and steps of all other cards."""
    made = np.zeros(len(prompt))
    for card in sorted({run.host.gpu.id for run in prompt}):
        steps = fit_decode([run for run in decode if run.host.gpu.id != card])
        others = fit_prompt([run for run in prompt if run.host.gpu.id != card], steps)
        places = [place for place, run in enumerate(prompt) if run.host.gpu.id == card]
        made[places] = predict_prompt(others, steps, [prompt[place] for place in places])
    return made


def _numbers(fit: Fit, name: str, runs: Sequence[SmallBatchRun]) -> Array:
    return np.array([fit.number(name, run_keys(run.engine, run.platform, run.family)) for run in runs])


def _decode_arrays(runs: Sequence[SmallBatchRun]) -> dict[str, Array]:
    ranks = [run.host.gpus if run.engine in TENSOR_PARALLEL else 1 for run in runs]
    columns = {
        "weight_bytes": [run.reads.token_bytes for run in runs],
        "flop": [run.reads.flop for run in runs],
        "kv_bytes": [run.reads.kv_bytes(run.context) for run in runs],
        "kernels": [run.reads.kernels for run in runs],
        "bytes_per_s": [run.host.gpu.memory_bandwidth_bytes_per_s for run in runs],
        "flop_per_s": [vector_flop_per_s(run.host.gpu) or 0 for run in runs],
        "ranks": ranks,
        "collectives": [collectives(run.reads.layers, n) for run, n in zip(runs, ranks, strict=True)],
        "hops": [run.host.gpus - n for run, n in zip(runs, ranks, strict=True)],
        "board cuda": [run.host.board and run.platform == "cuda" for run in runs],
        "board other": [run.host.board and run.platform != "cuda" for run in runs],
    }
    return {name: np.array(values, dtype=float) for name, values in columns.items()}


def _decode_time(arrays: Mapping[str, Array], numbers: Mapping[str, Array]) -> Array:
    # The formulas are written for floats and hold for arrays alike.
    given: dict[str, Any] = {name: values for name, values in arrays.items() if not name.startswith("board")}
    launch: Any = numbers["launch_us"] * 1e-6
    for board in ("board cuda", "board other"):
        launch = launch * numbers[board] ** arrays[board]
    given |= {
        "bandwidth_fraction": np.minimum(numbers["bandwidth"], MOST_BANDWIDTH),
        "compute_fraction": numbers["compute"],
        "kv_fraction": numbers["kv"],
        "launch_s": launch,
        "collective_s": numbers["collective_us"] * 1e-6,
        "hop_s": numbers["hop_us"] * 1e-6,
    }
    return np.asarray(formulas.decode_step_s(**given), dtype=float)


def _prompt_arrays(runs: Sequence[SmallBatchRun], decode: Fit) -> dict[str, Array]:
    ranks = [run.host.gpus if run.engine in TENSOR_PARALLEL else 1 for run in runs]
    pairs = list(zip(runs, ranks, strict=True))
    board = [run.host.board for run in runs]
    factor = np.where(
        np.array([run.platform == "cuda" for run in runs]),
        decode.number("board cuda", {}),
        decode.number("board other", {}),
    )
    columns: dict[str, Any] = {
        "flop": [run.prompt * run.reads.flop / n for run, n in pairs],
        "attention_flop": [
            run.reads.attention_flop(tokens=run.prompt, past=run.depth) / n for run, n in pairs
        ],
        "weight_bytes": [run.reads.prompt_bytes / n for run, n in pairs],
        "kernels": [run.reads.kernels for run in runs],
        "chunks": [-(-run.prompt // run.chunk) for run in runs],
        "bytes_per_s": [run.host.gpu.memory_bandwidth_bytes_per_s for run in runs],
        "flop_per_s": [matrix_flop_per_s(run.host.gpu) or 0 for run in runs],
        "stages": [run.host.gpus // n for run, n in pairs],
        "bandwidth_fraction": np.minimum(_numbers(decode, "bandwidth", runs), MOST_BANDWIDTH),
        "launch_s": _numbers(decode, "launch_us", runs) * 1e-6 * np.where(board, factor, 1),
    }
    return {name: np.array(values, dtype=float) for name, values in columns.items()}


def _prompt_time(arrays: Mapping[str, Array], numbers: Mapping[str, Array]) -> Array:
    given: dict[str, Any] = {
        **arrays,
        "compute_fraction": numbers["prompt"],
        "attention_fraction": numbers["prompt_attention"],
    }
    return np.asarray(formulas.prompt_s(**given), dtype=float)


def _fitted(
    runs: Sequence[SmallBatchRun],
    terms: Mapping[str, Term],
    time_of: Callable[[Mapping[str, Array]], Array],
    measured: Array,
) -> Fit:
    """Levenberg-Marquardt on the terms' logarithms, rows of one card and model sharing a weight of √rows."""
    keys_of_runs = [run_keys(run.engine, run.platform, run.family) for run in runs]
    names: list[tuple[str, str, str]] = []
    for name, term in terms.items():
        names.append((name, "mean", ""))
        for kind in term.on:
            names += [(name, kind, key) for key in sorted({keys[kind] for keys in keys_of_runs})]
    place = {name: column for column, name in enumerate(names)}
    design = {name: np.zeros((len(runs), len(names))) for name in terms}
    for row, keys in enumerate(keys_of_runs):
        for name, term in terms.items():
            design[name][row, place[name, "mean", ""]] = 1
            for kind in term.on:
                design[name][row, place[name, kind, keys[kind]]] = 1
    start = np.array([np.log(terms[name].start) if kind == "mean" else 0.0 for name, kind, _ in names])
    ridge = np.array([terms[name].spread[kind] ** -2 for name, kind, _ in names])
    counts = Counter((run.host.gpu.id, run.model.name, run.backend, run.family) for run in runs)
    weights = np.array(
        [counts[run.host.gpu.id, run.model.name, run.backend, run.family] ** -0.5 for run in runs]
    )
    target = np.log(measured)

    def residual(at: Array, moved: str = "", by: float = 0.0) -> Array:
        numbers = {name: np.exp(design[name] @ at + (by if name == moved else 0.0)) for name in terms}
        return np.log(time_of(numbers)) - target

    def cost(at: Array) -> float:
        scaled = residual(at) / _RESIDUAL
        robust = 2 * weights @ (np.sqrt(1 + scaled**2) - 1)
        return float(robust + ridge @ (at - start) ** 2)

    at, damping, best = start, 1e-2, cost(start)
    for _ in range(_STEPS):
        now = residual(at)
        slopes = np.zeros((len(runs), len(names)))
        for name in terms:
            slope = (residual(at, name, 1e-5) - now) / 1e-5
            slopes += slope[:, None] * design[name]
        pull = weights / _RESIDUAL**2 / np.sqrt(1 + (now / _RESIDUAL) ** 2)
        normal = (slopes.T * pull) @ slopes + np.diag(ridge)
        gradient = (slopes.T * pull) @ now + ridge * (at - start)
        for _ in range(8):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            tried = at - np.clip(step, -0.7, 0.7)
            reached = cost(tried)
            if reached < best:
                break
            damping *= 4
        else:
            break
        settled = best - reached < 1e-6 * best
        at, best, damping = tried, reached, max(damping / 3, 1e-6)
        if settled:
            break
    return Fit(terms=terms, values=dict(zip(names, at.tolist(), strict=True)))
