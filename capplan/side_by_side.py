"""Several engines, or one on several GPUs, beside each other: a row for each, with its plan or why not."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from capplan.capacity import Target, Verdict
from capplan.engines.plan import ENGINES, EnginePlan, engine_id
from capplan.errors import InputError
from capplan.question import VramQuestion

if TYPE_CHECKING:
    from capplan.estimate import VramEstimate

ALL: Final = "all"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineRow:
    """An engine on a GPU: its plan and verdict, or the reason why it cannot be planned."""

    engine: str
    gpu: str
    gpu_id: str | None
    plan: EnginePlan | None = None
    verdict: Verdict | None = None
    error: str | None = None
    hint: str | None = None

    @property
    def fits(self) -> bool | None:
        """Whether it starts and holds the users; False where it cannot be planned."""
        return self.verdict.fits if self.verdict else False

    @property
    def note(self) -> str:
        """The engine's own reason, or why there is no plan; "" where it starts and holds the users."""
        if self.error is not None:
            return self.error + (f" ({self.hint})" if self.hint else "")
        if self.plan is None or self.verdict is None or self.fits:
            return ""
        change = f"; change {self.plan.advice[0].flag}" if self.plan.advice else ""
        if self.plan.starts and self.fits is False:
            return f"starts, and its pool holds {self.verdict.max_users or 0:,} such users" + change
        return (self.plan.reason or "within the plan's error") + change

    def to_dict(self) -> dict[str, Any]:
        """JSON of the row."""
        return {
            "name": self.engine,
            "gpu": {"name": self.gpu, "id": self.gpu_id},
            "fits": self.fits,
            "error": self.error,
            "hint": self.hint,
            "verdict": self.verdict.to_dict() if self.verdict else None,
            "plan": self.plan.to_dict() if self.plan else None,
        }


def asked_engines(question: VramQuestion) -> tuple[str, ...]:
    """The engines meant; InputError for flags that only one of all has."""
    name = question.engine or ""
    if name.strip().lower() != ALL:
        return (engine_id(name),)
    flags = question.engine_flags
    if flags is not None:
        for option, value in (("engine-version", flags.version), ("gpu-layers", flags.gpu_layers)):
            if value is not None:
                raise InputError(
                    f"--{option} is one engine's, and all are asked for",
                    where=f"--engine all, --{option}",
                    hint="name the engine",
                )
    return tuple(ENGINES)


def compared(
    question: VramQuestion,
    engines: tuple[str, ...],
    targets: tuple[Target, ...],
    answer_on: Callable[[VramQuestion, tuple[Target, ...]], "VramEstimate"],
) -> "VramEstimate":
    """The estimate of the first row that holds the users (else the first planned), with all rows.

    Errors: the InputError of the first row where none can be planned.
    """
    rows: list[EngineRow] = []
    best: VramEstimate | None = None
    first: InputError | None = None
    for target in targets:
        for engine in engines:
            try:
                made = answer_on(replace(question, engine=engine), (target,))
            except InputError as error:
                first = first or error
                rows.append(
                    EngineRow(
                        engine=engine,
                        gpu=target.name,
                        gpu_id=target.gpu_id,
                        error=error.message,
                        hint=error.hint,
                    )
                )
                continue
            if best is None or (made.fits and not best.fits):
                best = made
            rows.append(
                EngineRow(
                    engine=engine,
                    gpu=target.name,
                    gpu_id=target.gpu_id,
                    plan=made.engine,
                    verdict=made.verdicts[0],
                )
            )
    if best is None:
        raise first or InputError("no GPU", where="--gpu", hint="name one")
    verdicts = tuple(row.verdict for row in rows if row.verdict is not None)
    return replace(best, question=question, rows=tuple(rows), verdicts=verdicts)
