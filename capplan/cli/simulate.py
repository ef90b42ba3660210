"""`capplan simulate`: a replica under real traffic, request by request."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capplan.cli.output import OutputFormat, render, write, write_json
from capplan.cli.user_folders import price_folder
from capplan.errors import ExitStatus, InputError, shown

if TYPE_CHECKING:
    from capplan.simulate_answer import Simulation


def simulate(
    ctx: typer.Context,
    model: Annotated[str, typer.Option(help="Catalog name or size (8b), or a path, as for vram.")] = "",
    gpu: Annotated[str, typer.Option(help="GPU: h100, rtx-4090…; a --profile FILE brings its own.")] = "",
    precision: Annotated[str, typer.Option(help="Weight format; auto: the checkpoint's.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="KV cache dtype; auto: the checkpoint's.")] = "auto",
    request_rate: Annotated[str | None, typer.Option(help="Requests per second; inf: all at once.")] = None,
    arrivals: Annotated[
        str,
        typer.Option(help="poisson, gamma:burstiness=0.5, constant, at-once, diurnal:swing=0.8, hourly:…"),
    ] = "poisson",
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "--users", help="Users, one request each at a time.")
    ] = None,
    think_time: Annotated[str, typer.Option(help="Seconds a user pauses: 5, exponential:5.")] = "0",
    ramp_up: Annotated[float, typer.Option(help="Seconds over which users start.")] = 0.0,
    isl: Annotated[
        str | None,
        typer.Option(help="Prompt tokens: 1024, uniform:100-2000, lognormal:mean=1000,cv=1.2, hist:…"),
    ] = None,
    osl: Annotated[str | None, typer.Option(help="Output tokens, in the same forms (256).")] = None,
    requests: Annotated[str | None, typer.Option(help="Requests in all (2000); alone: all at once.")] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds in which requests arrive.")] = None,
    turns: Annotated[str, typer.Option(help="Turns of a session: 4, geometric:4.")] = "1",
    system_prompt: Annotated[
        int, typer.Option(help="Tokens in front of every prompt, the same for all.")
    ] = 0,
    prefix_shared: Annotated[int, typer.Option(help="Tokens that all prompts begin with.")] = 0,
    max_context: Annotated[int | None, typer.Option(help="Tokens at which a session ends.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Logged requests: Azure, BurstGPT, Mooncake, CSV.")
    ] = None,
    rate_scale: Annotated[float | None, typer.Option(help="The trace so many times as fast.")] = None,
    trace_limit: Annotated[
        int | None, typer.Option("--trace-limit", "--limit", help="Requests of the trace to take.")
    ] = None,
    trace_offset: Annotated[float, typer.Option(help="Seconds of the trace to leave out.")] = 0.0,
    trace_repeat: Annotated[int, typer.Option(help="Times to play the trace.")] = 1,
    trace_sort: Annotated[int, typer.Option(help="Rows within which the trace is sorted.")] = 0,
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help="Leave broken rows out.")] = False,
    n: Annotated[int, typer.Option("--n", help="Answers of each prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of all draws.")] = 0,
    repeat: Annotated[int, typer.Option(help="Independent runs, for confidence intervals.")] = 1,
    warm_up: Annotated[str, typer.Option(help="Seconds left out at the start; auto: MSER-5.")] = "auto",
    slo: Annotated[str | None, typer.Option(help="chat, reading, or ttft=500ms,tpot=50ms.")] = None,
    tp: Annotated[int, typer.Option(help="GPUs that share each layer.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option(help="Attention replicas that share the experts.")] = 1,
    ep: Annotated[int, typer.Option(help="Groups that share the experts.")] = 1,
    engine: Annotated[str, typer.Option(help="vllm, sglang, tensorrt-llm, tgi, llama.cpp.")] = "vllm",
    engine_version: Annotated[str | None, typer.Option(help="Such as 0.24.")] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="The engine's, tgi:waiting_served_ratio=1.2; static, orca…")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="What clients ask at most, for engines that reserve it.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences a step.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens a step.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="The engine's fraction.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest request (the workload's).")] = None,
    kv_blocks: Annotated[int | None, typer.Option(help="Blocks of the KV pool, not the plan's.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens of a block.")] = None,
    no_prefix_caching: Annotated[bool, typer.Option("--no-prefix-caching", help="No shared blocks.")] = False,
    speculative_tokens: Annotated[int | None, typer.Option(help="Tokens drafted a step.")] = None,
    acceptance_rate: Annotated[
        float | None, typer.Option(help="Chance that a drafted token is accepted, after those before it.")
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option("--draft-model", "--draft", help="Name, path or mtp; else n-grams.")
    ] = None,
    kv_link_gbps: Annotated[
        float | None, typer.Option(help="Prompts on a replica of their own, KV over so many Gbit/s.")
    ] = None,
    kv_link_ms: Annotated[float, typer.Option(help="Latency of that link.")] = 0.0,
    network_ms: Annotated[float, typer.Option(help="Client to server and back.")] = 0.0,
    profile: Annotated[str, typer.Option(help="Calibration: auto, a name, or a file.")] = "auto",
    bounds: Annotated[bool, typer.Option("--bounds", help="Step times of physics only.")] = False,
    price: Annotated[
        float | None, typer.Option("--price", "--usd-per-gpu-hour", help="USD per GPU and hour.")
    ] = None,
    term: Annotated[str, typer.Option(help="on-demand, spot, 1yr, 3yr.")] = "on-demand",
    cloud: Annotated[str | None, typer.Option(help="Provider: aws, lambda, runpod…")] = None,
    region: Annotated[str | None, typer.Option(help="Region, or us, eu, ap.")] = None,
    today: Annotated[str | None, typer.Option(help="Day from which the price's age counts.")] = None,
    request_log: Annotated[Path | None, typer.Option(help="A CSV file to write: a row a request.")] = None,
    engine_limits: Annotated[
        Path | None, typer.Option(help="Limits and step times of a log whose --requests FILE is replayed.")
    ] = None,
    step_log: Annotated[Path | None, typer.Option(help="A CSV file to write: a row a step.")] = None,
    experiment: Annotated[
        str | None, typer.Option(help="A lesson's claim over many workloads: straggler, contiguous-waste…")
    ] = None,
    online: Annotated[bool, typer.Option("--online", help="Ask the Hugging Face Hub for the model.")] = False,
    no_user_data: Annotated[
        bool, typer.Option("--no-user-data", help="No profile or prices of yours.")
    ] = False,
    output: Annotated[OutputFormat, typer.Option("-o", "--output")] = OutputFormat.TABLE,
    explain: Annotated[bool, typer.Option("--explain", help="The formulas with numbers.")] = False,
) -> int:
    """What happens under real traffic: percentiles of TTFT, TPOT and E2E, KV usage, goodput, dollars.

    Example: capplan simulate --model 8b --gpu h100 --request-rate 12 --isl 1024 --osl 256 --slo chat
    """
    from capplan import price_cache, simulate_estimate
    from capplan.cli.cost import parse_day
    from capplan.cli.latency import _own_profile
    from capplan.cli.progress import watched
    from capplan.cli.simulate_doors import only, replay, run_experiment
    from capplan.simulate_question import GBPS, question_of
    from capplan.simulate_run import Logs

    files = Logs(requests=request_log, steps=step_log)
    if engine_limits is not None:
        only(ctx, "--engine-limits", ("requests", "scheduler", "request_log", "step_log"))
        return replay(requests, engine_limits, scheduler, files, output)
    if experiment is not None:
        only(ctx, "--experiment", ("model", "gpu", "seed"))
        return run_experiment(experiment, model or "8b", gpu or "h100", seed, output)
    if not model:
        raise InputError("which model?", where="--model", hint="--model 8b, a catalog name, or a path")
    question = question_of(
        model,
        gpu=gpu,
        precision=precision,
        kv_dtype=kv_dtype,
        request_per_s=_number(request_rate, "--request-rate", "requests per second, or inf"),
        arrivals=arrivals,
        concurrency=concurrency,
        think_time=think_time,
        ramp_up_s=ramp_up,
        isl=isl,
        osl=osl,
        requests=_count(requests),
        duration_s=duration,
        turns=turns,
        system_prompt_tokens=system_prompt,
        prefix_shared=prefix_shared,
        max_context_tokens=max_context,
        trace=trace,
        rate_scale=rate_scale,
        trace_limit=trace_limit,
        trace_offset_s=trace_offset,
        trace_repeat=trace_repeat,
        trace_sort_rows=trace_sort,
        skip_bad_rows=skip_bad_rows,
        samples=n,
        seed=seed,
        repeat=repeat,
        warm_up_s=None if warm_up == "auto" else _number(warm_up, "--warm-up", "seconds, or auto"),
        slo=slo,
        tp=tp,
        pp=pp,
        dp=dp,
        ep=ep,
        engine=engine,
        engine_version=engine_version,
        scheduler=scheduler,
        max_new_tokens=max_new_tokens,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        max_model_len=max_model_len,
        kv_blocks=kv_blocks,
        block_size=block_size,
        prefix_caching=not no_prefix_caching,
        speculative_tokens=speculative_tokens,
        acceptance_rate=acceptance_rate,
        draft_model=draft_model,
        kv_link_bytes_per_s=None if kv_link_gbps is None else kv_link_gbps * GBPS,
        kv_link_s=kv_link_ms / 1e3,
        network_s=network_ms / 1e3,
        profile=profile if no_user_data else _own_profile(profile, gpu),
        bounds=bounds,
        price_usd_per_gpu_hour=price,
        term=term,
        cloud=cloud,
        region=region,
        today=parse_day(today, "--today"),
        online=online,
    )
    try:
        with watched(at_once=repeat > 1) as told:
            answer = simulate_estimate.answer(
                question,
                prices=price_cache.load(None if no_user_data else price_folder()),
                told=told,
                files=files,
            )
    except KeyboardInterrupt:
        print("interrupted: nothing was served yet", file=sys.stderr)
        return int(ExitStatus.INTERRUPTED)
    _write(answer, output, explain)
    if answer.partial:
        print("interrupted: the answer is partial", file=sys.stderr)
        return int(ExitStatus.INTERRUPTED)
    return int(ExitStatus.OK)


def _count(text: str | None) -> int | None:
    """A whole number of requests."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise InputError(
            f"{shown(text)} is no number of requests",
            where="--requests",
            hint="a whole number; a log's file goes with --engine-limits FILE, a trace with --trace FILE",
        )
    return int(text)


def _number(text: str | None, option: str, hint: str) -> float | None:
    """A number of at least zero, or inf."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise InputError(f"{shown(text)} is no number from 0 up", where=option, hint=hint)
    return value


def _write(answer: "Simulation", output: OutputFormat, explain: bool) -> None:
    from capplan import report, simulate_report

    steps = simulate_report.explain(answer) if explain else ()
    if output is OutputFormat.JSON:
        write_json(answer.to_dict() | ({"explain": list(steps)} if explain else {}))
    elif output is OutputFormat.CSV:
        write(report.to_csv(simulate_report.rows(answer)))
    elif output is OutputFormat.MD:
        write(simulate_report.markdown(answer) + "".join(f"- {step}\n" for step in steps))
    else:
        render([*simulate_report.view(answer), *report.step_view(steps)])
