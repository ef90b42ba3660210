"""The domain's nouns: frozen records without behaviour beyond their own arithmetic.

Sizes are bytes, rates are per second, widths are elements. A field that a source does not give is None,
never zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

Role = Literal[
    "embedding",
    "lm_head",
    "attention",
    "recurrent",
    "mlp",
    "experts",
    "shared_experts",
    "router",
    "norm",
    "vision",
    "audio",
    "encoder",
    "projector",
    "mtp",
    "other",
]

BESIDE_THE_DECODER: Final[frozenset[Role]] = frozenset(("vision", "audio", "encoder", "projector", "mtp"))
"""Roles of the parts beside the decoder."""

CacheKind = Literal["full", "sliding", "chunked", "mla", "indexer", "compressed", "state", "cross"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One weight tensor of a block, or `copies` equal ones (experts).

    `shape` is (out, in) for a linear layer, (n,) for a vector. `split_axis` is the axis tensor parallelism
    cuts, in `split_units` pieces that stay whole (heads, columns), after padding the axis to a multiple of
    `split_multiple` (vocabulary); None: every rank holds all of it.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    linear: bool = False
    copies: int = 1
    active_copies: float = 1
    split_axis: int | None = None
    split_units: int = 1
    split_multiple: int = 1
    dtype_bits: int | None = None

    @property
    def elements(self) -> int:
        """Elements of one copy."""
        product = 1
        for width in self.shape:
            product *= width
        return product

    @property
    def parameters(self) -> int:
        """Parameters of all copies."""
        return self.elements * self.copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """What one layer keeps for a sequence.

    Per kept entry: `heads` × (`k_width` + `v_width`) elements; one entry every `stride` tokens, of the last
    `window` tokens where given. A state keeps `state_elements` once a sequence, by element bits.
    `element_bits` fixes the stored width where it does not follow the KV dtype; `entry_extra_bytes` are
    scales stored beside an entry.
    """

    kind: CacheKind
    heads: int = 1
    k_width: int = 0
    v_width: int = 0
    window: int | None = None
    stride: int = 1
    element_bits: int | None = None
    entry_extra_bytes: int = 0
    splits: bool = True
    state_elements: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """What a layer's mixer does with what its sequence kept, beside its projections.

    "attention": every query head reads the kept keys and values of its key/value head. "latent": heads
    read one shared latent (k_width with the rotary part, v_width without); a prompt is worked on expanded,
    each head with its own `prompt_k_width` and `prompt_v_width`. "state": `state_bytes` a sequence are read
    and written each step, and a token costs `state_flop`. "scan": every head reads all kept index keys
    (k_width) to select.

    A query reads one kept entry every `stride` tokens of the last `window`, at most `selected` of them.
    Heads are those of the whole model; ranks share them where `splits`.
    """

    form: Literal["attention", "latent", "state", "scan"]
    heads: int = 1
    kv_heads: int = 1
    k_width: int = 0
    v_width: int = 0
    prompt_k_width: int = 0
    prompt_v_width: int = 0
    window: int | None = None
    stride: int = 1
    selected: int | None = None
    element_bits: int | None = None
    state_bytes: float = 0
    state_flop: float = 0
    splits: bool = True


class Block(Protocol):
    """A transformer block of one kind; the kinds are the classes of `capplan.blocks.BLOCKS`."""

    @property
    def kind(self) -> str:
        """Key in BLOCKS."""
        ...

    def tensors(self) -> tuple[Tensor, ...]:
        """Its weight tensors, named relative to the layer."""
        ...

    def caches(self) -> tuple[Cache, ...]:
        """What it keeps per sequence; empty for a block without memory of the past."""
        ...

    def mixings(self) -> tuple[Mixing, ...]:
        """Its work on what the sequence kept; empty for a block without memory of the past."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One transformer layer: its blocks in order, and its norms."""

    blocks: tuple[Block, ...]
    norms: tuple[Tensor, ...] = ()

    def tensors(self) -> tuple[Tensor, ...]:
        """All weight tensors of the layer."""
        return tuple(tensor for block in self.blocks for tensor in block.tensors()) + self.norms

    def caches(self) -> tuple[Cache, ...]:
        """All caches of the layer."""
        return tuple(cache for block in self.blocks for cache in block.caches())


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Equal layers, with their positions in the stack (positions matter to quantizers' ignore lists)."""

    layer: Layer
    indices: tuple[int, ...]
    prefix: str = "model.layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class MixRule:
    """Which tensors of a mixed file have another type than its base.

    `tensor` is llama.cpp's category (output, token_embd, attn_q, attn_k, attn_v, attn_output, ffn_gate,
    ffn_up, ffn_down). `layers`: all, "more" (llama.cpp's use_more_bits: the first and last eighth and every
    third between), "first n", "first 1/n", "middle 1/n" (without the first and last nth). The others restrict
    it to models with at least so many query heads a KV head, with at least or exactly so many experts, with
    exactly so many layers.
    """

    tensor: str
    stored: "Format"
    layers: str = "all"
    min_gqa: int = 0
    min_experts: int = 0
    experts: int | None = None
    layer_count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How weights are stored.

    `group` weights share one scale of `scale_bits` and one zero point of `zero_bits`. What a group is:
    "input" (along the input dimension), "block" (`block_rows` × `block_cols`), "channel" (an output row),
    "tensor", or "gguf" (`group` weights in `block_bytes` bytes); None: no scales. `rules` make it a mix: the
    first that fits a tensor decides its type (gguf_mix.py). `arithmetic` is what its kernels multiply in.
    """

    id: str
    name: str
    element_bits: float
    group_shape: Literal["input", "block", "channel", "tensor", "gguf"] | None = None
    group: int = 1
    block_rows: int = 1
    block_cols: int = 1
    block_bytes: int = 0
    scale_bits: float = 0
    zero_bits: float = 0
    effective_bits: float = 0
    extra_bytes_per_tensor: int = 0
    activation_bits: int = 16
    arithmetic: Literal["16-bit", "fp8", "int8", "fp4"] = "16-bit"
    quantizes: Literal["linear", "all"] = "all"
    keeps: tuple[str, ...] = ()
    kept_bits: int = 16
    rules: tuple[MixRule, ...] = ()
    kv: bool = False
    aliases: tuple[str, ...] = ()
    source: str = ""
    read_on: str = ""
    notes: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """A checkpoint's own weight formats: the first rule that matches a module's path decides.

    A pattern is a module path or its last part, "re:…" (regular expression from the start of the path) or a
    glob with "*". `keep` names modules that stay at the model's dtype and goes before the rules.
    """

    method: str
    rules: tuple[tuple[tuple[str, ...], Format], ...]
    keep: tuple[str, ...] = ()
    kv_format: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """A part beside the decoder whose weights are loaded too: vision, audio, projector, encoder, MTP."""

    role: Role
    name: str
    tensors: tuple[Tensor, ...]
    caches: tuple[Cache, ...] = ()
    exact: bool = True

    @property
    def parameters(self) -> int:
        """Parameters of the whole tower."""
        return sum(tensor.parameters for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredWeights:
    """What a checkpoint's files hold, read from their headers; sizes in bytes.

    The mappings cover everything stored, parts beside the decoder included; scales count with their
    weight. `by_dtype` has the format's own type names ("BF16", "Q4_K"), the largest first.
    """

    format: Literal["safetensors", "gguf"]
    files: int
    bytes_by_role: Mapping[Role, int]
    parameters_by_role: Mapping[Role, int]
    by_dtype: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """Bytes of all tensors, without headers and padding."""
        return sum(self.bytes_by_role.values())

    @property
    def decoder_parameters(self) -> int:
        """Parameters of the decoder: nothing of towers, encoder or MTP layers."""
        return sum(count for role, count in self.parameters_by_role.items() if role not in BESIDE_THE_DECODER)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Model:
    """A model architecture as its publisher's files describe it.

    `stored` is what its own weight files hold, where they were given; None plans from the architecture.
    `uncounted` names the config keys of parts whose weights are not known: no total that leaves them out can
    promise a fit.
    """

    name: str
    architecture: str
    hidden: int
    vocab: int
    heads: int
    groups: tuple[LayerGroup, ...]
    outside: tuple[Tensor, ...]
    tied: bool
    dtype_bits: int = 16
    max_context: int | None = None
    quantization: Quantization | None = None
    towers: tuple[Tower, ...] = ()
    stored: StoredWeights | None = None
    ignored_keys: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()
    source: str = ""
    read_on: str = ""

    @property
    def layers(self) -> int:
        """Number of layers of the decoder."""
        return sum(len(group.indices) for group in self.groups)

    @property
    def parameters(self) -> int:
        """Unique parameters of the decoder: tied weights once, towers and MTP not counted."""
        if not self.groups and self.stored is not None:
            return self.stored.decoder_parameters
        inside = sum(
            len(group.indices) * sum(tensor.parameters for tensor in group.layer.tensors())
            for group in self.groups
        )
        return inside + sum(tensor.parameters for tensor in self.outside)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Gpu:
    """Facts of one accelerator. Peaks are dense."""

    id: str
    name: str
    vendor: str
    architecture: str
    memory_bytes: int
    memory_driver_bytes: int | None
    memory_bandwidth_bytes_per_s: float
    source: str
    read_on: str
    compute_capability: str | None = None
    memory_type: str | None = None
    memory_reading: str | None = None
    flop_per_s: Mapping[str, float] = field(default_factory=dict)
    l2_bytes: int | None = None
    sm_count: int | None = None
    boost_clock_hz: float | None = None
    tdp_w: float | None = None
    nvlink_bytes_per_s: float | None = None
    pcie_gen: int | None = None
    pcie_lanes: int | None = None
    max_gpus_per_node: int | None = None
    scaleup_domain: int | None = None
    aliases: tuple[str, ...] = ()
    ambiguous_aliases: Mapping[str, str] = field(default_factory=dict)
    unverified: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    notes: str = ""

    @property
    def usable_bytes(self) -> int:
        """Memory a process can ask for at most: what the driver reports, else the size sold in GB."""
        return self.memory_driver_bytes or self.memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Architecture:
    """What a config.json does not say and its model class does (profiles/architectures).

    A switch (`bool | str`) is a fixed answer, or the config key that decides with the answer when it is
    absent after a colon ("attention_bias:false"). `defaults` are the class's own values of keys that
    published files leave out, `nested_defaults` of those that only the text model inside a multimodal
    file leaves out. `rename` maps this family's spelling of a key to the usual one; "outer.key" reaches
    into a nested mapping, whose other keys become "outer.key". An entry of `harmless` is a key, or
    "key=value" where only that value is. `required` names keys without which the kinds of the layers are
    not known ("a|b": either). `stated` names keys whose absence no value stands for, though null may ("a|b":
    either; "a if b": only where b has a value that is not false or zero). Where `plain_expert_width` holds,
    experts are as wide as `intermediate_size` says. `extra` are small tensors no block has: name, role, shape
    (numbers, keys or products "a*b"), copies, `at` which layers (a mixer, a feed-forward, "first", "rest";
    "outside" the layers; every layer when absent), `when` (a switch).
    """

    id: str
    aliases: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    nested_defaults: Mapping[str, object] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    stated: tuple[str, ...] = ()
    extra: tuple[Mapping[str, object], ...] = ()
    mixer: str = "attention"
    mamba1: bool = False
    inner_norms: bool = False
    gated_norm: bool | str = True
    fused_inputs: bool = False
    single_blocks: bool = False
    doubled: bool = False
    latent_cache: bool = True
    shared_blocks: bool = False
    encoder: str = "none"
    chunked: bool = False
    lightning: bool = False
    sliding: str = "config"
    qkv_bias: bool | str = "attention_bias:false"
    k_bias: bool | str = True
    o_bias: bool | str = "attention_bias:false"
    mlp_bias: bool | str = "mlp_bias:false"
    mlp_gated: bool = True
    ffn: bool = True
    ffn_divisor: int = 1
    dense_width: str = ""
    routed: bool = True
    plain_expert_width: bool = False
    qk_norm: str = "none"
    qk_norm_switch: bool | str = True
    qk_norm_bias: bool = False
    attention_gate: str = "none"
    sinks: bool | str = False
    norm: str = "rms"
    layer_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    linear_norms: tuple[str, ...] = ()
    moe_norms: tuple[str, ...] = ()
    parallel: bool | str = False
    final_norm: bool | str = True
    embedding_norm: bool = False
    embedding_rows: int = 0
    tied: bool = False
    learned_positions: int | None = None
    lm_head_bias: bool | str = "lm_head_bias:false"
    router_bias: bool | str = False
    expert_bias: bool | str = False
    shared_bias: bool | str = False
    shared_gate: bool = False
    modalities: int = 1
    dense_beside_moe: bool = False
    mlp_path: str = "mlp"
    moe_path: str = "mlp"
    attention_path: str = "self_attn"
    layer_path: str = "model.layers"
    source: str = ""
    read_on: str = ""


Term = Literal["on-demand", "spot", "1yr", "3yr"]
PriceKind = Literal[
    "instance", "per-gpu", "per-chip", "gpu-only", "capacity-block", "marketplace", "broker", "average"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The hourly price of an instance of `gpu_count` GPUs under one term, as read on a day.

    `dated` says how well the day is known: exact, month, or estimated from the file's window.
    """

    gpu_id: str
    cloud: str
    instance: str
    gpu_count: int
    region: str
    term: Term
    usd_per_hour: float
    read_on: str
    source: str
    kind: PriceKind = "instance"
    dated: str = "exact"
    notes: str = ""

    @property
    def usd_per_gpu_hour(self) -> float:
        """The instance's price over its GPUs."""
        return self.usd_per_hour / self.gpu_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How a replica is spread over GPUs.

    `tp` ranks share each layer, `pp` stages share the layers, `dp` groups of tp ranks hold their own
    sequences (attention and dense layers whole in each) and share the routed experts, of which each of `ep`
    groups holds a part; the experts are cut tp · dp / ep ways inside a group.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.pp * self.dp

    @property
    def moe_tp(self) -> int:
        """Ways each expert is cut."""
        return max(1, self.tp * self.dp // self.ep)
