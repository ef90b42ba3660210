"""`capplan latency`: TTFT, TPOT and throughput, bound and estimated."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from capplan.cli.output import OutputFormat, render, write, write_json
from capplan.cli.user_folders import calibration_folder
from capplan.errors import ExitStatus, InputError

if TYPE_CHECKING:
    from capplan.latency_estimate import LatencyEstimate


def latency(
    model: Annotated[str, typer.Option(help="Catalog name or size (8b), or a path, as for vram.")],
    gpu: Annotated[str, typer.Option(help="GPU: h100, rtx-4090…; a --profile FILE brings its own.")] = "",
    precision: Annotated[str, typer.Option(help="Weight format; auto: the checkpoint's.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="KV cache dtype; auto: the checkpoint's.")] = "auto",
    isl: Annotated[int, typer.Option(help="Prompt tokens of a request.")] = 1024,
    osl: Annotated[int, typer.Option(help="Output tokens of a request.")] = 256,
    concurrency: Annotated[int | None, typer.Option(help="Users, one request each at a time (1).")] = None,
    request_rate: Annotated[str | None, typer.Option(help="Requests per second (Poisson); or inf.")] = None,
    requests: Annotated[int | None, typer.Option(help="Requests that come all at once.")] = None,
    batch: Annotated[int | None, typer.Option(help="One batch from start to end.")] = None,
    tp: Annotated[int, typer.Option(help="GPUs that share each layer.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option(help="Attention replicas that share the experts.")] = 1,
    ep: Annotated[int, typer.Option(help="Groups that share the experts.")] = 1,
    engine: Annotated[str, typer.Option(help="vllm, sglang, tensorrt-llm, tgi, llama.cpp.")] = "vllm",
    engine_version: Annotated[str | None, typer.Option(help="Such as 0.24.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences a step.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens a step.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="The engine's fraction.")] = None,
    prefix_shared: Annotated[int, typer.Option(help="Prompt tokens already cached.")] = 0,
    lengths: Annotated[str, typer.Option(help="Requests' tokens: varied (about these) or equal.")] = "varied",
    speculative_tokens: Annotated[int | None, typer.Option(help="Tokens drafted a step.")] = None,
    acceptance_rate: Annotated[
        float | None, typer.Option(help="Chance that a drafted token is accepted, after those before it.")
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option("--draft-model", "--draft", help="Name, path or mtp; else n-grams.")
    ] = None,
    expert_skew: Annotated[float, typer.Option(help="Uneven routing: 0 even, 1.01 or 1.2 skewed.")] = 0.0,
    network_ms: Annotated[float, typer.Option(help="Client to server and back.")] = 0.0,
    slo: Annotated[str | None, typer.Option(help="chat, reading, or ttft=500ms,tpot=50ms.")] = None,
    profile: Annotated[str, typer.Option(help="Calibration: auto, a name, or a file.")] = "auto",
    bounds: Annotated[bool, typer.Option("--bounds", help="Physics only.")] = False,
    online: Annotated[bool, typer.Option("--online", help="Ask the Hugging Face Hub for the model.")] = False,
    no_user_data: Annotated[bool, typer.Option("--no-user-data", help="No profile of your own.")] = False,
    output: Annotated[OutputFormat, typer.Option("-o", "--output")] = OutputFormat.TABLE,
    explain: Annotated[bool, typer.Option("--explain", help="The formulas with numbers.")] = False,
) -> int:
    """What users wait for: TTFT, TPOT, end to end, tokens per second.

    Example: capplan latency --model 8b --gpu h100 --concurrency 32 --slo chat
    """
    from capplan import latency_estimate as speed

    rate, burst = _rate(request_rate, requests)
    answer = speed.latency(
        model,
        gpu=gpu,
        precision=precision,
        kv_dtype=kv_dtype,
        isl=isl,
        osl=osl,
        concurrency=concurrency,
        request_per_s=rate,
        requests=burst,
        batch=batch,
        tp=tp,
        pp=pp,
        dp=dp,
        ep=ep,
        engine=engine,
        engine_version=engine_version,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        prefix_shared=prefix_shared,
        lengths=lengths,
        speculative_tokens=speculative_tokens,
        acceptance_rate=acceptance_rate,
        draft_model=draft_model,
        expert_skew=expert_skew,
        network_s=network_ms / 1e3,
        slo=slo,
        profile=profile if no_user_data else _own_profile(profile, gpu),
        bounds=bounds,
        online=online,
    )
    _write(answer, output, explain)
    return int(ExitStatus.OK if answer.feasible else ExitStatus.DOES_NOT_FIT)


def _own_profile(profile: str, gpu: str) -> str:
    """The newest profile of that very GPU in the user's folder, where none was named; says so."""
    folder = calibration_folder()
    if profile != "auto" or not gpu or not folder.is_dir():
        return profile
    from capplan import catalog, profile_shelf

    found = profile_shelf.newest(folder, catalog.gpu(gpu).id)
    if found is None:
        return profile
    print(f"with your own profile {found.name}; --no-user-data for the shipped one", file=sys.stderr)
    return str(found)


def _rate(text: str | None, requests: int | None) -> tuple[float | None, int | None]:
    """Requests per second, or a burst of `requests` where the rate is inf."""
    if text is None:
        return None, requests
    if text.strip().lower() in ("inf", "infinity"):
        if requests is None:
            raise InputError(
                "a rate of inf needs the number of requests",
                where="--request-rate inf",
                hint="add --requests 1000",
            )
        return None, requests
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 < rate < float("inf"):
        raise InputError(f"{text!r} is no rate", where="--request-rate", hint="requests per second, or inf")
    return rate, requests


def _write(answer: "LatencyEstimate", output: OutputFormat, explain: bool) -> None:
    steps: tuple[str, ...] = ()
    if explain:
        from capplan.latency_explain import explain_latency

        steps = explain_latency(answer)
    if output is OutputFormat.JSON:
        write_json(answer.to_dict() | ({"explain": list(steps)} if explain else {}))
        return
    from capplan import latency_report, report

    if output is OutputFormat.CSV:
        write(report.to_csv(latency_report.rows(answer)))
    elif output is OutputFormat.MD:
        write(latency_report.markdown(answer) + "".join(f"- {step}\n" for step in steps))
    else:
        render([*latency_report.view(answer), *report.step_view(steps)])
