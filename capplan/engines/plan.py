"""What an engine makes of a GPU's memory: the flags it is asked with, the plan it answers, and which engine.

An engine's module has `plan(model, *, weights_bytes, extra_bytes, total_bytes, gpu, flags) -> EnginePlan`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final, Protocol, cast

from capplan.engines.vllm_kv import KvPlan
from capplan.errors import InputError, did_you_mean, shown
from capplan.specs import Gpu, Model

ENGINES: Final = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt-llm": "tensorrt_llm",
    "tgi": "tgi",
    "llama.cpp": "llama_cpp",
}
"""Engine id → module of this package."""

ALIASES: Final = {"trtllm": "tensorrt-llm", "llama-cpp": "llama.cpp", "llamacpp": "llama.cpp"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """Flags as a user gives them; None: the engine's default for that version and GPU.

    `gpu_memory_utilization` is the engine's own memory fraction, whatever it is called and a share of.
    """

    version: str | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float | None = None
    block_size: int | None = None
    enforce_eager: bool = False
    kv_bits: float = 16
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    gpu_layers: int | None = None
    stage: range | None = None
    """The layers of the pipeline stage planned, of `pp`; None: the widest of vLLM's own stages."""
    draft: Model | None = None
    """The decoder of a draft model (or MTP layers), whose cache holds the same tokens as the model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag as the engine resolves it, and where the value is from: "asked", or which default."""

    name: str
    value: int | float | str | bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Bytes with the P10–P90 they were seen within; low = value = high where the figure is exact."""

    value: int
    low: int
    high: int

    def to_dict(self) -> dict[str, int]:
        """JSON of the band."""
        return {"bytes": self.value, "low_bytes": self.low, "high_bytes": self.high}


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A flag to change, with the numbers after it."""

    change: str
    flag: str

    def to_dict(self) -> dict[str, str]:
        """JSON of the advice."""
        return {"change": self.change, "flag": self.flag}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule the plan uses: the versions it was verified on, and its source."""

    rule: str
    verified: str
    source: str

    def to_dict(self) -> dict[str, str]:
        """JSON of the rule."""
        return {"rule": self.rule, "verified": self.verified, "source": self.source}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnginePlan:
    """What one GPU (the worst rank) holds under an engine; bytes.

    `terms` go by name in the order they are printed: "total" (as the engine sees it), "budget" (what its
    fraction leaves it), then what comes out of the budget: "weights", "extra", "activation", "non_torch",
    "cuda_graphs"…; terms outside the budget end in "_outside". `kv_pool` is what remains for the KV cache.
    `kv_tokens` and `max_concurrency` are as the engine logs them. `starts` None: the band straddles it or
    the KV cache is unknown; `reason` is the engine's own, restated, where it refuses.
    """

    engine: str
    version: str
    flags: tuple[Flag, ...]
    terms: Mapping[str, int]
    kv_pool: Band
    kv_tokens: int | None
    max_concurrency: float | None
    starts: bool | None
    kv: KvPlan | None = None
    reason: str | None = None
    longest_model_len: int | None = None
    safe_max_num_seqs: int | None = None
    advice: tuple[Advice, ...] = ()
    rules: tuple[Rule, ...] = ()
    notes: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    """Figures only this engine has, by name, fit for JSON."""

    def flag(self, name: str) -> Flag:
        """The resolved flag of that name; KeyError where the engine has none."""
        for flag in self.flags:
            if flag.name == name:
                return flag
        raise KeyError(name)

    @property
    def step_sequences(self) -> int | None:
        """Most sequences of one step, whatever the engine calls that; None where it has no such limit."""
        return self._limit("max_num_seqs", "max_running_requests", "max_batch_size", "parallel")

    @property
    def step_tokens(self) -> int | None:
        """Most tokens of one step (or of its prompts)."""
        return self._limit(
            *("max_num_batched_tokens", "chunked_prefill_size", "max_num_tokens"),
            *("max_batch_prefill_tokens", "batch_size"),
        )

    def _limit(self, *names: str) -> int | None:
        for flag in self.flags:
            if flag.name in names and isinstance(flag.value, int | float) and flag.value > 0:
                return int(flag.value)
        return None

    def to_dict(self) -> dict[str, Any]:
        """The JSON block `engine`."""
        return {
            "name": self.engine,
            "version": self.version,
            "starts": self.starts,
            "reason": self.reason,
            "flags": {flag.name: {"value": flag.value, "source": flag.source} for flag in self.flags},
            "terms": dict(self.terms),
            "kv_pool": self.kv_pool.to_dict(),
            "kv_tokens": self.kv_tokens,
            "max_concurrency": self.max_concurrency,
            "longest_model_len": self.longest_model_len,
            "safe_max_num_seqs": self.safe_max_num_seqs,
            "kv_layers": list(self.kv.layers) if self.kv else [],
            "advice": [entry.to_dict() for entry in self.advice],
            "rules": [entry.to_dict() for entry in self.rules],
            "notes": list(self.notes),
            **self.more,
        }


class _Planner(Protocol):
    def __call__(
        self,
        model: Model,
        *,
        weights_bytes: int,
        extra_bytes: int,
        total_bytes: int,
        gpu: Gpu | None,
        flags: EngineFlags,
    ) -> EnginePlan: ...


def engine_id(name: str) -> str:
    """The engine a name means; InputError with the nearest otherwise."""
    lowered = name.strip().lower()
    found = ALIASES.get(lowered, lowered)
    if found not in ENGINES:
        known = (*ENGINES, *ALIASES)
        raise InputError(
            f"unknown engine {shown(name)}",
            where="--engine",
            hint=did_you_mean(name, known, f"one of {', '.join(ENGINES)}"),
        )
    return found


def plan(
    engine: str,
    model: Model,
    *,
    weights_bytes: int,
    extra_bytes: int = 0,
    total_bytes: int,
    gpu: Gpu | None = None,
    flags: EngineFlags,
) -> EnginePlan:
    """What `engine` makes of one GPU's `total_bytes` (as the driver reports them), per rank.

    `weights_bytes` are those of the widest rank; `extra_bytes` is loaded beside the decoder (towers, LoRA
    slots, a draft).
    Errors: InputError for an unknown engine or flags it would not take.
    """
    name = engine_id(engine)
    check_flags(flags)
    try:
        module = import_module(f"capplan.engines.{ENGINES[name]}")
    except ModuleNotFoundError:
        raise InputError(
            f"no memory rules for {name} yet", where="--engine", hint="--engine vllm is known"
        ) from None
    planner = cast(_Planner, module.plan)
    return planner(
        model,
        weights_bytes=weights_bytes,
        extra_bytes=extra_bytes,
        total_bytes=total_bytes,
        gpu=gpu,
        flags=flags,
    )


def check_flags(flags: EngineFlags) -> None:
    """Refuse values that no engine takes; InputError names the flag."""
    fraction = flags.gpu_memory_utilization
    if fraction is not None and not 0 < fraction <= 1:
        raise InputError(
            f"{fraction} is no fraction of the memory",
            where="--gpu-memory-utilization",
            hint="above 0, at most 1, such as 0.9",
        )
    for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size", "tp", "pp"):
        value = getattr(flags, name)
        if value is not None and not 1 <= value <= 1 << 30:
            raise InputError(
                f"{value} is outside 1 to {1 << 30:,}",
                where=f"--{name.replace('_', '-')}",
                hint="give a whole number in that range",
            )
