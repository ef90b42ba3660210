"""The other doors of `capplan simulate`: an engine's log replayed, a lesson's claim tried."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from capplan.cli.output import OutputFormat, render, write, write_json
from capplan.errors import ExitStatus, InputError

if TYPE_CHECKING:
    from capplan.simulate_run import Logs


def only(ctx: typer.Context, door: str, known: tuple[str, ...]) -> None:
    """Refuse options that have no meaning beside `door`; InputError names them."""
    known = (*known, door.lstrip("-").replace("-", "_"), "output")
    given = [
        name
        for name in ctx.params
        if name not in known and getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if given:
        raise InputError(
            f"without meaning beside {door}",
            where=", ".join(f"--{name.replace('_', '-')}" for name in given),
            hint=f"with {door} go " + ", ".join(f"--{name.replace('_', '-')}" for name in known),
        )


def replay(
    requests: str | None, limits: Path, scheduler: str | None, files: "Logs", output: OutputFormat
) -> int:
    """Serve the requests of a log under its own limits; the answer is JSON."""
    from capplan import simulate_replay

    if requests is None or output is not OutputFormat.JSON:
        what = "a log's limits without its requests" if requests is None else "a replay answers in JSON"
        raise InputError(
            what,
            where="--engine-limits, --requests, --output",
            hint="--requests NAME.requests.csv --engine-limits NAME.json -o json",
        )
    made = simulate_replay.replay(Path(requests), limits, scheduler=scheduler or "vllm_v1", files=files)
    write_json(made.to_dict())
    return int(ExitStatus.OK)


def run_experiment(name: str, model: str, gpu: str, seed: int, output: OutputFormat) -> int:
    """Try a lesson's claims over many workloads, and say in which they hold."""
    from capplan import experiment_report
    from capplan.cli.progress import watched
    from capplan.sim import experiments
    from capplan.simulate_run import Progress

    begun_s = time.monotonic()
    try:
        with watched(at_once=True) as told:
            made = experiments.run(
                name,
                model=model,
                gpu=gpu,
                seed=seed,
                told=lambda done, rows: told(
                    Progress(
                        time_s=time.monotonic() - begun_s, finished=0, requests=None, run=done, runs=rows
                    )
                ),
            )
    except KeyboardInterrupt:
        print("interrupted: a claim is tried whole or not at all", file=sys.stderr)
        return int(ExitStatus.INTERRUPTED)
    if output is OutputFormat.JSON:
        write_json({"schema": "capplan.simulate/1", "experiment": made.to_dict()})
    elif output is OutputFormat.CSV:
        write(experiment_report.csv(made))
    elif output is OutputFormat.MD:
        write(experiment_report.markdown(made))
    else:
        render(experiment_report.view(made))
    return int(ExitStatus.OK)
