"""What lies around an engine's steps in a simulation: fitted on public runs, step times first.

profiles/calibrations/simulator.yaml has it by engine: the time of HTTP, tokenisation and the first token's
way back, for models with and without routed experts, and how many steps an engine decides ahead. In closed
form the same waits are means inside of serving.yaml's numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from capplan import engine_speed
from capplan.sim.looks import Looking

FILE: Final = engine_speed.SIMULATED


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """`first_token_s`: from a client to the engine and back with the first token, in s, without any queue."""

    first_token_s: float
    steps_ahead: int

    def looking(self, poll_steps: int = 1) -> Looking:
        """How the engine looks for new requests."""
        return Looking(steps_ahead=self.steps_ahead, poll_steps=poll_steps)


def around(engine: str, *, experts: bool, data: Mapping[str, Any] | None = None) -> Around | None:
    """What was fitted of `engine`; None where no run of it was. `data` stands in for the shipped file."""
    fitted = (engine_speed.around_steps() if data is None else data["engines"]).get(engine)
    if fitted is None:
        return None
    return Around(
        first_token_s=fitted["first_token_ms"]["experts" if experts else "dense"] * 1e-3,
        steps_ahead=fitted["steps_ahead"],
    )
