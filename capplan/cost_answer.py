"""The answer of `capplan cost` as records: bill, tokens, ways to pay, break-even, energy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from capplan.cost_question import CostQuestion, Way
from capplan.cost_speed import Speed
from capplan.formulas import cost as formulas
from capplan.ownership import LineItem, Ownership, Power
from capplan.price_choice import Quote
from capplan.specs import Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to pay for the same fleet; None: no price known."""

    way: Way
    usd_per_gpu_hour: float | None = None
    usd_per_month: float | None = None
    usd_per_million_output_token: float | None = None
    price: Quote | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON of the option."""
        return {
            "term": self.way,
            "usd_per_gpu_hour": self.usd_per_gpu_hour,
            "usd_per_month": self.usd_per_month,
            "usd_per_million_output_token": self.usd_per_million_output_token,
            "priced": self.usd_per_month is not None,
            "cloud": self.price.row.cloud if self.price and self.price.row else None,
            "read_on": self.price.row.read_on if self.price and self.price.row else None,
            "age_days": self.price.age_days if self.price else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What a month serves, and its cost a million; input is None where the split is not known."""

    output: float
    input: float | None
    requests: float | None
    prefill_share: float | None
    usd_per_million_output: float
    usd_per_million_input: float | None
    usd_per_million_blended: float | None
    usd_per_million_output_alone: float
    usd_per_request: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Where another way to pay takes over; None: never, or not asked.

    `own_months`: after so long a purchase has cost less than renting. `rent_hours_per_month`: below so many
    hours a month renting is cheaper than owning. `api_usd_per_month`: the same tokens from the API.
    `api_tokens_per_month`: from so many on the fleet is cheaper, which is `api_utilization` of what it can
    serve (above 1: never).
    """

    own_months: float | None = None
    rent_hours_per_month: float | None = None
    api_usd_per_million: float | None = None
    api_usd_per_month: float | None = None
    api_tokens_per_month: float | None = None
    api_utilization: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Energy of a month: of the machines, and with the building's share (PUE)."""

    power: Power
    pue: float
    gpu_kwh: float
    facility_kwh: float
    co2e_kg: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON of the energy."""
        return {
            "watts_per_gpu": self.power.watts,
            "provenance": self.power.provenance,
            "pue": self.pue,
            "gpu_kwh": self.gpu_kwh,
            "facility_kwh": self.facility_kwh,
            "co2e_kg": self.co2e_kg,
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class CostEstimate:
    """The answer of `capplan cost`; USD of a month of 730 h unless the name says otherwise."""

    question: CostQuestion
    gpu: Gpu
    price: Quote | None
    line_items: tuple[LineItem, ...]
    gpus_billed: int
    gpu_hours: float
    hours: float
    busy: float
    speed: Speed | None
    tokens: Tokens | None
    by_utilization: Mapping[float, float]
    usd_per_user_month: float | None
    options: tuple[Option, ...]
    ownership: Ownership | None
    break_even: BreakEven
    energy: Energy | None
    notes: tuple[str, ...] = ()

    @property
    def usd_per_month(self) -> float:
        """All line items."""
        return sum(item.usd for item in self.line_items)

    @property
    def idle_usd(self) -> float:
        """The part of the bill that pays for hours and capacity without work; inside the bill, not on top."""
        return formulas.idle_usd(usd=self.usd_per_month, utilization=self.busy)

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `capplan cost` (schema capplan.cost/1)."""
        from capplan.cost_json import to_dict

        return to_dict(self)

    def _repr_html_(self) -> str:
        """Notebook view: the line items."""
        rows = "".join(
            f"<tr><td>{item.name}</td><td>{item.quantity:,.1f} {item.unit}</td>"
            f"<td>{item.usd:,.2f} USD</td></tr>"
            for item in self.line_items
        )
        return f"<table>{rows}<tr><td>month</td><td></td><td>{self.usd_per_month:,.2f} USD</td></tr></table>"
