"""GPU capacity planning and cost of LLM serving, on numbers that say where they come from."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capplan.cost_answer import CostEstimate
    from capplan.cost_estimate import cost
    from capplan.estimate import VramEstimate, vram
    from capplan.latency_answer import LatencyEstimate
    from capplan.latency_estimate import latency
    from capplan.scenario import Scenario, load_scenario, load_scenarios
    from capplan.simulate_estimate import Simulation, simulate

__version__ = "0.1.0"
__all__ = ["CostEstimate", "LatencyEstimate", "Scenario", "Simulation", "VramEstimate", "cost", "latency",
           "load_scenario", "load_scenarios", "simulate", "vram"]  # fmt: skip
# Module → public names, imported when first used, so that `import capplan` stays light.
_HOME = {
    "cost_answer": ("CostEstimate",), "cost_estimate": ("cost",), "estimate": ("VramEstimate", "vram"),
    "latency_answer": ("LatencyEstimate",), "latency_estimate": ("latency",), "simulate_estimate":
    ("Simulation", "simulate"), "scenario": ("Scenario", "load_scenario", "load_scenarios"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"capplan.{module}"), name)
    raise AttributeError(f"module 'capplan' has no attribute {name!r}")
