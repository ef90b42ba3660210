"""The calibration file of small-batch speeds: plain numbers for every backend and family, errors, sources."""

import datetime
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from capplan.calibrate.small_batch import (
    MOST_BANDWIDTH,
    Array,
    Fit,
    fit_decode,
    fit_prompt,
    leave_cards_out,
    predict_decode,
    prompts_with_cards_left_out,
    run_keys,
)
from capplan.results.small_batch import SmallBatchRun, SmallBatchTable, read_small_batch
from capplan.results.small_batch_names import GGUF_ENGINES, TENSOR_PARALLEL
from capplan.small_batch import GGUF_FAMILIES, OTHER_FAMILIES, Family, Platform

_FEWEST_FOR_A_BAND: Final = 10


def fit_small_batch(path: Path) -> dict[str, Any]:
    """The calibration file's content, fitted to a table of measured speeds. Errors: the reader's."""
    return calibration(read_small_batch(path))


def calibration(table: SmallBatchTable) -> dict[str, Any]:
    """The content of small-batch.yaml: all runs fitted, the errors with each card left out in turn."""
    decode, prompt = split(table)
    numbers = fitted(table)
    decoded = leave_cards_out(decode, fit_decode, predict_decode)
    prompted = prompts_with_cards_left_out(decode, prompt)
    return {
        "schema": "capplan.calibration/1",
        "id": "small-batch",
        "kind": "small-batch",
        "origin": "public",
        "sources": _sources(table),
        "fit": numbers,
        "error": {
            "decode": _errors(decode, [run.decode_token_per_s or 0 for run in decode], decoded),
            "prompt": _errors(prompt, [run.prompt_token_per_s or 0 for run in prompt], prompted),
        },
        "hash": digest(numbers),
    }


def fitted(table: SmallBatchTable) -> dict[str, Any]:
    """The fit alone, on all runs."""
    decode, prompt = split(table)
    step = fit_decode(decode)
    return _materialised(decode, prompt, step, fit_prompt(prompt, step))


def split(table: SmallBatchTable) -> tuple[list[SmallBatchRun], list[SmallBatchRun]]:
    """The runs with a generation speed, and those with a prompt speed."""
    return (
        [run for run in table.runs if run.decode_token_per_s is not None],
        [run for run in table.runs if run.prompt_token_per_s is not None],
    )


HEADER: Final = """\
# Fitted, not read: capplan.calibrate.small_batch_file.fit_small_batch wrote this file.
# One sequence alone. A backend: whether several GPUs hold whole layers or share each (split), host time of a
# kernel launch (launch_us) and of an all-reduce (collective_us), fractions of the rates that the KV cache
# (kv) and a prompt's attention reach. A family of formats on it: fractions of the memory's bandwidth and of
# plain arithmetic in decoding, of matrix arithmetic in prompts; runs 0: none was measured, borrowed from the
# engine, the platform and the family apart. hop_us: from one GPU's layers to the next; board_launch: launches
# by a single-board computer over those of a desktop.
# error: measured / predicted speed, each card by numbers fitted on the others.
# No range of versions is claimed: four of five rows of llama.cpp state none, and no other engine's do.
"""


