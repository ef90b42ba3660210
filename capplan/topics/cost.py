"""Topics on money: fleets, tokens, idle GPUs, spot, owning, energy, and where one way overtakes another."""

from typing import Final

from capplan.formulas import cost
from capplan.topics.topic import Line, Topic, topic
from capplan.units import HOUR_S, MONTH_HOURS

# The lesson's fleet, at its price, and the rate of its anti-pattern.
FLEET_GPUS: Final = 8
LESSON_USD: Final = (3.0, 5.0)
IDLE_TOKEN_PER_S: Final = 15.0


def _fleet() -> tuple[Line, ...]:
    low, high = LESSON_USD
    return (
        Line(
            "8 GPUs for a month of 730 h at 3 USD",
            cost.cost_usd(gpus=FLEET_GPUS, hours=MONTH_HOURS, usd_per_gpu_hour=low),
            "USD",
        ),
        Line(
            "the same at 5 USD",
            cost.cost_usd(gpus=FLEET_GPUS, hours=MONTH_HOURS, usd_per_gpu_hour=high),
            "USD",
        ),
    )


def _per_token() -> tuple[Line, ...]:
    def at(usd: float, speed: float) -> float:
        return cost.usd_per_million_token(usd_per_hour=usd, token_per_s=speed)

    low, high = LESSON_USD
    return (
        Line("3 USD/h at 15 tokens/s", at(low, IDLE_TOKEN_PER_S), "USD"),
        Line("5 USD/h at 15 tokens/s", at(high, IDLE_TOKEN_PER_S), "USD"),
        Line("3 USD/h at 1,500 tokens/s", at(low, 100 * IDLE_TOKEN_PER_S), "USD"),
    )


def _idle() -> tuple[Line, ...]:
    bill = cost.cost_usd(gpus=1, hours=MONTH_HOURS, usd_per_gpu_hour=2)
    served = cost.tokens_served(token_per_s=1000, hours=MONTH_HOURS, utilization=0.4)
    return (
        Line("one GPU at 2 USD, on all month", bill, "USD"),
        Line("of which idle at 40 % utilization", cost.idle_usd(usd=bill, utilization=0.4), "USD"),
        Line("tokens served meanwhile, of 1,000 a second", served, "token"),
        Line(
            "a million of them",
            cost.share_usd_per_million_token(usd=bill, share=1, tokens=served),
            "USD",
        ),
    )


def _schedule() -> tuple[Line, ...]:
    hours = cost.month_hours(week_hours=60)
    return (
        Line("weekdays from 8 to 20", hours, "h a month"),
        Line("8 GPUs at 3 USD", cost.cost_usd(gpus=8, hours=hours, usd_per_gpu_hour=3), "USD"),
    )


def _split() -> tuple[Line, ...]:
    bill = cost.cost_usd(gpus=1, hours=MONTH_HOURS, usd_per_gpu_hour=2)
    out = cost.tokens_served(token_per_s=1000, hours=MONTH_HOURS, utilization=1)

    def each(share: float, tokens: float) -> float:
        return cost.share_usd_per_million_token(usd=bill, share=share, tokens=tokens)

    return (
        Line("1M output tokens, decode 90 % of the time", each(0.9, out), "USD"),
        Line("1M prompt tokens, four for each output token, prefill 10 %", each(0.1, 4 * out), "USD"),
        Line("1M tokens, blended", each(1, 5 * out), "USD"),
    )


def _per_million() -> tuple[Line, ...]:
    return (
        Line(
            "983,087 tokens at 0.45 USD a million",
            cost.token_price_usd(tokens=983_087, usd_per_million=0.45),
            "USD",
        ),
        Line("one token at 8 USD a million", cost.usd_per_token(usd_per_million=8), "USD"),
        Line(
            "a million tokens an hour at 3 USD an hour",
            cost.usd_per_million_token(usd_per_hour=3, token_per_s=1e6 / HOUR_S),
            "USD",
        ),
    )


def _spot() -> tuple[Line, ...]:
    hours = 4.0 * MONTH_HOURS
    spare = cost.spare_gpu_hours(gpu_hours=hours, reserve=0.1)
    return (
        Line("GPU-hours of 4 GPUs and a reserve of 10 %", hours + spare, "GPU-hour"),
        Line("at 1 USD", cost.cost_usd(gpus=1, hours=hours + spare, usd_per_gpu_hour=1), "USD"),
    )


