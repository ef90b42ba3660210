"""CPU time of `capplan simulate` by its number of requests: a trace played once and ten times over.

    python tests/benchmarks/simulate.py [TRACE] [runs]
    python tests/benchmarks/simulate.py --million

The whole way of the command but its printing: trace reader, step table, vLLM's scheduler, recorder, summary.
The marginal rate, requests of nine more traces over the CPU seconds they took more, leaves start-up and first
use of the step table out; the least of several runs is given, for a busy machine only ever takes longer. A
benchmark, not a test: the issue's bounds are 50,000 requests a CPU second, and 1,000,000 requests in 2 GiB.
"""

import resource
import sys
import time
from pathlib import Path

from capplan.sim.workload import WorkloadSpec
from capplan.simulate_question import SimulateQuestion
from capplan.simulate_run import Logs, once
from capplan.simulate_setup import Subject
from capplan.units import GIB

TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
REPLICAS = (("8b", "h100", 1.0), ("8b", "h100", 3.0), ("8b", "l40s", 0.2))
"""Model, GPU, and how much faster than it was recorded the trace is played: at ease, busy, and slow."""
MILLION = 52
"""Times the trace of 19,366 requests."""


def seconds(trace: Path, model: str, gpu: str, scale: float, times: int) -> tuple[int, float, float]:
    """(requests finished, CPU seconds, utilisation of the engine) of a trace played so many times."""
    spec = WorkloadSpec(trace=trace, trace_repeat=times, rate_scale=scale)
    subject = Subject(SimulateQuestion(model=model, gpu=gpu, workload=spec, prefix_caching=False))
    start_s = time.process_time()
    summary, _ = once(subject, 0, None, Logs())
    return summary.requests, time.process_time() - start_s, summary.busy


def main(trace: Path, runs: int) -> None:
    """Print the marginal rate of every replica."""
    for model, gpu, scale in REPLICAS:
        found: dict[int, tuple[int, float]] = {}
        busy = 0.0
        for times in (1, 10, 20):
            tries = [seconds(trace, model, gpu, scale, times) for _ in range(runs)]
            found[times] = tries[0][0], min(took for _, took, _ in tries)
            busy = tries[0][2]
        (few, short_s), (many, long_s), (most, longest_s) = found.values()
        marginal = (many - few) / (long_s - short_s)
        linear = (longest_s - long_s) / (long_s - short_s) * (many - few) / (most - many)
        print(
            f"{model} on {gpu}, {scale:g} × the trace's rate, busy {busy:.0%}: {marginal:,.0f} requests a "
            f"CPU second\n    1 ×: {short_s:.2f} s, 10 ×: {long_s:.2f} s; the second ten: {linear:.2f} × the "
            "first"
        )


def million(trace: Path) -> None:
    """Print the peak memory of a million requests."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    requests, took, _ = seconds(trace, "8b", "h100", 1.0, MILLION)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"{requests:,} requests: {took:.1f} CPU s, at most {peak * 1024 / GIB:.2f} GiB in memory "
        f"({before * 1024 / GIB:.2f} GiB before)"
    )


if __name__ == "__main__":
    if "--million" in sys.argv:
        million(TRACES / "azure_llm_2023_conv.csv")
    else:
        given = Path(sys.argv[1]) if len(sys.argv) > 1 else TRACES / "azure_llm_2023_conv.csv"
        main(given, int(sys.argv[2]) if len(sys.argv) > 2 else 3)
