"""What serving costs: GPU-hours, tokens, ownership, energy, break-even. Pure functions of numbers, in USD.

Every function is keyword-only.
"""

from capplan.units import HOUR_S, MONTH_HOURS

WEEK_HOURS = 168
MONTHS_PER_YEAR = 12


def cost_usd(*, gpus: float, hours: float, usd_per_gpu_hour: float) -> float:
    """Cost of a fleet, in USD.

        Cost = G · H · R

    Holds for: GPUs paid by the hour, idle hours included. Source: serving lesson, "Cost Modeling".
    Example: 8 GPUs for 730 h at 3 USD: 17,520 USD.
    """
    return gpus * hours * usd_per_gpu_hour


def usd_per_million_token(*, usd_per_hour: float, token_per_s: float) -> float:
    """Cost of a million tokens at a steady rate, in USD.

        10⁶ · R / (3600 · tokens per second)

    Holds for: a fleet that runs at this rate all the time; idle hours raise it.
    Source: serving lesson, "Astronomical Cloud Costs".
    Example: 3 USD/h at 15 tokens/s: 55.56 USD.
    """
    return 1e6 * usd_per_hour / (HOUR_S * token_per_s)


def month_hours(*, week_hours: float) -> float:
    """Hours of a month of a weekly schedule.

        hours a week · 730 / 168

    Holds for: a month of 730 h, a twelfth of a year. Source: arithmetic.
    Example: weekdays from 8 to 20, 60 h a week: 260.71 h.
    """
    return week_hours * MONTH_HOURS / WEEK_HOURS


def idle_usd(*, usd: float, utilization: float) -> float:
    """The part of a bill that pays for hours or capacity without work, in USD.

        bill · (1 − utilization)

    Holds for: GPUs that stay on while idle: the bill itself is not multiplied by the utilization, only
    capacity that is released costs nothing. Source: serving lesson, "idle GPUs incinerate capital".
    Example: 1,460 USD at 40 % utilization: 876 USD are idle.
    """
    return usd * (1 - utilization)


def tokens_served(*, token_per_s: float, hours: float, utilization: float) -> float:
    """Tokens that a fleet serves in these hours.

        tokens per second · 3600 · H · utilization

    Holds for: a rate of the busy fleet; utilization is the part of the time with work.
    Source: serving lesson, "Cost Modeling".
    Example: 1,000 tokens/s for 730 h at 50 %: 1.314·10⁹ tokens.
    """
    return token_per_s * HOUR_S * hours * utilization


def share_usd_per_million_token(*, usd: float, share: float, tokens: float) -> float:
    """Cost of a million tokens of one phase, which takes a share of the GPUs' time, in USD.

        10⁶ · bill · share / tokens

    Holds for: prefill and decode that share GPUs: prompt tokens carry the time of prefill, output tokens the
    rest; with share 1 and all tokens it is the blended cost. Source: arithmetic.
    Example: 1,460 USD, 10 % of the time prefill, 10⁹ prompt tokens: 0.146 USD.
    """
    return 1e6 * usd * share / tokens


def token_price_usd(*, tokens: float, usd_per_million: float) -> float:
    """What tokens cost at a price per million, in USD.

        tokens · price / 10⁶

    Holds for: prices per million, as APIs list them. Source: anomalyco/opencode#11175 left the 10⁶ out.
    Example: 983,087 tokens at 0.45 USD a million: 0.4424 USD.
    """
    return tokens * usd_per_million / 1e6


def usd_per_token(*, usd_per_million: float) -> float:
    """Price of one token from the price of a million, in USD.

        price / 10⁶

    Holds for: any price per million. Source: maximhq/bifrost#3559, 8 USD entered per token.
    Example: 8 USD a million: 0.000008 USD.
    """
    return usd_per_million / 1e6


def spare_gpu_hours(*, gpu_hours: float, reserve: float) -> float:
    """GPU-hours beside those needed, so that interrupted spot instances are replaced at once.

        GPU-hours · reserve

    Holds for: spares bought at the same price. Source: arithmetic; the reserve is the planner's choice.
    Example: 730 GPU-hours with a reserve of 10 %: 73.
    """
    return gpu_hours * reserve


def depreciation_usd_per_month(*, purchase_usd: float, residual: float, years: float) -> float:
    """What a purchase loses a month, straight line, in USD.

        purchase · (1 − residual) / (12 · years)

    Holds for: hardware sold for `residual` of its price at the end, 0 where it is written off.
    Source: straight-line depreciation, as in the companies' 10-K filings.
    Example: 30,000 USD over 5 years: 500 USD.
    """
    return purchase_usd * (1 - residual) / (MONTHS_PER_YEAR * years)


def capital_usd_per_month(*, purchase_usd: float, residual: float, per_year: float) -> float:
    """Cost of the money in a purchase, a month, in USD.

        purchase · (1 + residual) / 2 · rate / 12

    Holds for: a book value that falls in a straight line, so that half is tied up on average.
    Source: arithmetic. Example: 30,000 USD at 8 % a year: 100 USD.
    """
    return purchase_usd * (1 + residual) / 2 * per_year / MONTHS_PER_YEAR


def energy_kwh(*, watts: float, hours: float, pue: float = 1.0) -> float:
    """Energy, in kWh.

        W · h · PUE / 1000

    Holds for: power at the machine; PUE adds the building's (cooling, losses): facility over machine energy.
    Source: definition of PUE. Example: 700 W for 730 h at PUE 1.3: 664.3 kWh.
    """
    return watts * hours * pue / 1000


def co2e_kg(*, kwh: float, gram_per_kwh: float) -> float:
    """Emissions of energy, in kg CO2e.

        kWh · g/kWh / 1000

    Holds for: the grid factor given, where the machines stand. Source: definition.
    Example: 664.3 kWh at 400 g/kWh: 265.72 kg.
    """
    return kwh * gram_per_kwh / 1000


def break_even_months(*, purchase_usd: float, rent_usd: float, running_usd: float) -> float | None:
    """Months until a purchase has cost less than renting; None where it never does.

        purchase / (rent a month − running cost a month)

    Holds for: equal work on both sides, the hardware's value afterwards left out. Source: arithmetic.
    Example: 30,000 USD bought, 2,000 USD rent, 500 USD running: 20 months.
    """
    saved = rent_usd - running_usd
    return purchase_usd / saved if saved > 0 else None


def blended_usd_per_million(*, input_usd: float, output_usd: float, isl: float, osl: float) -> float:
    """Price of a million tokens, prompt and output mixed as requests have them, in USD.

        (input price · ISL + output price · OSL) / (ISL + OSL)

    Holds for: prices per million, without cache discounts. Source: arithmetic.
    Example: 0.50 in and 2.00 out at 3,000 + 1,000 tokens: 0.875 USD.
    """
    return (input_usd * isl + output_usd * osl) / (isl + osl)


def break_even_tokens(*, usd: float, usd_per_million: float) -> float:
    """Tokens a month from which a fleet of a fixed bill is cheaper than an API.

        10⁶ · bill / price per million

    Holds for: a fleet that can serve so many; below it the API is cheaper. Source: arithmetic.
    Example: 1,460 USD against 0.50 USD a million: 2.92·10⁹ tokens.
    """
    return 1e6 * usd / usd_per_million
