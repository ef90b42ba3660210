"""`capplan cost`: what a fleet costs a month, and what tokens, requests and users cost."""

import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from capplan.cli.output import OutputFormat, render, write, write_json
from capplan.cli.user_folders import price_folder
from capplan.errors import InputError

if TYPE_CHECKING:
    from capplan.cost_answer import CostEstimate


def cost(
    gpu: Annotated[str, typer.Option(help="GPU: h100, a100-sxm-80gb, rtx-4090…; or --profile FILE.")] = "",
    gpus: Annotated[int | None, typer.Option(help="GPUs of the fleet (one replica).")] = None,
    model: Annotated[str | None, typer.Option(help="Catalog name or size (8b), or a path.")] = None,
    precision: Annotated[str, typer.Option(help="Weight format; auto: the checkpoint's.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="KV cache dtype; auto: the checkpoint's.")] = "auto",
    isl: Annotated[int | None, typer.Option(help="Prompt tokens of a request.")] = None,
    osl: Annotated[int | None, typer.Option(help="Output tokens of a request.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Users of the fleet at once.")] = None,
    request_rate: Annotated[float | None, typer.Option(help="Requests per second of the fleet.")] = None,
    slo: Annotated[str | None, typer.Option(help="Fill only within: chat, ttft=500ms,tpot=50ms.")] = None,
    tp: Annotated[int, typer.Option(help="GPUs that share each layer.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option(help="Attention replicas that share the experts.")] = 1,
    ep: Annotated[int, typer.Option(help="Groups that share the experts.")] = 1,
    engine: Annotated[str, typer.Option(help="vllm, sglang, tensorrt-llm, tgi.")] = "vllm",
    engine_version: Annotated[str | None, typer.Option(help="Such as 0.24.")] = None,
    profile: Annotated[
        str, typer.Option(help="Calibration: auto, a name; or a file, with its GPU.")
    ] = "auto",
    output_token_per_s: Annotated[float | None, typer.Option(help="Measured speed of the fleet.")] = None,
    price: Annotated[float | None, typer.Option(help="USD per GPU and hour.")] = None,
    term: Annotated[str, typer.Option(help="on-demand, spot, 1yr, 3yr, owned.")] = "on-demand",
    cloud: Annotated[str | None, typer.Option(help="Provider: aws, lambda, runpod…")] = None,
    region: Annotated[str | None, typer.Option(help="Region, or us, eu, ap.")] = None,
    hours: Annotated[float | None, typer.Option(help="Hours of a month (730).")] = None,
    schedule: Annotated[str | None, typer.Option(help='Such as "weekdays 8-20".')] = None,
    diurnal: Annotated[str | None, typer.Option(help="24 shares of the peak load, hour by hour.")] = None,
    utilization: Annotated[float, typer.Option(help="Part of the time with work, 0 to 1.")] = 1.0,
    spot_reserve: Annotated[float, typer.Option(help="Spare spot capacity, as a fraction.")] = 0.1,
    own: Annotated[list[str] | None, typer.Option(help="Ownership: pue=1.2, depreciation_years=4…")] = None,
    watts: Annotated[float | None, typer.Option(help="Measured watts of a GPU, with its host.")] = None,
    grid_gco2_per_kwh: Annotated[float | None, typer.Option(help="Grams of CO2e per kWh.")] = None,
    api_price_input: Annotated[float | None, typer.Option(help="API: USD per 1M prompt tokens.")] = None,
    api_price_output: Annotated[float | None, typer.Option(help="API: USD per 1M output tokens.")] = None,
    users: Annotated[int | None, typer.Option(help="Users of the fleet, at work or not.")] = None,
    requests_per_user_day: Annotated[float | None, typer.Option(help="Requests a user makes a day.")] = None,
    today: Annotated[str | None, typer.Option(help="Day from which prices' ages count.")] = None,
    no_user_data: Annotated[bool, typer.Option("--no-user-data", help="Shipped prices only.")] = False,
    online: Annotated[bool, typer.Option("--online", help="Ask the Hugging Face Hub for the model.")] = False,
    output: Annotated[OutputFormat, typer.Option("-o", "--output")] = OutputFormat.TABLE,
    explain: Annotated[bool, typer.Option("--explain", help="The formulas with numbers.")] = False,
) -> int:
    """What a fleet costs a month, as line items; and per million tokens, request and user.

    Example: capplan cost --model 8b --gpu h100 --gpus 4 --price 2.49
    """
    from capplan import cost_estimate, price_cache
    from capplan.ownership import parse_assumptions

    answer = cost_estimate.cost(
        gpu,
        prices=price_cache.load(None if no_user_data else price_folder()),
        gpus=gpus,
        model=model,
        precision=precision,
        kv_dtype=kv_dtype,
        isl=isl,
        osl=osl,
        concurrency=concurrency,
        request_per_s=request_rate,
        slo=slo,
        tp=tp,
        pp=pp,
        dp=dp,
        ep=ep,
        engine=engine,
        engine_version=engine_version,
        profile=profile,
        output_token_per_s=output_token_per_s,
        price_usd_per_gpu_hour=price,
        term=term,
        cloud=cloud,
        region=region,
        hours=hours,
        schedule=schedule,
        diurnal=diurnal,
        utilization=utilization,
        spot_reserve=spot_reserve,
        own=parse_assumptions(tuple(own or ())),
        watts=watts,
        grid_gco2_per_kwh=grid_gco2_per_kwh,
        api_price_input=api_price_input,
        api_price_output=api_price_output,
        users=users,
        requests_per_user_day=requests_per_user_day,
        today=parse_day(today, "--today"),
        online=online,
    )
    _write(answer, output, explain)
    return 0


def parse_day(text: str | None, option: str) -> datetime.date | None:
    """A day of the form YYYY-MM-DD; None where none is given."""
    if text is None:
        return None
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise InputError(f"{text!r} is no day", where=option, hint="YYYY-MM-DD") from None


def _write(answer: "CostEstimate", output: OutputFormat, explain: bool) -> None:
    from capplan import cost_report

    steps = cost_report.explain(answer) if explain else ()
    if output is OutputFormat.JSON:
        write_json(answer.to_dict() | ({"explain": list(steps)} if explain else {}))
        return
    from capplan import report

    if output is OutputFormat.CSV:
        write(report.to_csv(cost_report.rows(answer)))
    elif output is OutputFormat.MD:
        write(cost_report.markdown(answer) + "".join(f"- {step}\n" for step in steps))
    else:
        render([*cost_report.view(answer), *report.step_view(steps)])
