"""Several models on one GPU, each an engine's process of its own, in the order in which they start.

    free for the next = free before − what this one takes
    takes             = weights + beside + its terms + KV pool + what lies outside the fraction + its context

A service that refuses takes nothing. What the engines make of memory that others hold is engine_answer's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from capplan.capacity import Target
from capplan.engines.plan import Advice, EngineFlags, EnginePlan
from capplan.engines.vllm_defaults import calibration
from capplan.engines.vllm_terms import visible_bytes
from capplan.errors import InputError, did_you_mean, shown
from capplan.question import DEFAULT_CONTEXT, VramQuestion
from capplan.units import format_gib

if TYPE_CHECKING:
    from capplan.estimate import VramEstimate

_AnswerOn = Callable[[VramQuestion, tuple[Target, ...]], "VramEstimate"]

# Held outside what an engine's fraction is of, by its process from the start. vLLM's CUDA graphs are in
# what was measured of its process.
_OUTSIDE: Final = ("context_outside",)
_NOT_HELD: Final = ("total", "budget", "others", "kv_cache")
# Engines whose terms leave out the CUDA context of their process.
_CONTEXT_BESIDE: Final = ("vllm", "llama.cpp")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Service:
    """One model's process: what it found free, what it takes, and whether it starts.

    `fits` also says whether the users asked for are in its pool.
    """

    name: str
    asked: str
    plan: EnginePlan
    fits: bool | None
    starts: bool | None
    free_bytes: int
    takes_bytes: int
    reason: str | None
    advice: tuple[Advice, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON of the service."""
        return {
            "model": self.name,
            "asked": self.asked,
            "fits": self.fits,
            "starts": self.starts,
            "reason": self.reason,
            "free_before_bytes": self.free_bytes,
            "takes_bytes": self.takes_bytes,
            "advice": [entry.to_dict() for entry in self.advice],
            "engine": self.plan.to_dict(),
        }


def with_services(
    question: VramQuestion, targets: tuple[Target, ...], answer_on: _AnswerOn
) -> "VramEstimate":
    """The estimate of the model asked for, with every service of the GPU in start order.

    Errors: InputError without an engine, without exactly one GPU, and for services that cannot be read.
    """
    _check(question, targets)
    target = targets[0]
    whole = target.whole_bytes or target.usable_bytes
    free = visible_bytes(whole) if target.free_bytes is None else target.free_bytes
    asked = [(replace(question, services=()), True), *(_read(text, question) for text in question.services)]
    first: VramEstimate | None = None
    made: list[Service] = []
    for number, (own, has_users) in enumerate(asked):
        here = target if number == 0 else replace(target, whole_bytes=whole, free_bytes=free)
        try:
            estimate = answer_on(own, (here,))
        except InputError as error:
            if number == 0:
                raise
            text = question.services[number - 1]
            raise InputError(error.message, where=f"--with {shown(text)}", hint=error.hint) from None
        first = first or estimate
        service = _service(estimate, free, has_users)
        if service.starts is False and number:
            service = replace(service, advice=_advice(own, here, free, service, made, answer_on))
        made.append(service)
        free = max(0, free - service.takes_bytes)
    if first is None:
        raise InputError("no service", where="--with", hint="name a model")
    return replace(first, question=question, services=tuple(made))


def _check(question: VramQuestion, targets: tuple[Target, ...]) -> None:
    if question.engine is None or question.engine.strip().lower() == "all":
        raise InputError("services start under an engine", where="--with, --engine", hint="add --engine vllm")
    if len(targets) != 1:
        raise InputError(
            "services share one GPU", where="--with, --gpu", hint="give one --gpu NAME, or --gpu-memory SIZE"
        )
    if question.tp * question.pp * question.dp > 1:
        raise InputError(
            "services are planned on one GPU each with all of them",
            where="--with, --tp, --pp, --dp",
            hint="leave the split out",
        )


_NUMBERS: Final[Mapping[str, type]] = {
    "gpu_memory_utilization": float,
    "max_model_len": int,
    "max_num_batched_tokens": int,
    "max_num_seqs": int,
    "gpu_layers": int,
    "users": int,
    "context": int,
}
_TEXTS: Final = ("engine", "engine_version", "precision", "kv_dtype")
_SWITCHES: Final = ("enforce_eager",)
KEYS: Final = (*_NUMBERS, *_TEXTS, *_SWITCHES)


def read_service(text: str) -> tuple[str, dict[str, Any]]:
    """The model and the options of MODEL[:key=value,…]; InputError where it is not of that form.

    Example: "qwen2.5-0.5b:gpu_memory_utilization=0.3,max_model_len=4096".
    """
    model, _, options = text.rpartition(":")
    if "=" not in options:
        model, options = text, ""
    if not model:
        raise InputError(
            "a service without a model", where=f"--with {shown(text)}", hint="MODEL[:key=value,…]"
        )
    made: dict[str, Any] = {}
    for part in filter(None, options.split(",")):
        key, _, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if key not in KEYS:
            raise InputError(
                f"unknown option {shown(key)}",
                where=f"--with {shown(text)}",
                hint=did_you_mean(key, KEYS, f"one of {', '.join(KEYS)}"),
            )
        if key in made:
            raise InputError(f"{key} given twice", where=f"--with {shown(text)}", hint="give one of them")
        made[key] = _value(text, key, value.strip())
    return model, made


