"""What serving costs: GPU-hours and tokens. Pure functions of numbers, in USD.

Every function is keyword-only.
"""

from capplan.units import HOUR_S


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
