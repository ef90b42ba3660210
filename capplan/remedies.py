"""What would make a plan fit: one change at a time, each with the need after it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from capplan import catalog
from capplan.errors import InputError
from capplan.weights import allowed_tp

if TYPE_CHECKING:
    from capplan.estimate import VramEstimate, VramQuestion

_LIGHTER: Final = ("fp8", "int4")
_CARDS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change that makes it fit: the flag to give, and the figures after it."""

    change: str
    flag: str
    total_bytes: int
    headroom_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """JSON of one remedy."""
        return {
            "change": self.change,
            "flag": self.flag,
            "total_bytes": self.total_bytes,
            "headroom_bytes": self.headroom_bytes,
        }


def find_remedies(
    question: "VramQuestion",
    estimate: "VramEstimate",
    answer: Callable[["VramQuestion"], "VramEstimate"],
) -> tuple[Remedy, ...]:
    """Single changes after which the whole overhead band fits, cheapest for the user first.

    `answer` is the estimator itself: a remedy's figures come from the same functions as the plan's.
    """
    verdict = estimate.verdicts[0]
    changes: list[tuple[str, str, dict[str, Any]]] = []
    if verdict.max_users:
        changes.append(
            (
                f"{verdict.max_users:,} users instead of {question.users:,}",
                f"--users {verdict.max_users}",
                {"users": verdict.max_users},
            )
        )
    if verdict.max_context and verdict.max_context < question.context:
        changes.append(
            (
                f"context of {verdict.max_context:,} instead of {question.context:,}",
                f"--context {verdict.max_context}",
                {"context": verdict.max_context},
            )
        )
    if estimate.layout is not None and estimate.kv_bits > 8:
        changes.append(("KV cache in fp8", "--kv-dtype fp8", {"kv_dtype": "fp8"}))
    for name in _LIGHTER:
        lighter = catalog.load_format(name)
        if lighter.effective_bits < estimate.bits_per_parameter - 0.5:
            changes.append((f"weights in {name}", f"--precision {name}", {"precision": name}))
    if estimate.model is not None:
        for tp in allowed_tp(estimate.model, 16):
            if tp > question.tp:
                changes.append((f"{tp} GPUs (tensor parallel)", f"--tp {tp}", {"tp": tp}))
    made = [
        found
        for change, flag, fields in changes
        if (found := _tried(question, answer, change, flag, fields)) is not None
    ]
    # An engine takes a share of the memory: a card is not chosen by the total alone.
    return _fewest_gpus(made) + (() if question.engine else tuple(_cards(estimate)))


def _fewest_gpus(found: list[Remedy]) -> tuple[Remedy, ...]:
    """Of several tensor-parallel degrees that fit, only the smallest is advice."""
    first_tp = next((remedy for remedy in found if remedy.flag.startswith("--tp")), None)
    return tuple(remedy for remedy in found if not remedy.flag.startswith("--tp") or remedy is first_tp)


def _tried(
    question: "VramQuestion",
    answer: Callable[["VramQuestion"], "VramEstimate"],
    change: str,
    flag: str,
    fields: dict[str, Any],
) -> Remedy | None:
    try:
        after = answer(replace(question, **fields))
    except InputError:
        # The change itself is not allowed for this model (a split, a format).
        return None
    verdict = after.verdicts[0]
    if verdict.fits is not True:
        return None
    return Remedy(
        change=change,
        flag=flag,
        total_bytes=after.need.total_bytes,
        headroom_bytes=verdict.headroom_bytes,
    )


def _cards(estimate: "VramEstimate") -> list[Remedy]:
    """The smallest catalog accelerators of the same vendor that hold the need as it is.

    Only those whose memory a driver was seen to report: a plan is not sent to a card on a slide.
    """
    total = estimate.need.total_bytes
    asked = estimate.verdicts[0].gpu_id
    vendor = catalog.load_gpu(asked).vendor if asked is not None else None
    gpus = [catalog.load_gpu(identity) for identity in catalog.ids("gpus")]
    holding = sorted(
        (
            gpu
            for gpu in gpus
            if gpu.usable_bytes >= max(total, estimate.verdicts[0].usable_bytes)
            and gpu.memory_reading == "observed"
            and vendor in (None, gpu.vendor)
        ),
        key=lambda gpu: (gpu.usable_bytes, gpu.id),
    )
    return [
        Remedy(
            change="a larger GPU",
            flag=f"--gpu {gpu.id}",
            total_bytes=total,
            headroom_bytes=gpu.usable_bytes - total,
        )
        for gpu in holding[:_CARDS]
    ]
