"""How a model is cut over GPUs: tensor, pipeline, expert and data parallel ranks.

GPUs = tp · pp · dp          experts of a stage are shared by tp · dp ranks (replicas that stand alone: tp)
"""

from dataclasses import dataclass
from typing import Final

from capplan.errors import InputError
from capplan.specs import Model, Tensor

MAX_RANKS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A pipeline stage: the layers it holds, of `of`; the first has the embedding, the last the head."""

    layers: range
    of: int

    @property
    def first(self) -> bool:
        """Whether tokens come in here."""
        return self.layers.start == 0

    @property
    def last(self) -> bool:
        """Whether logits come out here."""
        return self.layers.stop == self.of

    def holds(self, tensor: Tensor, *, tied: bool) -> bool:
        """Whether a tensor outside the layers is here; a tied embedding is the head of the last stage too."""
        if tensor.role == "embedding":
            return self.first or (self.last and tied)
        # Norms of embeddings and learned positions go with the embedding.
        return self.first if "embed" in tensor.name else self.last

    def count(self, indices: tuple[int, ...]) -> int:
        """How many of these layers are here."""
        return sum(index in self.layers for index in indices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What one GPU holds: 1 / tp of every layer of its stage (None: all), its part of the experts.

    Experts are shared by `ep` ranks as whole experts, the first ranks holding one more where they do not
    divide, and each expert is cut over `expert_tp`.
    """

    tp: int = 1
    ep: int = 1
    expert_tp: int = 1
    stage: Stage | None = None

    @property
    def whole(self) -> bool:
        """Whether this is the whole model."""
        return self.stage is None and self.tp == self.ep == self.expert_tp == 1

    def cut(self, tensor: Tensor) -> tuple[int, int]:
        """Over how many ranks each copy of a tensor is cut, and how many copies are here."""
        if tensor.role == "experts":
            return self.expert_tp, -(-tensor.copies // self.ep)
        return self.tp, tensor.copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Degrees of parallelism; `stages` are the layers of each pipeline stage, () without stages."""

    tp: int = 1
    ep: int = 1
    dp: int = 1
    stages: tuple[Stage, ...] = ()
    own_replicas: bool = False
    """Whether data-parallel replicas stand alone; else they share the experts."""

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return len(self.stages) or 1

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.tp * self.pp * self.dp

    @property
    def expert_tp(self) -> int:
        """Over how many ranks each expert is cut: what is left of those that share the experts."""
        return self.tp * (1 if self.own_replicas else self.dp) // self.ep

    def ranks(self) -> tuple[Rank, ...]:
        """The fullest rank of each stage."""
        stages: tuple[Stage | None, ...] = self.stages or (None,)
        return tuple(Rank(tp=self.tp, ep=self.ep, expert_tp=self.expert_tp, stage=stage) for stage in stages)

    @property
    def uneven(self) -> bool:
        """Whether stages have different numbers of layers."""
        return len({len(stage.layers) for stage in self.stages}) > 1


def stages_of(sizes: tuple[int, ...]) -> tuple[Stage, ...]:
    """Stages of so many layers each, in order."""
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return tuple(
        Stage(layers=range(end - size, end), of=ends[-1]) for size, end in zip(sizes, ends, strict=True)
    )


def experts_of(model: Model) -> int:
    """Routed experts of a layer, the most of any; 0 for a dense model."""
    tensors = (tensor for group in model.groups for tensor in group.layer.tensors())
    return max((tensor.copies for tensor in tensors if tensor.role == "experts"), default=0)


def check_stages(model: Model, pp: int, sizes: tuple[int, ...]) -> None:
    """Refuse more stages than layers, and sizes that are not all of them."""
    if pp > model.layers:
        raise InputError(
            f"{model.layers} layers cannot be cut into {pp} stages",
            where=f"--pp {pp}, {model.name}",
            hint=f"at most {model.layers} stages",
        )
    if not sizes:
        return
    if len(sizes) != pp or min(sizes) < 1 or sum(sizes) != model.layers:
        raise InputError(
            f"stages of {', '.join(map(str, sizes))} layers are {sum(sizes)} in {len(sizes)} stages",
            where="--pp-layers, --pp",
            hint=f"{model.name} has {model.layers} layers, to share among {pp} stages",
        )


# Which engine cuts what: the whole experts' ranks are all (vllm) or part of the ranks of one replica.
_NO_EXPERT_RANKS: Final = ("tgi", "llama.cpp")
_NO_REPLICAS: Final = ("tensorrt-llm", "tgi", "llama.cpp")
_NO_STAGES: Final = ("tgi",)
_EQUAL_EXPERTS: Final = ("sglang", "tensorrt-llm")


def check_engine(engine: str | None, *, pp: int, ep: int, dp: int) -> None:
    """Refuse degrees of parallelism that an engine does not have."""
    for option, value, engines, hint in (
        ("pp", pp, _NO_STAGES, "it shards by heads only: --tp"),
        ("ep", ep, _NO_EXPERT_RANKS, "leave --ep out: experts are cut like other layers"),
        ("dp", dp, _NO_REPLICAS, "plan one replica, with the users that one gets"),
    ):
        if value > 1 and engine in engines:
            raise InputError(f"{engine} has no --{option}", where=f"--{option} {value}", hint=hint)


def check_experts(model: Model, engine: str | None, *, tp: int, ep: int, dp: int) -> None:
    """Refuse expert ranks that the model or the engine does not allow.

    vLLM divides experts over all tp · dp ranks of a stage or over none, the first ranks holding one more
    where they do not divide; SGLang and TensorRT-LLM over a divisor of tp, in equal parts.
    """
    if ep == 1:
        return
    where = f"--ep {ep}, {model.name}"
    experts = experts_of(model)
    if not experts:
        raise InputError("a dense model has no experts to divide", where=where, hint="leave --ep out")
    if ep > experts:
        raise InputError(
            f"{experts} experts cannot be divided over {ep} ranks", where=where, hint=f"at most {experts}"
        )
    sharing = tp if engine in _EQUAL_EXPERTS else tp * dp
    if engine == "vllm" and ep != sharing:
        raise InputError(
            f"vLLM divides experts over all tp · dp = {tp} · {dp} = {sharing} ranks, not over {ep}",
            where=f"{where}, --tp {tp}, --dp {dp}",
            hint=f"--ep {sharing} (--enable-expert-parallel), or no --ep"
            if sharing > 1
            else "raise --tp or --dp",
        )
    if sharing % ep:
        named = "tp" if engine in _EQUAL_EXPERTS else "tp · dp"
        raise InputError(
            f"{ep} expert ranks do not divide the {sharing} ranks ({named}) that share the experts",
            where=f"{where}, --tp {tp}, --dp {dp}",
            hint="a divisor of " + str(sharing) if sharing > 1 else "raise --tp or --dp",
        )
    if experts % ep and engine in _EQUAL_EXPERTS:
        raise InputError(
            f"{experts} experts cannot be divided equally over {ep} ranks",
            where=where,
            hint=f"{engine} wants equal parts: a divisor of {experts}",
        )
