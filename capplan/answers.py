"""The answers of vram, latency and cost to one scenario, each worked out once and only when asked for.

The same on every machine: shipped prices as of a day of the scenario (or the newest shipped price), no
network, no GPU of this machine, no calibration but the scenario's.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from capplan import scenario_questions as questions
from capplan.errors import CapplanError, DoesNotFitError, InputError
from capplan.expectation import NotEvaluatedError
from capplan.scenario import Scenario

if TYPE_CHECKING:
    from capplan.latency_estimate import LatencyEstimate

MEMORY_CALIBRATION: Final = "capplan.memory-calibration/1"


class Answers:
    """The answers to one scenario as JSON mappings; each raises what kept it from being told."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.notes: list[str] = []
        self._made: dict[str, Mapping[str, Any] | Exception] = {}
        self._speed: LatencyEstimate | None = None

    def get(self, name: str) -> Mapping[str, Any]:
        """The JSON of "vram", "latency" or "cost".

        Errors: NotEvaluatedError where the scenario lacks what the answer needs; InputError for a question
        that cannot be asked.
        """
        if name not in self._made:
            try:
                self._made[name] = {"vram": self._vram, "latency": self._latency, "cost": self._cost}[name]()
            except (CapplanError, NotEvaluatedError) as error:
                self._made[name] = error
        found = self._made[name]
        if isinstance(found, Exception):
            raise found
        return found

    def known(self, name: str) -> Mapping[str, Any] | None:
        """The answer, or None where it cannot be told."""
        try:
            return self.get(name)
        except (CapplanError, NotEvaluatedError):
            return None

    def _vram(self) -> Mapping[str, Any]:
        from capplan import estimate, question

        users = self._users()
        fields = questions.vram_fields(self.scenario, users)
        if users is None:
            self.notes.append(f"no users given: vram plans {question.DEFAULT_USERS}, as the command does")
        calibration = self._calibration()
        if calibration is not None and calibration[0]:
            fields["calibration"] = calibration[1]
        elif calibration is not None and questions.brings_device(self.scenario):
            fields["profile"] = calibration[1]
        made = estimate.VramQuestion(
            default_context="context" not in fields, **{"precision": "auto", "model": None} | fields
        )
        return estimate.answer(made).to_dict()

    def _users(self) -> int | None:
        """Users of a replica: those given, else those under way at the rate given (Little's law)."""
        users = questions.fixed_users(self.scenario)
        if users is not None or "workload.request_per_s" not in self.scenario.values:
            return users
        speed = self._estimate()
        if speed.served is None or not speed.served.steady:
            raise NotEvaluatedError("users at this request_per_s are not known: no steady state, or no fit")
        users = max(1, math.ceil(speed.served.running))
        rate, e2e = self.scenario.values["workload.request_per_s"], speed.e2e.estimate or 0.0
        self.notes.append(
            f"vram plans {users:,} users a replica: requests under way at {rate:g}/s (each takes {e2e:.3g} s)"
        )
        return users

    def _estimate(self) -> "LatencyEstimate":
        """The speed of one replica, without what other choices would change."""
        if self._speed is None:
            from capplan.latency_estimate import figures
            from capplan.latency_question import LatencyQuestion

            fields = questions.latency_fields(self.scenario)
            calibration = self._calibration()
            if calibration is not None and not calibration[0]:
                fields["profile"] = calibration[1]
            self._speed = figures(LatencyQuestion(**{"gpu": ""} | fields))
        return self._speed

    def _latency(self) -> Mapping[str, Any]:
        return self._estimate().to_dict()

    def _calibration(self) -> tuple[bool, str] | None:
        """Whether the scenario's calibration is one of memory, and its path; None for the shipped ones."""
        path = self.scenario.values.get("calibration", "shipped")
        if path == "shipped":
            return None
        from pathlib import Path

        from capplan import catalog

        if not Path(path).is_file():
            raise InputError(f"no file {path}", where="--calibration", hint="a path relative to the scenario")
        return catalog.read_yaml(Path(path)).get("schema") == MEMORY_CALIBRATION, path

    def _cost(self) -> Mapping[str, Any]:
        import datetime

        from capplan import price_cache
        from capplan.cost_estimate import cost
        from capplan.ownership import parse_assumptions
        from capplan.prices import PriceBook

        fields, bill_alone = questions.cost_fields(self.scenario)
        day = self.scenario.values.get("fleet.price.as_of")
        if self._needs_prices(fields):
            book = price_cache.load()
            # Of a day the scenario gives, or of the newest shipped price: never of today.
            day = day or max(datetime.date.fromisoformat(row.read_on) for row in book.rows)
            self.notes.append(f"prices as of {day}")
        else:
            book, day = PriceBook((), {}), day or datetime.date(2000, 1, 1)
        if bill_alone:
            self.notes.append(f"cost is the bill alone, without tokens: {bill_alone}")
        calibration = self._calibration()
        if calibration is not None and not calibration[0] and ("model" in fields or "gpu" not in fields):
            fields["profile"] = calibration[1]
        own = parse_assumptions(self.scenario.values.get("cost.own", ()))
        try:
            return cost(prices=book, today=day, own=own, **fields).to_dict()
        except DoesNotFitError as error:
            # The bill stands whether or not the fleet can serve the load.
            for name in questions.COST_SPEED:
                if name != "profile" or "gpu" in fields:
                    fields.pop(name, None)
            self.notes.append(f"cost is the bill alone, without tokens: {error.message}")
            return cost(prices=book, today=day, own=own, **fields).to_dict()

    def _needs_prices(self, fields: Mapping[str, Any]) -> bool:
        """Whether a shipped price is looked up: none is given, or other ways to pay are asked about."""
        others = {"options", "break_even"}
        asked = {entry.path[0] for entry in self.scenario.expectations if entry.answer == "cost"}
        return "price_usd_per_gpu_hour" not in fields or bool(asked & others)