def _value(text: str, key: str, value: str) -> Any:
    if key in _SWITCHES:
        if value.lower() in ("true", "false"):
            return value.lower() == "true"
    elif key in _TEXTS:
        if value:
            return value
    else:
        try:
            number = _NUMBERS[key](value)
        except ValueError:
            number = -1
        if number > 0 or (key == "gpu_layers" and number == 0):
            return number
    raise InputError(
        f"{shown(value)} is no value of {key}", where=f"--with {shown(text)}", hint="as in max_model_len=4096"
    )


def _read(text: str, question: VramQuestion) -> tuple[VramQuestion, bool]:
    """The question a service is, and whether it states users or a context.

    Without them one request of 4,096 tokens, or of the longest the engine admits, stands for it.
    """
    model, options = read_service(text)
    named = {key: options.pop(key) for key in ("users", "context", "precision", "kv_dtype") if key in options}
    engine = options.pop("engine", question.engine)
    version = options.pop("engine_version", None)
    if version is None and engine == question.engine and question.engine_flags is not None:
        version = question.engine_flags.version
    own = VramQuestion(
        model=model,
        users=named.get("users", 1),
        context=named.get("context", DEFAULT_CONTEXT),
        default_context="context" not in named,
        precision=named.get("precision"),
        kv_dtype=named.get("kv_dtype", "auto"),
        engine=engine,
        engine_flags=EngineFlags(version=version, **options),
        online=question.online,
    )
    return own, "users" in named or "context" in named


def _service(estimate: "VramEstimate", free: int, has_users: bool) -> Service:
    plan = estimate.engine
    if plan is None:
        raise InputError("a service without a plan", where="--with", hint="name an engine")
    starts, reason = plan.starts, plan.reason
    takes = taken_bytes(plan)
    if starts and takes > free:
        starts = None
        reason = f"it takes {format_gib(takes)} with what lies outside its budget, of {format_gib(free)} free"
    fits = estimate.fits if has_users else starts
    if starts is not True and fits:
        fits = starts
    if starts is not False and fits is False:
        reason = reason or "its pool does not hold the users asked for"
    return Service(
        name=estimate.name,
        asked=estimate.question.model or estimate.name,
        plan=plan,
        fits=fits,
        starts=starts,
        free_bytes=free,
        takes_bytes=0 if starts is False else takes,
        reason=reason if starts is not True or fits is not True else None,
        advice=plan.advice,
    )


def taken_bytes(plan: EnginePlan) -> int:
    """What a started engine's process holds of the GPU.

    Example: vLLM 0.9 with 0.4 of an 8 GB card: 3,275 MiB of budget and 303 MiB outside it.
    """
    held = max(0, plan.kv_pool.value)
    for name, size in plan.terms.items():
        if name in _OUTSIDE or (name not in _NOT_HELD and not name.endswith("_outside")):
            held += size
    return held + (int(calibration()["process_bytes"]) if plan.engine in _CONTEXT_BESIDE else 0)


def _advice(
    own: VramQuestion,
    here: Target,
    free: int,
    refused: Service,
    earlier: list[Service],
    answer_on: _AnswerOn,
) -> tuple[Advice, ...]:
    """The largest fraction with which this service starts in what is left; else which one to shrink."""
    plan = refused.plan
    total = plan.terms["total"]
    if plan.engine != "vllm" or not total:
        return plan.advice
    flags = own.engine_flags or EngineFlags()
    others = plan.terms.get("others", 0)
    outside = int(calibration()["process_bytes"])
    # Where a version charges others to the fraction, the fraction counts from zero.
    most = max(0, others + free - outside) * 100 // total
    fraction = min(most, 99) / 100
    if fraction > 0:
        after = answer_on(
            replace(own, engine_flags=replace(flags, gpu_memory_utilization=fraction)), (here,)
        ).engine
        if after is not None and after.starts:
            change = f"{refused.name} then starts with a KV pool of {format_gib(after.kv_pool.value)}"
            return (Advice(change=change, flag=f"--with {own.model}:gpu_memory_utilization={fraction:g}"),)
    largest = max(earlier, key=lambda service: service.takes_bytes)
    held = plan.terms.get("weights", 0) + plan.terms.get("extra", 0)
    return (
        Advice(
            change=f"{largest.name} takes {format_gib(largest.takes_bytes)} and leaves {format_gib(free)}; "
            f"{refused.name} needs {format_gib(held)} for its weights alone"
            if held > free
            else f"{largest.name} takes {format_gib(largest.takes_bytes)} and leaves {format_gib(free)}",
            flag=f"--gpu-memory-utilization of {largest.name}",
        ),
    )
