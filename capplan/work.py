"""What one engine step computes on one rank: products, attention, experts, collectives, and the small rest.

The shapes follow from the blocks' tensors and mixings; how long each takes is op_costs.py's. Engines fuse the
projections that read the same input (FUSED); a linear layer cut along its input ends in an all-reduce.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from capplan.formulas import roofline
from capplan.specs import Block, Format, LayerGroup, Mixing, Model, Parallelism, Tensor
from capplan.tensor_formats import TensorFormats
from capplan.weights import rank_shape

FUSED: Final = (
    frozenset(("q_proj", "k_proj", "v_proj")),
    frozenset(("gate_proj", "up_proj")),
    frozenset(("q_a_proj", "kv_a_proj_with_mqa")),
    frozenset(("in_proj_qkv", "in_proj_z")),
    frozenset(("in_proj_b", "in_proj_a")),
)
"""Projections of one input that engines run as one product, by the last part of their names."""

Each = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """A product of the step's tokens (or sequences) with an (n, k) weight, `count` times a step."""

    name: str
    n: int
    k: int
    dtype: str
    weight_bits: float
    activation_bits: float = 16
    count: int = 1
    each: Each = "token"

    def load(self, m: float) -> tuple[float, float]:
        """FLOP and least bytes of one product of m rows."""
        moved = roofline.gemm_bytes(
            m=m, n=self.n, k=self.k, weight_bits=self.weight_bits, activation_bits=self.activation_bits
        )
        return roofline.gemm_flop(m=m, n=self.n, k=self.k), moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """One mixing on one rank, `count` layers of it; `kv_bits` an element of what it reads.

    `queries` tokens of a decoding sequence share one read of what it kept.
    """

    name: str
    mixing: Mixing
    kv_bits: float
    count: int = 1
    queries: int = 1

    @property
    def kernel_dtype(self) -> str:
        """Key of the attention kernels that read the cache: see the calibrations' `fit`."""
        return "fp8" if self.kv_bits <= 8 else "bf16"

    def kept(self, contexts: float, sequences: float) -> float:
        """Entries read by one query of each of `sequences`, whose contexts sum to `contexts`."""
        own = self.mixing
        if own.form == "state" or sequences <= 0:
            return 0.0
        mean = contexts / sequences
        if own.window is not None:
            mean = min(mean, own.window)
        mean /= own.stride
        if own.selected is not None:
            mean = min(mean, own.selected)
        return mean * sequences

    def contexts_of(self, kept: float, sequences: float) -> float:
        """Contexts, summed, from which `kept` entries are read, or the most there are; infinite if never."""
        own = self.mixing
        if own.form == "state" or sequences <= 0:
            return math.inf
        mean = kept / sequences
        full = min(own.selected or math.inf, (own.window or math.inf) / own.stride)
        return min(mean, full) * own.stride * sequences

    def kept_array(self, contexts: Any, sequences: float) -> Any:
        """The same for many sums of contexts at once (a numpy array)."""
        import numpy as np

        own = self.mixing
        if own.form == "state":
            return np.zeros(contexts.shape)
        mean = np.minimum(contexts / sequences, own.window or np.inf) / own.stride
        return np.minimum(mean, own.selected or np.inf) * sequences

    def decode_load(self, batch: float, kept: float) -> tuple[float, float]:
        """FLOP and least bytes of `queries` a sequence over `kept` entries in all."""
        own = self.mixing
        if own.form == "state":
            return batch * self.queries * own.state_flop, batch * own.state_bytes
        widths = own.k_width + own.v_width
        heads = own.heads * self.queries
        flop = 2 * kept * heads * widths
        # A latent's value part is a part of its key: read once.
        entry = own.k_width if own.form in ("latent", "scan") else own.kv_heads * widths
        return flop, kept * entry * self.kv_bits / 8 + 2 * batch * heads * widths

    def prefill_load(self, sequences: float, tokens: float, pairs: float) -> tuple[float, float]:
        """FLOP and least bytes of `tokens` new tokens with `pairs` query-key pairs."""
        own = self.mixing
        if own.form == "state":
            return tokens * own.state_flop, sequences * own.state_bytes
        k_width, v_width = own.prompt_k_width or own.k_width, own.prompt_v_width or own.v_width
        flop = 2 * pairs * own.heads * (k_width + v_width)
        return flop, 2 * tokens * own.heads * (k_width + v_width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Routed experts of `count` layers: `inter` and `experts` are the whole layer's, cut by tp and ep."""

    name: str
    hidden: int
    inter: int
    experts: int
    top_k: float
    gated: bool
    dtype: str
    weight_bits: float
    activation_bits: float
    tp: int
    ep: int
    count: int = 1

    def load(self, tokens: float) -> tuple[float, float]:
        """FLOP and least bytes of `tokens` routed tokens on one rank.

        experts touched = E · (1 − (1 − k/E)^tokens)
        """
        matrices, local = 3 if self.gated else 2, self.experts / self.ep
        touched = local * (1 - (1 - min(1.0, self.top_k / self.experts)) ** tokens)
        rows = tokens * self.top_k / self.ep
        one = matrices * self.hidden * self.inter / self.tp
        return 2 * rows * one, touched * one * self.weight_bits / 8 + rows * 2 * self.hidden * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """`count` collectives over `bytes_each` a token (or sequence) among `ranks`."""

    name: str
    op: Literal["all_reduce", "all_gather", "reduce_scatter", "send"]
    bytes_each: float
    ranks: int
    count: int = 1
    each: Each = "token"

    def wire_bytes(self, count: float) -> float:
        """Bytes that must cross one rank's link: 2 (n − 1)/n of the buffer for an all-reduce, else half."""
        share = (self.ranks - 1) / self.ranks * (2 if self.op == "all_reduce" else 1)
        return self.buffer_bytes(count) * share

    def buffer_bytes(self, count: float) -> float:
        """Bytes of the buffer that times go by; a message counts as the all-gather of two such messages."""
        return self.bytes_each * count * (2 if self.op == "send" else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elementwise:
    """`count` kernels that move `bytes_each` a token (or sequence).

    `resident_bytes` is the table such a kernel picks rows of: the bound counts it as read once a step, as the
    headline formula M_weights / bandwidth does.
    """

    name: str
    bytes_each: float
    resident_bytes: float = 0
    count: int = 1
    each: Each = "token"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepWork:
    """Everything one step does on one rank, by kind.

    `queries` are the tokens that a decoding sequence brings to a step: more than one where drafted tokens
    are verified.
    """

    gemms: tuple[Gemm, ...]
    mixes: tuple[Mix, ...]
    experts: tuple[Experts, ...]
    collectives: tuple[Collective, ...]
    elementwise: tuple[Elementwise, ...]
    parallel: Parallelism
    queries: int = 1
    notes: tuple[str, ...] = field(default=())

    @property
    def weight_bytes(self) -> float:
        """Bytes of the dense weights a step reads, experts not counted."""
        return sum(g.n * g.k * g.weight_bits / 8 * g.count for g in self.gemms)


def work_of(
    model: Model, precision: Format | None, *, kv_bits: float, parallel: Parallelism, logits_bits: int = 16
) -> StepWork:
    """The work of one step of `model` on one rank.

    `precision` None: the checkpoint's own formats. A model whose layers are not known has no work: callers
    refuse it.
    """
    made = _Collected(model, precision, kv_bits, parallel)
    for group in model.groups:
        made.group(group)
    made.outside(logits_bits)
    return StepWork(
        gemms=_merged(made.gemms),
        mixes=_merged(made.mixes),
        experts=_merged(made.experts),
        collectives=_merged(made.collectives),
        elementwise=_merged(made.elementwise),
        parallel=parallel,
    )


def verifying(work: StepWork, queries: int) -> StepWork:
    """The same work with `queries` tokens of each decoding sequence in a step: one, and those drafted."""
    mixes = tuple(replace(mix, queries=queries) for mix in work.mixes)
    return replace(work, mixes=mixes, queries=queries)


def _merged(entries: list[Any]) -> tuple[Any, ...]:
    """Equal shapes together, their counts added."""
    found: dict[Any, int] = {}
    for entry in entries:
        key = replace(entry, count=0)
        found[key] = found.get(key, 0) + entry.count
    return tuple(replace(entry, count=count) for entry, count in found.items())


class _Collected:
    """The shapes met so far while a model's layers are walked."""

    def __init__(self, model: Model, precision: Format | None, kv_bits: float, parallel: Parallelism) -> None:
        self.model, self.kv_bits, self.parallel = model, kv_bits, parallel
        self.formats = TensorFormats(model, precision)
        self.gemms: list[Gemm] = []
        self.mixes: list[Mix] = []
        self.experts: list[Experts] = []
        self.collectives: list[Collective] = []
        self.elementwise: list[Elementwise] = []

    def group(self, group: LayerGroup) -> None:
        """All layers of a group; walked one by one only where formats go by position."""
        indices = [(index, 1) for index in group.indices]
        if not self.formats.by_layer:
            indices = [(group.indices[0], len(group.indices))]
        for index, count in indices:
            prefix = f"{group.prefix}.{index}"
            for block in group.layer.blocks:
                self.block(block, prefix, count)
            for norm in group.layer.norms:
                # The residual is added in the same kernel: two reads, two writes of 16 bits.
                self.small("norm", 8 * norm.shape[0], count)

    def block(self, block: Block, prefix: str, count: int) -> None:
        """One block's products, mixing, experts, and the collective it ends with."""
        inner = getattr(block, "inner", block)
        inner = inner if hasattr(inner, "tensors") else block
        tensors = inner.tensors()
        self.products(tensors, prefix, count)
        self.routed(tensors, prefix, count)
        for mixing in inner.mixings():
            self.mixing(mixing, count)
        self.activation(tensors, count)
        self.ending(tensors, count)

    def products(self, tensors: tuple[Tensor, ...], prefix: str, count: int) -> None:
        """The block's linear layers outside its experts, those of one input fused."""
        waiting: dict[tuple[frozenset[str], str, int], Gemm] = {}
        for tensor in tensors:
            if tensor.role == "experts" or len(tensor.shape) != 2:
                continue
            if not tensor.linear and tensor.role != "router":
                continue
            if tensor.name.endswith("kv_b_proj"):
                self.absorbed(tensor, count)
                continue
            gemm = self.gemm(tensor, prefix, count * tensor.copies)
            parent, _, last = tensor.name.rpartition(".")
            fused = next((names for names in FUSED if last in names), None)
            if fused is None:
                self.gemms.append(gemm)
                continue
            key = (fused, f"{parent} {gemm.dtype}", gemm.k)
            known = waiting.get(key)
            waiting[key] = gemm if known is None else replace(known, n=known.n + gemm.n)
        self.gemms += waiting.values()

    def gemm(self, tensor: Tensor, prefix: str, count: int) -> Gemm:
        """One linear layer as a product."""
        stored = self.formats.find(f"{prefix}.{tensor.name}", tensor)
        n, k = rank_shape(tensor, self.parallel.tp)
        return Gemm(
            name=f"{tensor.role}.{tensor.name.rpartition('.')[2]}",
            n=n,
            k=k,
            dtype=kernel_dtype(stored),
            weight_bits=self.formats.bits(tensor, stored),
            activation_bits=stored.activation_bits if stored else 16,
            count=count,
        )

    def absorbed(self, tensor: Tensor, count: int) -> None:
        """MLA's expansion of the latent: in decode two products a head, of 16-bit weights."""
        rows, k = rank_shape(tensor, self.parallel.tp)
        for part in ("k_up", "v_up"):
            self.gemms.append(
                Gemm(name=f"attention.{part}", n=rows // 2, k=k, dtype="bf16", weight_bits=16, count=count)
            )

    def routed(self, tensors: tuple[Tensor, ...], prefix: str, count: int) -> None:
        """The block's routed experts."""
        matrices = [tensor for tensor in tensors if tensor.role == "experts" and len(tensor.shape) == 2]
        matrices = [tensor for tensor in matrices if tensor.linear]
        if not matrices:
            return
        up = next(tensor for tensor in matrices if tensor.split_axis == 0)
        stored = self.formats.find(f"{prefix}.{up.name}", up)
        tp, ep = self.parallel.moe_tp, self.parallel.ep
        self.experts.append(
            Experts(
                name="experts",
                hidden=up.shape[1],
                inter=up.shape[0],
                experts=up.copies,
                top_k=up.active_copies,
                gated=len(matrices) == 3,
                dtype=kernel_dtype(stored),
                weight_bits=self.formats.bits(up, stored),
                activation_bits=stored.activation_bits if stored else 16,
                tp=tp,
                ep=ep,
                count=count,
            )
        )
        # Scores, the choice of experts, and the weighted sum of what they return.
        self.small("routing", up.copies * 8 + 4 * up.shape[1], count)

    def mixing(self, mixing: Mixing, count: int) -> None:
        """One mixing's share on this rank, and the rotary embedding with the cache's write."""
        tp = self.parallel.tp if mixing.splits else 1
        share = -(-mixing.heads // tp) / mixing.heads
        own = replace(
            mixing,
            heads=-(-mixing.heads // tp),
            kv_heads=-(-mixing.kv_heads // tp),
            state_bytes=mixing.state_bytes * share,
            state_flop=mixing.state_flop * share,
        )
        bits = self.kv_bits if mixing.element_bits is None else mixing.element_bits
        self.mixes.append(Mix(name=mixing.form, mixing=own, kv_bits=bits, count=count))
        if mixing.form in ("attention", "latent"):
            self.small("rope and cache", 4 * (own.heads + own.kv_heads) * mixing.k_width, count)

    def activation(self, tensors: tuple[Tensor, ...], count: int) -> None:
        """The feed-forward's activation function: two reads and a write where gated."""
        for tensor in tensors:
            if tensor.name.endswith(("gate_proj", "up_proj")) and tensor.role in ("mlp", "shared_experts"):
                width = rank_shape(tensor, self.parallel.tp)[0]
                gated = any(other.name.endswith("gate_proj") for other in tensors)
                self.small("activation", (6 if gated else 4) * width, count)
                return

    def ending(self, tensors: tuple[Tensor, ...], count: int) -> None:
        """The collective after a block whose last layer is cut along its input."""
        size = 2 * self.model.hidden
        spread = self.parallel.moe_tp * self.parallel.ep
        if any(tensor.role == "experts" for tensor in tensors) and self.parallel.dp > 1:
            # Attention ranks hold their own tokens: experts gather all of them and give sums back.
            for op in ("all_gather", "reduce_scatter"):
                self.collectives.append(
                    Collective(name="experts", op=op, bytes_each=size, ranks=spread, count=count)
                )
            return
        cut = any(tensor.linear and tensor.split_axis == 1 for tensor in tensors)
        if cut and self.parallel.tp > 1:
            self.collectives.append(
                Collective(
                    name="block", op="all_reduce", bytes_each=size, ranks=self.parallel.tp, count=count
                )
            )

    def small(self, name: str, bytes_each: float, count: int, each: Each = "token") -> None:
        """A kernel that only moves data."""
        self.elementwise.append(Elementwise(name=name, bytes_each=bytes_each, count=count, each=each))

    def outside(self, logits_bits: int) -> None:
        """Embedding, head, sampling, and the hand-over between pipeline stages."""
        model, tp = self.model, self.parallel.tp
        head = next((tensor for tensor in model.outside if tensor.role == "lm_head" and tensor.linear), None)
        table = next((tensor for tensor in model.outside if tensor.role == "embedding"), None)
        source = head or table
        if source is not None and len(source.shape) == 2:
            stored = self.formats.find(source.name, source) if head is not None else None
            n, k = rank_shape(source, tp)
            self.gemms.append(
                Gemm(
                    name="lm_head",
                    n=n,
                    k=k,
                    dtype=kernel_dtype(stored),
                    weight_bits=self.formats.bits(source, stored),
                    activation_bits=stored.activation_bits if stored else 16,
                    each="sequence",
                )
            )
        table_bytes = 0.0
        if head is not None and table is not None and len(table.shape) == 2:
            stored = self.formats.find(table.name, table)
            elements = math.prod(rank_shape(table, tp))
            table_bytes = elements * self.formats.bits(table, stored) / 8
        self.elementwise.append(
            Elementwise(name="embedding", bytes_each=4 * model.hidden, resident_bytes=table_bytes)
        )
        # Logits widened to 32 bits, softmax, choice: four passes.
        self.small("sampling", 16 * model.vocab, 1, each="sequence")
        if tp > 1:
            size = 2 * model.hidden
            self.collectives.append(Collective(name="embedding", op="all_reduce", bytes_each=size, ranks=tp))
            self.collectives.append(
                Collective(
                    name="logits",
                    op="all_gather",
                    bytes_each=model.vocab * logits_bits / 8,
                    ranks=tp,
                    each="sequence",
                )
            )
        if self.parallel.pp > 1:
            self.collectives.append(
                Collective(
                    name="stage", op="send", bytes_each=4 * model.hidden, ranks=2, count=self.parallel.pp - 1
                )
            )


def kernel_dtype(stored: Format | None) -> str:
    """Key of the kernels that multiply a format's weights: see the calibrations' `fit`."""
    if stored is None or stored.element_bits >= 16:
        return "bf16"
    if stored.arithmetic == "fp8":
        return "fp8_block" if stored.group_shape == "block" else "fp8"
    if stored.arithmetic == "int8":
        return "int8"
    if stored.arithmetic == "fp4":
        return "nvfp4"
    if stored.element_bits > 4.5:
        return "w8a16"
    if stored.group_shape == "input" and stored.group == 32 and stored.scale_bits == 8:
        return "w4a16_mxfp4"
    return "w4a16"


def kinds(work: StepWork) -> Iterator[Gemm | Mix | Experts | Collective | Elementwise]:
    """Every shape of the step."""
    yield from work.gemms
    yield from work.mixes
    yield from work.experts
    yield from work.collectives
    yield from work.elementwise
