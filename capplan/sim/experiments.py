"""The serving lessons' claims, each tried over a range of workloads: where it holds, and where it does not.

Every row is a simulation with the step times of a named model and GPU; what is compared runs the same
requests. Rows are independent and run in processes through joblib: loky's workers start clean, which fork
after threads does not, and its progress comes row by row.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Final

from capplan.errors import DoesNotFitError, InputError, did_you_mean, shown
from capplan.formulas import queueing
from capplan.sim.experiment import Claim, Experiment, Plan, Row
from capplan.sim.trial import Subject, Trial, against, run_trial, subject

LENGTHS: Final = ((128, 512), (512, 256), (1024, 128))
"""Mean tokens in and out: chat with short questions, chat with context, reading."""
SHAREGPT: Final = (161, 338)
"""Mean tokens of ShareGPT's prompts and answers, which 24 x was measured on (Kwon et al. 2023)."""
LONGEST: Final = 8192
"""Tokens of the longest request of any experiment."""
LESSON_BUBBLE: Final = queueing.static_bubble_fraction(output_tokens=(20, 600))
VARIATIONS: Final = (0.0, 0.5, 1.0, 1.5)
"""Standard deviation of output lengths over their mean; 1 in conversations."""


def lengths(mean: int, variation: float, longest: int) -> str:
    """Output lengths as --osl spells them: lognormal, clipped at `longest`."""
    return f"lognormal:mean={mean},cv={variation:g},max={longest}" if variation else str(mean)


def _lengths(isl: int, osl: int) -> str:
    return f"{isl} in, {osl} out"


def around(mean: int) -> str:
    """Prompt lengths, uniform from half the mean to one and a half."""
    return f"uniform:{mean // 2}-{mean + mean // 2}"


def _bucket(share: float) -> str:
    """A share of 1 as a range between powers of two."""
    for least in (0.5, 0.25, 0.125):
        if share >= least:
            return f"{least:.1%} to {min(1.0, 2 * least):.1%}"
    return "under 12.5%"


def _within(value: float | None, low: float, high: float) -> bool:
    return value is not None and low <= value <= high


def _memory_points() -> Iterator[Row]:
    reserves = (("max", "first"), ("pow2", "buddy"), ("pow2", "first"), ("exact", "buddy"), ("exact", "best"))
    # Reservations innermost: all five stand against one paged run, which a process makes once.
    for longest, (isl, osl), variation, (reserve, fit) in product(
        (2048, 4096, LONGEST), (SHAREGPT, *LENGTHS), VARIATIONS[1:], reserves
    ):
        yield {
            "reserve": reserve,
            "fit": fit,
            "max_model_len": longest,
            "lengths": _lengths(isl, osl),
            "isl": isl,
            "osl": osl,
            "output_cv": variation,
            "mean_of_max_len": _bucket((isl + osl) / longest),
        }


