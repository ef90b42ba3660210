"""The answer of `capplan cost` as JSON (schema capplan.cost/1): money in USD, a month has 730 h."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from capplan import tco
from capplan.prices import age_days
from capplan.units import MONTH_HOURS

if TYPE_CHECKING:
    from capplan.cost_answer import CostEstimate


def to_dict(made: "CostEstimate") -> dict[str, Any]:
    """Everything the answer holds; what is unknown or was not asked is null."""
    question, tokens, speed = made.question, made.tokens, made.speed
    band = None
    if tokens is not None and speed is not None and speed.low and speed.high:
        # A slower fleet makes dearer tokens.
        ratio = tokens.usd_per_million_output * speed.output_token_per_s
        band = {"low": ratio / speed.high, "high": ratio / speed.low}
    return {
        "schema": "capplan.cost/1",
        "gpu": {"id": made.gpu.id, "name": made.gpu.name, "count": question.fleet_gpus},
        "model": {"name": speed.model} if speed is not None and speed.model else None,
        "replicas": question.replicas,
        "term": question.term,
        "price": _owned_price(made) if made.price is None else made.price.to_dict(),
        "hours": made.hours,
        "gpus_billed": made.gpus_billed,
        "gpu_hours_billed": made.gpu_hours,
        "line_items": [item.to_dict() for item in made.line_items],
        "usd_per_month": made.usd_per_month,
        "utilization": question.utilization,
        "idle": {"share": 1 - made.busy, "usd_per_month": made.idle_usd, "inside_the_bill": True},
        "throughput": None if speed is None else speed.to_dict(),
        "tokens_per_month": None
        if tokens is None
        else {"input": tokens.input, "output": tokens.output, "requests": tokens.requests},
        "prefill_share": None if tokens is None else tokens.prefill_share,
        "usd_per_million_output_token": None if tokens is None else tokens.usd_per_million_output,
        "usd_per_million_output_token_band": band,
        "usd_per_million_input_token": None if tokens is None else tokens.usd_per_million_input,
        "usd_per_million_blended_token": None if tokens is None else tokens.usd_per_million_blended,
        "usd_per_million_output_token_alone": None if tokens is None else tokens.usd_per_million_output_alone,
        "usd_per_request": None if tokens is None else tokens.usd_per_request,
        "usd_per_user_month": made.usd_per_user_month,
        "usd_per_million_output_token_by_utilization": [
            {"utilization": part, "usd_per_million_output_token": usd}
            for part, usd in made.by_utilization.items()
        ],
        "options": [option.to_dict() for option in made.options],
        "ownership": None if made.ownership is None else made.ownership.to_dict(),
        "break_even": asdict(made.break_even),
        "energy": None if made.energy is None else made.energy.to_dict(),
        "notes": list(made.notes),
    }


def _owned_price(made: "CostEstimate") -> dict[str, Any]:
    """What an hour of a bought GPU comes to, and of which day the figures are."""
    known = tco.load()
    gpus = made.question.fleet_gpus
    return {
        "usd_per_gpu_hour": made.usd_per_month / (gpus * MONTH_HOURS),
        "term": "owned",
        "read_on": known.read_on,
        "source": "typical figures of ownership, see ownership.assumptions",
        "age_days": age_days(known.read_on, made.question.day),
    }
