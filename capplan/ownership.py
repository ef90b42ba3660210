"""What GPUs cost that are bought: purchase, money, power, hosting, upkeep, as line items of a month.

Typical figures come with their sources from profiles/tco.yaml; each can be replaced by the buyer's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from capplan import tco
from capplan.errors import InputError, did_you_mean, shown
from capplan.formulas import cost
from capplan.specs import Gpu
from capplan.tco import Figure
from capplan.units import MONTH_HOURS

# What a buyer may set, with the values that make sense.
ASSUMPTIONS: Final[Mapping[str, tuple[float, float]]] = {
    "purchase_usd_per_gpu": (1, 1e6),
    "depreciation_years": (0.5, 20),
    "residual_fraction": (0, 0.99),
    "network_fraction": (0, 2),
    "capital_fraction_per_year": (0, 1),
    "server_watts_per_gpu": (1, 1e5),
    "power_fraction": (0.01, 1),
    "pue": (1, 3),
    "electricity_usd_per_kwh": (0, 5),
    "hosting_usd_per_kw_month": (0, 5000),
    "maintenance_fraction_per_year": (0, 1),
    "staff_fraction": (0, 5),
}
_CHEAPER_WHEN_HIGH: Final = ("depreciation_years", "residual_fraction")
RESIDUAL_YEARS: Final = 3.0
"""What hardware is sold for is known for 36 months; after longer it is written off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineItem:
    """quantity × unit price = USD a month."""

    name: str
    quantity: float
    unit: str
    usd_per_unit: float
    note: str = ""

    @property
    def usd(self) -> float:
        """USD a month."""
        return self.quantity * self.usd_per_unit

    def to_dict(self) -> dict[str, Any]:
        """JSON of the item."""
        return {
            "name": self.name,
            "quantity": self.quantity,
            "unit": self.unit,
            "usd_per_unit": self.usd_per_unit,
            "usd": self.usd,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Power of one GPU, in watts, and where it is from: measured, tdp, or the node's power."""

    watts: float
    provenance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """The month of a bought fleet: items at typical figures, the total from low to high."""

    items: tuple[LineItem, ...]
    low_usd: float
    high_usd: float
    purchase_usd: float
    running_usd: float
    power: Power
    pue: float
    assumptions: Mapping[str, Figure]
    notes: tuple[str, ...] = ()

    @property
    def usd_per_month(self) -> float:
        """All items."""
        return sum(item.usd for item in self.items)

    def to_dict(self) -> dict[str, Any]:
        """JSON of the ownership."""
        return {
            "usd_per_month": self.usd_per_month,
            "low_usd_per_month": self.low_usd,
            "high_usd_per_month": self.high_usd,
            "purchase_usd": self.purchase_usd,
            "running_usd_per_month": self.running_usd,
            "line_items": [item.to_dict() for item in self.items],
            "assumptions": {name: figure.to_dict() for name, figure in self.assumptions.items()},
            "sources": {
                source: tco.load().sources[source]
                for source in sorted(
                    {name for figure in self.assumptions.values() for name in figure.sources}
                )
            },
        }


def parse_assumptions(entries: tuple[str, ...]) -> dict[str, float]:
    """`name=value` entries; InputError for a name or value that makes no sense."""
    made: dict[str, float] = {}
    for entry in entries:
        name, found, text = entry.partition("=")
        name = name.strip().replace("-", "_")
        if name not in ASSUMPTIONS:
            raise InputError(
                f"unknown assumption {shown(name)}",
                where="--own",
                hint=did_you_mean(name, ASSUMPTIONS, f"name=value: {', '.join(ASSUMPTIONS)}"),
            )
        low, high = ASSUMPTIONS[name]
        try:
            value = float(text) if found else float("nan")
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise InputError(
                f"{name} {shown(text)}", where="--own", hint=f"{name}=NUMBER, from {low:g} to {high:g}"
            )
        made[name] = value
    return made


def own(
    gpu: Gpu, *, gpus: int, given: Mapping[str, float] | None = None, watts: float | None = None
) -> Ownership | None:
    """A bought fleet of `gpus`; None where no purchase price is known for this GPU and none was given.

    `watts` is the measured power of a GPU with its share of the machine.
    """
    figures, notes = _assumptions(gpu, given or {})
    if "purchase_usd_per_gpu" not in figures or "server_watts_per_gpu" not in figures:
        return None
    typical = {name: figure.typical for name, figure in figures.items()}
    items = _items(
        typical, gpus, watts, residual=_residual(given, figures["depreciation_years"].typical, "typical")
    )
    ends = {}
    for end in ("low", "high"):
        values = {name: _end(name, figure, end) for name, figure in figures.items()}
        residual = _residual(given, values["depreciation_years"], "high" if end == "low" else "low")
        ends[end] = sum(item.usd for item in _items(values, gpus, watts, residual=residual))
    running = ("electricity", "hosting", "maintenance", "staff")
    return Ownership(
        items=tuple(items),
        low_usd=ends["low"],
        high_usd=ends["high"],
        purchase_usd=gpus * typical["purchase_usd_per_gpu"] * (1 + typical["network_fraction"]),
        running_usd=sum(item.usd for item in items if item.name in running),
        power=Power(
            watts=_draw(typical, watts), provenance="measured" if watts is not None else "node power"
        ),
        pue=typical["pue"],
        assumptions=figures,
        notes=tuple(notes),
    )


def _assumptions(gpu: Gpu, given: Mapping[str, float]) -> tuple[dict[str, Figure], list[str]]:
    """The figures of this GPU, the buyer's own before the typical ones."""
    known = tco.load()
    figures = {name: known.figures[name] for name in ASSUMPTIONS if name in known.figures}
    notes: list[str] = []
    node, alone = known.node_usd.get(gpu.id), known.purchase_usd_per_gpu.get(gpu.id)
    if node is not None:
        figures["purchase_usd_per_gpu"] = _each(node)
    elif alone is not None:
        figures["purchase_usd_per_gpu"] = alone
        notes.append("the purchase is the GPU's alone: a host comes on top")
    power = known.node_max_watts.get(gpu.id)
    if power is not None:
        figures["server_watts_per_gpu"] = _each(power)
    elif gpu.tdp_w is not None:
        figures["server_watts_per_gpu"] = Figure(
            low=gpu.tdp_w, typical=gpu.tdp_w, high=gpu.tdp_w, status="tdp"
        )
        notes.append("power is the GPU's TDP: a host comes on top")
    for name, value in given.items():
        figures[name] = Figure(low=value, typical=value, high=value)
    for name, figure in figures.items():
        if figure.status == "recall":
            notes.append(f"{name.replace('_', ' ')} {figure.typical:,g}: remembered, not read")
    return figures, notes


def _each(figure: Figure) -> Figure:
    """A node's figure for one of its GPUs."""
    return Figure(
        low=figure.low / figure.gpus,
        typical=figure.typical / figure.gpus,
        high=figure.high / figure.gpus,
        status=figure.status,
        dated=figure.dated,
        sources=figure.sources,
        notes=figure.notes,
    )


def _end(name: str, figure: Figure, end: str) -> float:
    """The figure at the end that makes owning cheap (low) or dear (high)."""
    cheap = figure.high if name in _CHEAPER_WHEN_HIGH else figure.low
    dear = figure.low if name in _CHEAPER_WHEN_HIGH else figure.high
    return cheap if end == "low" else dear


def _residual(given: Mapping[str, float] | None, years: float, end: str) -> float:
    """What is left of the price at the end, as a fraction."""
    if given is not None and "residual_fraction" in given:
        return given["residual_fraction"]
    if years > RESIDUAL_YEARS:
        return 0.0
    figure = tco.load().figures["residual_fraction_36_months"]
    return {"low": figure.low, "typical": figure.typical, "high": figure.high}[end]


def _draw(values: Mapping[str, float], watts: float | None) -> float:
    """Watts one GPU draws with its share of the machine."""
    return watts if watts is not None else values["server_watts_per_gpu"] * values["power_fraction"]


def _items(values: Mapping[str, float], gpus: int, watts: float | None, *, residual: float) -> list[LineItem]:
    """Line items of a month."""
    price, years = values["purchase_usd_per_gpu"], values["depreciation_years"]
    network = price * values["network_fraction"]
    kwh = gpus * cost.energy_kwh(watts=_draw(values, watts), hours=MONTH_HOURS, pue=values["pue"])
    kilowatts = gpus * max(values["server_watts_per_gpu"], watts or 0.0) / 1000
    capital = cost.capital_usd_per_month(
        purchase_usd=price + network, residual=residual, per_year=values["capital_fraction_per_year"]
    )
    each = "GPU"
    items = [
        LineItem(
            name="purchase",
            quantity=gpus,
            unit=each,
            usd_per_unit=cost.depreciation_usd_per_month(purchase_usd=price, residual=residual, years=years),
            note=f"{price:,.0f} USD over {years:g} years" + (f", {residual:.0%} left" if residual else ""),
        ),
        LineItem(
            name="network",
            quantity=gpus,
            unit=each,
            usd_per_unit=cost.depreciation_usd_per_month(purchase_usd=network, residual=0, years=years),
            note=f"{values['network_fraction']:.0%} of the purchase",
        ),
        LineItem(
            name="capital",
            quantity=gpus,
            unit=each,
            usd_per_unit=capital,
            note=f"{values['capital_fraction_per_year']:.1%} a year on half of it",
        ),
        LineItem(
            name="electricity",
            quantity=kwh,
            unit="kWh",
            usd_per_unit=values["electricity_usd_per_kwh"],
            note=f"{_draw(values, watts):,.0f} W a GPU, PUE {values['pue']:g}",
        ),
        LineItem(
            name="hosting",
            quantity=kilowatts,
            unit="kW",
            usd_per_unit=values["hosting_usd_per_kw_month"],
            note=f"{kilowatts * 1000 / gpus:,.0f} W a GPU provided for",
        ),
        LineItem(
            name="maintenance",
            quantity=gpus,
            unit=each,
            usd_per_unit=price * values["maintenance_fraction_per_year"] / cost.MONTHS_PER_YEAR,
            note=f"{values['maintenance_fraction_per_year']:.0%} of the purchase a year",
        ),
    ]
    before = sum(item.usd for item in items)
    items.append(
        LineItem(
            name="staff",
            quantity=before,
            unit="USD",
            usd_per_unit=values["staff_fraction"],
            note=f"{values['staff_fraction']:.0%} of the above",
        )
    )
    return items