def _memory_row(point: Row, on: Subject, seed: int) -> Row:
    longest = point["max_model_len"]
    paged = Trial(
        scheduler="vllm_v1",
        isl=around(point["isl"]),
        osl=lengths(point["osl"], point["output_cv"], longest - 2 * point["isl"] + point["isl"] // 2),
        requests=1000,
        max_model_len=longest,
        # What share is wasted does not depend on how much memory there is, once it holds a handful.
        kv_share=min(1.0, 12 * longest / on.kv_tokens),
        seed=seed,
    )
    contiguous = against(paged, scheduler="orca", reserve=point["reserve"], fit=point["fit"])
    before, after = run_trial(contiguous, on), run_trial(paged, on)
    assert before.wasted is not None
    assert after.tail is not None
    return {
        "contiguous_wasted": before.wasted,
        "contiguous_internal": before.internal,
        "contiguous_reserved": before.reserved,
        "contiguous_external": before.external,
        "paged_tail": after.tail,
        "paged_free": after.external,
        "batch_gain": after.batch / before.batch,
        "throughput_gain": after.output_token_per_s / before.output_token_per_s,
        "contiguous_wastes_60_to_80": _within(before.wasted, 0.6, 0.8),
        "paged_wastes_under_4": after.tail < 0.04,
    }


def _static_points() -> Iterator[Row]:
    for batch, (isl, osl), variation, load in product(
        (8, 32, 128), LENGTHS, VARIATIONS, ("saturated", 0.9, 0.5)
    ):
        yield {
            "batch": batch,
            "lengths": _lengths(isl, osl),
            "isl": isl,
            "osl": osl,
            "output_cv": variation,
            "load": load,
        }


def _static_row(point: Row, on: Subject, seed: int) -> Row:
    base = Trial(
        scheduler="vllm_v1",
        isl=around(point["isl"]),
        osl=lengths(point["osl"], point["output_cv"], 4096),
        requests=max(512, 16 * point["batch"]),
        max_num_seqs=point["batch"],
        seed=seed,
    )
    continuous = run_trial(base, on)
    if point["load"] != "saturated":
        base = against(base, request_per_s=point["load"] * continuous.request_per_s)
        continuous = run_trial(base, on)
    static = run_trial(against(base, scheduler="static"), on)
    gain = continuous.output_token_per_s / static.output_token_per_s
    return {
        "continuous_token_per_s": continuous.output_token_per_s,
        "static_token_per_s": static.output_token_per_s,
        "gain": gain,
        "e2e_gain": static.e2e_mean_s / continuous.e2e_mean_s,
        "static_bubble": static.bubble,
        "static_prompt_padding": static.padding,
        "gain_at_least_2.5": gain >= 2.5,
        "gain_2.5_to_4": _within(gain, 2.5, 4),
    }


def _generate_points() -> Iterator[Row]:
    for batch, (isl, osl), variation in product((1, 2, 4, 8, 16, 32, 64), (*LENGTHS, SHAREGPT), VARIATIONS):
        yield {
            "hf_batch": batch,
            "lengths": _lengths(isl, osl),
            "isl": isl,
            "osl": osl,
            "output_cv": variation,
        }


def _generate_row(point: Row, on: Subject, seed: int) -> Row:
    trial = Trial(
        scheduler="hf_generate",
        isl=around(point["isl"]),
        osl=lengths(point["osl"], point["output_cv"], 2048),
        requests=2000,
        max_num_seqs=point["hf_batch"],
        seed=seed,
    )
    generate = run_trial(trial, on)
    engine = run_trial(against(trial, scheduler="vllm_v1", max_num_seqs=256), on)
    gain = engine.output_token_per_s / generate.output_token_per_s
    return {
        "engine_token_per_s": engine.output_token_per_s,
        "generate_token_per_s": generate.output_token_per_s,
        "engine_batch": engine.batch,
        "generate_bubble": generate.bubble,
        "gain": gain,
        "gain_at_least_24": gain >= 24,
    }


def _batch_points() -> Iterator[Row]:
    for (isl, osl), power in product(LENGTHS, range(10)):
        yield {"lengths": _lengths(isl, osl), "isl": isl, "osl": osl, "batch": 1 << power}


def _batch_row(point: Row, on: Subject, seed: int) -> Row:
    trial = Trial(
        scheduler="vllm_v1",
        isl=around(point["isl"]),
        osl=lengths(point["osl"], 1.0, 4096),
        requests=max(64, 4 * point["batch"]),
        max_num_seqs=point["batch"],
        seed=seed,
    )
    made = run_trial(trial, on)
    return {
        "output_token_per_s": made.output_token_per_s,
        "tpot_mean_s": made.tpot_mean_s,
        "tpot_p95_s": made.tpot_p95_s,
        "preemptions": made.preemptions,
    }


def _against_the_batch_before(rows: list[Row]) -> list[Row]:
    """Whether twice the batch gives more tokens/s, and a longer TPOT: a row a doubling."""
    by_batch = {(row["lengths"], row["batch"]): row for row in rows}
    found = []
    for (lengths, batch), row in by_batch.items():
        before = by_batch.get((lengths, batch // 2))
        if before is None:
            continue
        row["tokens_gain"] = row["output_token_per_s"] / before["output_token_per_s"]
        row["tpot_growth"] = row["tpot_mean_s"] / before["tpot_mean_s"]
        row["more_tokens"] = row["tokens_gain"] > 1
        row["longer_tpot"] = row["tpot_growth"] > 1
        found.append(row)
    return found


def _straggler_points() -> Iterator[Row]:
    for batch, short, share in product((2, 8, 32), (20, 100, 300), (0.25, 0.5, 0.75, 0.9)):
        yield {"batch": batch, "short": short, "long": 600, "short_share": share}


def _straggler_row(point: Row, on: Subject, seed: int) -> Row:
    short, long, share = point["short"], point["long"], point["short_share"]
    trial = Trial(
        scheduler="static",
        isl="128",
        osl=f"hist:{short}:{share},{long}:{round(1 - share, 6)}",
        requests=32 * point["batch"],
        max_num_seqs=point["batch"],
        seed=seed,
    )
    static = run_trial(trial, on)
    continuous = run_trial(against(trial, scheduler="vllm_v1"), on)
    one_long = [short] * (point["batch"] - 1) + [long]
    return {
        "bubble": static.bubble,
        "bubble_of_one_straggler": queueing.static_bubble_fraction(output_tokens=one_long),
        "gain": continuous.output_token_per_s / static.output_token_per_s,
        "bubble_at_least_48": static.bubble >= LESSON_BUBBLE,
    }


EXPERIMENTS: Final[Mapping[str, Plan]] = {
    "contiguous-waste": Plan(
        source='serving lesson, "PagedAttention": 60% to 80% wasted, under 4% with paging',
        claims=(
            Claim(
                text="contiguous pre-allocation wastes 60-80 % of KV memory",
                column="contiguous_wastes_60_to_80",
            ),
            Claim(text="paging wastes under 4 %", column="paged_wastes_under_4"),
        ),
        variables=("reserve", "fit", "max_model_len", "lengths", "output_cv", "mean_of_max_len"),
        measure="contiguous_wasted",
        points=_memory_points,
        row=_memory_row,
        notes=(
            "of KV memory for 12 requests of max_model_len, while others wait for it; paging's waste is "
            "what its blocks have beyond their tokens, paged_free what no waiting prompt could use",
            "reserve: max_model_len, the prompt and its output's next power of two, or just its own length "
            "known in advance; the paper behind the claim (Kwon et al. 2023, figure 2) has all three with a "
            "buddy allocator, at max 2048: 80, 73 and 62 % wasted",
        ),
    ),
    "continuous-over-static": Plan(
        source='serving lesson, "Continuous Batching": 2.5x to 4x over static batching',
        claims=(
            Claim(text="continuous batching gives 2.5-4 x the tokens/s of static", column="gain_2.5_to_4"),
            Claim(text="it gives at least 2.5 x", column="gain_at_least_2.5"),
        ),
        variables=("batch", "lengths", "output_cv", "load"),
        measure="gain",
        points=_static_points,
        row=_static_row,
        notes=(
            "load is a share of what continuous batching can serve; static waits for a full batch, and has "
            "the same kernels and as much memory as it needs",
        ),
    ),
    "over-hf-generate": Plan(
        source="serving lesson: up to 24x the throughput of naive HF generate",
        claims=(
            Claim(text="an engine gives 24 x the tokens/s of generate() or more", column="gain_at_least_24"),
        ),
        variables=("hf_batch", "lengths", "output_cv"),
        measure="gain",
        points=_generate_points,
        row=_generate_row,
        notes=(
            "at an engine's max_num_seqs of 256; generate() has the engine's kernels here: that its own "
            "eager ones start later is left out of the gain",
        ),
    ),
    "batch-against-tpot": Plan(
        source='serving lesson, "The Inherent Latency vs. Throughput Trade-off"',
        claims=(
            Claim(text="twice the batch gives more tokens/s", column="more_tokens"),
            Claim(text="twice the batch gives a longer TPOT", column="longer_tpot"),
        ),
        variables=("lengths", "batch"),
        measure="output_token_per_s",
        points=_batch_points,
        row=_batch_row,
        together=_against_the_batch_before,
        notes=("a workload is a batch beside half of it, from 2 beside 1 on",),
    ),
    "straggler": Plan(
        source='serving lesson, "The Straggler Effect in Static Batching": 20 tokens beside 600',
        claims=(
            Claim(text="48 % of a static batch's rows or more make nothing", column="bubble_at_least_48"),
        ),
        variables=("batch", "short", "short_share"),
        measure="bubble",
        points=_straggler_points,
        row=_straggler_row,
        notes=("two requests of 20 and 600 tokens: 1 - 620 / 1,200 = 48.3 %",),
    ),
}


def run(
    name: str,
    *,
    model: str = "8b",
    gpu: str = "h100",
    seed: int = 0,
    jobs: int = -1,
    told: Callable[[int, int], None] | None = None,
) -> Experiment:
    """Try the claims of that name; `jobs` rows at once (−1: a core each), `told` hears (rows done, of all).

    Errors: InputError for an unknown name, DoesNotFitError where the model does not fit.
    Example: run("straggler").holds
    """
    plan = EXPERIMENTS.get(name)
    if plan is None:
        raise InputError(
            f"no experiment {shown(name)}",
            where="--experiment",
            hint=did_you_mean(name, EXPERIMENTS, f"one of {', '.join(EXPERIMENTS)}"),
        )
    on = subject(model, gpu)
    if on.kv_tokens < LONGEST:
        raise DoesNotFitError(
            f"{on.gpu} has room for {on.kv_tokens:,} tokens of KV beside {on.model}, "
            f"the longest request has {LONGEST:,}",
            where=f"--experiment {name}, --gpu {gpu}",
            hint="a GPU with more memory, or a smaller model",
        )
    points = list(plan.points())
    rows: list[Row] = []
    for row in _in_parallel(name, points, model, gpu, seed, jobs):
        rows.append(row)
        if told is not None:
            told(len(rows), len(points))
    return Experiment(
        name=name,
        source=plan.source,
        claims=plan.claims,
        variables=plan.variables,
        measure=plan.measure,
        rows=tuple(plan.together(rows)),
        model=on.model,
        gpu=on.gpu,
        notes=plan.notes,
    )


def _in_parallel(name: str, points: list[Row], model: str, gpu: str, seed: int, jobs: int) -> Iterator[Row]:
    if jobs == 1:
        yield from (_row(name, point, model, gpu, seed) for point in points)
        return
    import joblib

    pool = joblib.Parallel(n_jobs=jobs, return_as="generator")
    yield from pool(joblib.delayed(_row)(name, point, model, gpu, seed) for point in points)


def _row(name: str, point: Row, model: str, gpu: str, seed: int) -> Row:
    """One point's row, by name so that a process of its own can make it."""
    return {**point, **EXPERIMENTS[name].row(point, subject(model, gpu), seed)}