def _owning() -> tuple[Line, ...]:
    price = 30_000.0
    loss = cost.depreciation_usd_per_month(purchase_usd=price, residual=0, years=5)
    money = cost.capital_usd_per_month(purchase_usd=price, residual=0, per_year=0.08)
    kwh = cost.energy_kwh(watts=700, hours=MONTH_HOURS, pue=1.3)
    return (
        Line("30,000 USD over 5 years, a month", loss, "USD"),
        Line("the money in it at 8 % a year", money, "USD"),
        Line("700 W all month at PUE 1.3", kwh, "kWh"),
        Line("the three at 0.10 USD/kWh", loss + money + kwh * 0.10, "USD"),
    )


def _energy() -> tuple[Line, ...]:
    kwh = cost.energy_kwh(watts=700, hours=MONTH_HOURS, pue=1.3)
    return (
        Line("700 W for 730 h", cost.energy_kwh(watts=700, hours=MONTH_HOURS), "kWh"),
        Line("with PUE 1.3", kwh, "kWh"),
        Line("at 400 g CO2e a kWh", cost.co2e_kg(kwh=kwh, gram_per_kwh=400), "kg CO2e"),
    )


def _break_even() -> tuple[Line, ...]:
    bill = cost.cost_usd(gpus=1, hours=MONTH_HOURS, usd_per_gpu_hour=2)
    api = cost.blended_usd_per_million(input_usd=0.5, output_usd=2, isl=3000, osl=1000)
    months = cost.break_even_months(purchase_usd=30_000, rent_usd=2000, running_usd=500)
    return (
        Line("30,000 USD bought, 500 a month running, against 2,000 rent", months or 0.0, "months"),
        Line("an API at 0.50 in and 2 out, 3,000 + 1,000 tokens", api, "USD a million"),
        Line(
            "tokens a month from which a GPU at 2 USD/h is cheaper",
            cost.break_even_tokens(usd=bill, usd_per_million=api),
            "token",
        ),
    )


COST: Final[tuple[Topic, ...]] = (
    topic(
        "cost",
        "Cost = G × H × R",
        (cost.cost_usd,),
        _fleet,
        aliases=("g-h-r", "gpu-hours", "fleet-cost"),
        command="capplan cost --gpu h100 --gpus 8 --price 3",
    ),
    topic(
        "cost-per-token",
        "Cost of a million tokens",
        (cost.usd_per_million_token,),
        _per_token,
        aliases=("usd-per-million-token",),
        command="capplan cost --gpu h100 --price 3 --output-token-per-s 15",
    ),
    topic(
        "idle-gpu",
        "Idle GPUs: the bill stays, the tokens do not come",
        (cost.idle_usd, cost.tokens_served, cost.share_usd_per_million_token),
        _idle,
        aliases=("idle", "utilization", "idle-gpus"),
        command="capplan cost --gpu h100 --price 2 --output-token-per-s 1000 --utilization 0.4",
    ),
    topic(
        "schedule",
        "Hours of a month by a weekly schedule",
        (cost.month_hours, cost.cost_usd),
        _schedule,
        aliases=("month-hours", "office-hours"),
        command='capplan cost --gpu h100 --gpus 8 --price 3 --schedule "weekdays 8-20"',
    ),
    topic(
        "input-and-output-price",
        "Prompt and output tokens apart, by the time they take",
        (cost.share_usd_per_million_token, cost.tokens_served),
        _split,
        aliases=("blended", "input-price", "output-price"),
        command="capplan cost --model 8b --gpu h100",
    ),
    topic(
        "per-million",
        "Prices are per million tokens",
        (cost.token_price_usd, cost.usd_per_token, cost.usd_per_million_token),
        _per_million,
        aliases=("per-token", "api-price", "billing"),
    ),
    topic(
        "spot",
        "Spot GPUs and a reserve for interruptions",
        (cost.spare_gpu_hours, cost.cost_usd),
        _spot,
        aliases=("spot-reserve", "preemptible", "interruptions"),
        command="capplan cost --gpu h100 --gpus 4 --term spot --spot-reserve 0.1",
    ),
    topic(
        "owning",
        "What a bought GPU costs a month",
        (cost.depreciation_usd_per_month, cost.capital_usd_per_month, cost.energy_kwh),
        _owning,
        aliases=("tco", "ownership", "depreciation", "on-premises"),
        command="capplan cost --gpu h100 --gpus 8 --term owned",
    ),
    topic(
        "energy",
        "Energy and emissions",
        (cost.energy_kwh, cost.co2e_kg),
        _energy,
        aliases=("power", "pue", "co2", "kwh"),
        command="capplan cost --gpu h100 --price 2 --grid-gco2-per-kwh 400",
    ),
    topic(
        "break-even",
        "Renting, owning, or an API",
        (cost.break_even_months, cost.blended_usd_per_million, cost.break_even_tokens),
        _break_even,
        aliases=("rent-or-buy", "self-host-or-api"),
        command="capplan cost --model 8b --gpu h100 --api-price-input 0.5 --api-price-output 2",
    ),
)