def digest(fit: Mapping[str, Any]) -> str:
    """The hash of a fit: SHA-256 over its canonical JSON."""
    return hashlib.sha256(json.dumps(fit, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def as_yaml(data: Mapping[str, Any]) -> str:
    """The file's text."""
    import yaml

    return HEADER + yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=110)


def _materialised(
    decode: Sequence[SmallBatchRun], prompt: Sequence[SmallBatchRun], step: Fit, prompts: Fit
) -> dict[str, Any]:
    """Plain numbers for every backend and family; families never measured on it borrow."""
    counts = Counter((run.engine, run.platform, run.family) for run in (*decode, *prompt))
    backends: dict[str, Any] = {}
    for engine, platform in sorted({(engine, platform) for engine, platform, _ in counts}):
        measured = {family for known, _, family in counts if known == engine}
        families = measured | set(GGUF_FAMILIES if engine in GGUF_ENGINES else OTHER_FAMILIES)
        keys = run_keys(engine, platform, "")
        backend: dict[str, Any] = {
            "engine": engine,
            "platform": platform,
            "split": "tensor" if engine in TENSOR_PARALLEL else "layers",
            "launch_us": _rounded(step.number("launch_us", keys)),
            "kv": _rounded(min(1.0, step.number("kv", keys))),
            "prompt_attention": _rounded(prompts.number("prompt_attention", keys)),
        }
        if engine in TENSOR_PARALLEL:
            backend["collective_us"] = _rounded(step.number("collective_us", keys))
        backend["families"] = {
            family: _fractions(step, prompts, engine, platform, family, counts[engine, platform, family])
            for family in sorted(families)
        }
        backends[f"{engine}-{platform}"] = backend
    return {
        "hop_us": _rounded(step.number("hop_us", {})),
        "board_launch": {
            "cuda": _rounded(step.number("board cuda", {})),
            "other": _rounded(step.number("board other", {})),
        },
        "backends": backends,
    }


def _fractions(
    step: Fit, prompts: Fit, engine: str, platform: Platform, family: Family, runs: int
) -> dict[str, Any]:
    keys = run_keys(engine, platform, family)
    return {
        "bandwidth": _rounded(min(MOST_BANDWIDTH, step.number("bandwidth", keys))),
        "compute": _rounded(step.number("compute", keys)),
        "prompt": _rounded(min(1.0, prompts.number("prompt", keys))),
        "runs": runs,
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _errors(runs: Sequence[SmallBatchRun], measured: Sequence[float], predicted: Array) -> dict[str, Any]:
    """Quantiles of measured / predicted: by backend and family where enough rows, and of all other backends.

    A backend that only one card was measured with is predicted from its kin alone when that card is left
    out: those rows stand for what was never measured.
    """
    ratios = np.array(measured) / predicted
    groups: dict[str, list[float]] = {}
    others: list[float] = []
    cards: dict[str, set[str]] = {}
    for run in runs:
        cards.setdefault(run.engine, set()).add(run.host.gpu.id)
    for run, ratio in zip(runs, ratios.tolist(), strict=True):
        if len(cards[run.engine]) > 1:
            for name in (run.backend, f"{run.backend} {run.family}"):
                groups.setdefault(name, []).append(ratio)
        else:
            others.append(ratio)
    bands = {
        name: quantiles(found) for name, found in sorted(groups.items()) if len(found) >= _FEWEST_FOR_A_BAND
    }
    everything = [ratio for name, found in groups.items() if " " not in name for ratio in found]
    return {
        "all": quantiles(everything),
        "others": quantiles(others if len(others) >= _FEWEST_FOR_A_BAND else everything + others),
        "backends": bands,
    }


def quantiles(ratios: Sequence[float]) -> dict[str, float | int]:
    """Quantiles of measured / predicted, and the error in percent of the measured."""
    held = np.array(ratios)
    low, middle, high = np.quantile(held, (0.1, 0.5, 0.9))
    errors = 100 * np.abs(1 / held - 1)
    return {
        "p10": _rounded(low),
        "p50": _rounded(middle),
        "p90": _rounded(high),
        "median_pct": round(float(np.median(errors)), 1),
        "mean_pct": round(float(errors.mean()), 1),
        "rows": len(held),
    }


def _sources(table: SmallBatchTable) -> list[dict[str, Any]]:
    """Where the runs come from, by repository or thread, with its licence; then what was left out."""
    rows = Counter(re.sub(r",? index id [\d and]*\d", "", run.group[0]) for run in table.runs)
    listed = [
        {
            "what": "prompt and generation speed of one sequence",
            "source": source,
            "licence": LICENCES.get(source, "none stated; figures only"),
            "rows": count,
        }
        for source, count in sorted(rows.items())
    ]
    return [
        *listed,
        {"what": "excluded", "read_on": READ_ON, "excluded": dict(sorted(table.reasons.items()))},
    ]


READ_ON: Final = datetime.date(2026, 11, 29).isoformat()
LICENCES: Final = {
    "geerlingguy/ai-benchmarks": "MIT",
    "ikawrakow/ik_llama.cpp": "MIT",
    "lhl/strix-halo-testing": "Apache-2.0",
    "mlc-ai/llm-perf-bench": "Apache-2.0",
    "premAI-io/benchmarks": "MIT",
    "pytorch-labs/gpt-fast": "BSD-3-Clause",
    "turboderp-org/exllamav2": "MIT",
}
"""Of the repositories whose figures the table holds; the others state none."""
