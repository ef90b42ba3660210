"""What `capplan vram` is asked, and the refusal of what contradicts itself."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from capplan.capacity import MAX_CONTEXT, MAX_USERS
from capplan.errors import InputError
from capplan.specs import Model
from capplan.split import MAX_RANKS

if TYPE_CHECKING:
    from capplan.engines.plan import EngineFlags

DEFAULT_USERS: Final = 16
DEFAULT_CONTEXT: Final = 4096
MAX_SAMPLES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class VramQuestion:
    """What is asked.

    Every one of `users` holds `context` tokens, or `n` samples of `isl` prompt tokens kept once and a part of
    their own up to `context`. `pp_layers` are the layers of each pipeline stage where they are not as the
    engine cuts them, `stage_gpus` the GPUs of the stages where they differ. `services` are further models on
    the same GPU, started after this one (services.py). `profile` is a file measured on one device: its memory
    is what there is.
    """

    model: str | None = None
    params: int | None = None
    kv_from: str | None = None
    precision: str | None = None
    kv_dtype: str = "auto"
    users: int = DEFAULT_USERS
    context: int = DEFAULT_CONTEXT
    default_context: bool = False
    isl: int | None = None
    osl: int | None = None
    n: int = 1
    gpus: tuple[str, ...] = ()
    gpu_memory_bytes: int | None = None
    tp: int = 1
    pp: int = 1
    pp_layers: tuple[int, ...] = ()
    stage_gpus: tuple[str, ...] = ()
    ep: int = 1
    dp: int = 1
    block_size: int = 16
    overhead_bytes: int | None = None
    overhead_fraction: float | None = None
    prefix_shared: int = 0
    lora: tuple[str, ...] = ()
    lora_slots: int | None = None
    draft_model: str | None = None
    online: bool = False
    engine: str | None = None
    engine_flags: "EngineFlags | None" = None
    calibration: str | None = None
    profile: str | None = None
    visible_devices: str | None = None
    services: tuple[str, ...] = ()

    @property
    def prompt(self) -> int:
        """Prompt tokens of a user, of which n samples share the full blocks; 0 where they do not matter."""
        return self.isl or 0 if self.n > 1 else 0

    @property
    def users_per_replica(self) -> int:
        """Users of the data-parallel replica that has most of them."""
        return -(-self.users // self.dp)


_LIMITS: Final = {
    "users": (1, MAX_USERS),
    "context": (1, MAX_CONTEXT),
    "isl": (1, MAX_CONTEXT),
    "osl": (1, MAX_CONTEXT),
    "n": (1, MAX_SAMPLES),
    "tp": (1, MAX_RANKS),
    "pp": (1, MAX_RANKS),
    "ep": (1, MAX_RANKS),
    "dp": (1, MAX_RANKS),
    "block_size": (1, 1 << 20),
    "prefix_shared": (0, MAX_CONTEXT),
}


def checked(question: VramQuestion) -> VramQuestion:
    """The question with its context worked out of prompt and output; InputError where parts contradict."""
    for name, (low, high) in _LIMITS.items():
        value = getattr(question, name)
        if value is not None and not low <= value <= high:
            raise InputError(
                f"{value} is outside {low} to {high:,}",
                where=f"--{name.replace('_', '-')}",
                hint="give a number in that range",
            )
    if (question.model is None) == (question.params is None):
        both = question.model is not None
        raise InputError(
            "both a model and a parameter count" if both else "no model",
            where="--model, --params",
            hint="give one of them: --model 8b, or --params 70b",
        )
    question = _lengths(question)
    if question.prefix_shared > question.context:
        raise InputError(
            f"{question.prefix_shared} shared tokens of {question.context}",
            where="--prefix-shared",
            hint="give at most the context",
        )
    if question.isl is not None and question.prefix_shared > question.isl:
        raise InputError(
            f"{question.prefix_shared} shared tokens of a prompt of {question.isl}",
            where="--prefix-shared, --isl",
            hint="users share a part of their prompts: give at most --isl",
        )
    if question.pp_layers and question.pp == 1:
        raise InputError(
            "layers of stages without stages", where="--pp-layers", hint=f"add --pp {len(question.pp_layers)}"
        )
    _check_stage_gpus(question)
    _check_overhead(question)
    return question


def _lengths(question: VramQuestion) -> VramQuestion:
    """Context = prompt + output; where two of the three are given the third follows."""
    isl, osl = question.isl, question.osl
    if isl is None and osl is None:
        if question.n > 1:
            raise InputError(
                f"{question.n} samples share a prompt whose length is not given",
                where="--n",
                hint="add --isl TOKENS, with --osl or --context",
            )
        return question
    if question.default_context:
        if isl is None or osl is None:
            raise InputError(
                "the other part of the context is not given",
                where="--isl" if isl is not None else "--osl",
                hint="give --isl with --osl, or one of them with --context",
            )
        return replace(question, context=isl + osl, default_context=False)
    if isl is None:
        isl = question.context - (osl or 0)
    if not 1 <= isl <= question.context or (osl is not None and isl + osl != question.context):
        parts = f"{isl} + {osl}" if osl is not None else f"{isl} prompt tokens"
        raise InputError(
            f"{parts} do not make a context of {question.context}",
            where="--isl, --osl, --context",
            hint="the context is prompt and output: give two of the three",
        )
    return replace(question, isl=isl)


def _check_stage_gpus(question: VramQuestion) -> None:
    if not question.stage_gpus:
        return
    if question.gpus or question.gpu_memory_bytes is not None or question.profile is not None:
        raise InputError(
            "GPUs are given twice", where="--stage-gpu, --gpu, --profile", hint="give one of them"
        )
    if question.services:
        raise InputError("services share one GPU", where="--with, --stage-gpu", hint="give one --gpu NAME")
    if len(question.stage_gpus) != question.pp:
        raise InputError(
            f"{len(question.stage_gpus)} GPUs for {question.pp} stages",
            where="--stage-gpu, --pp",
            hint="one --stage-gpu for each stage, in order",
        )
    if question.engine is not None and question.engine.strip().lower() in ("all", *_SHARES_LAYERS):
        raise InputError(
            f"{question.engine} is not planned on unequal GPUs",
            where="--stage-gpu, --engine",
            hint="vllm, sglang or tensorrt-llm",
        )


_SHARES_LAYERS: Final = ("llama.cpp", "llamacpp", "llama-cpp")


def _check_overhead(question: VramQuestion) -> None:
    if question.overhead_bytes is not None and not 0 <= question.overhead_bytes <= 1 << 50:
        raise InputError(f"{question.overhead_bytes} bytes", where="--overhead", hint="give 1.5GB or 15%")
    if question.overhead_fraction is not None and not 0 <= question.overhead_fraction <= 10:
        raise InputError(
            f"{question.overhead_fraction:.3g} times the weights",
            where="--overhead",
            hint="give 1.5GB or 15%",
        )


def fitted(question: VramQuestion, model: Model | None) -> VramQuestion:
    """The question, its context within the model's own and the engine's; only a default one may be cut."""
    flags = question.engine_flags
    longest = flags.max_model_len if flags else None
    if question.default_context and longest is not None and 0 < longest < question.context:
        shared = min(question.prefix_shared, longest)
        question = replace(question, context=longest, prefix_shared=shared)
    limit = model.max_context if model else None
    if model is None or limit is None or question.context <= limit:
        return question
    if question.default_context:
        return replace(question, context=limit, prefix_shared=min(question.prefix_shared, limit))
    raise InputError(
        f"{question.context:,} tokens are more than {model.name} can hold ({limit:,})",
        where="--context" if question.osl is None else "--isl, --osl",
        hint=f"give at most {limit}",
    )
