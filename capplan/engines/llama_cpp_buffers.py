"""llama.cpp's buffers: which device holds which layer, and the sizes it prints for models, KV and compute.

    layers on GPUs = the last n of L repeating layers and the output, which counts as one more
    model buffer   = their tensors; the token embedding stays in host memory, a tied one is held twice
    KV buffer      = Σ over layers of cells × heads × (K + V width) × type size, on the layer's device
    state buffer   = sequences × Σ over layers of state elements × 4 B

Sources: llama.cpp src/llama-model.cpp (placement), src/llama-context.cpp (padding, slots),
src/llama-kv-cache-iswa.cpp (sliding windows), src/llama-memory-recurrent.cpp, read 2026-11-29. What was
measured on which builds is in profiles/engines/llama-cpp.yaml.
Not modelled: --split-mode row and tensor, --override-tensor, the compute buffer of latent attention (MLA)
whose keys are expanded for the whole context, the indexer caches of sparse attention.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from capplan.blocks import Attention
from capplan.formulas import memory
from capplan.specs import Cache, Format, Model, Tensor
from capplan.weights import placed_tensors, stored_bytes

PAD: Final = 256
"""Cells of a cache come in multiples of this."""
F32_BYTES: Final = 4
# What the KV types with block scales really take an element: 34 B for 32 (q8_0), 18 B for 32 (q4_0).
_BLOCK_BITS: Final = {8.0: 8.5, 5.0: 5.5, 4.0: 4.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Bytes of a model's tensors as llama.cpp places them."""

    embedding: int
    output: int
    layers: tuple[int, ...]

    @property
    def total(self) -> int:
        """What is loaded in all, a tied embedding held twice."""
        return self.embedding + self.output + sum(self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Layers of each device: `gpus` by device, in order; `output_on` is None where the host has it."""

    host: tuple[int, ...]
    gpus: tuple[tuple[int, ...], ...]
    output_on: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """How the cache is cut: `cells` a stream in `streams` streams, for `sequences` sequences of `tokens`."""

    cells: int
    streams: int
    sequences: int
    tokens: int
    unified: bool

    @property
    def total_cells(self) -> int:
        """Cells of all streams: the n_ctx of the log."""
        return self.cells * self.streams


def cache_context(*, n_ctx: int, sequences: int, unified: bool, pad: int = PAD) -> Context:
    """The cache llama.cpp makes of --ctx-size, --parallel and --kv-unified.

        unified: cells = pad(n_ctx), shared by all sequences
        else:    cells = pad(pad(n_ctx) / sequences) for each

    Example: 4096 for 4 sequences, not unified: 4 streams of 1024 cells.
    """
    padded = -(-n_ctx // pad) * pad
    if unified:
        return Context(cells=padded, streams=1, sequences=sequences, tokens=padded, unified=True)
    cells = -(-(padded // sequences) // pad) * pad
    return Context(cells=cells, streams=sequences, sequences=sequences, tokens=cells, unified=False)


def kv_type_bits(kv_bits: float) -> float:
    """Bits an element of the cache takes; 8 means q8_0 and 4 q4_0, whose scales count."""
    return _BLOCK_BITS.get(float(kv_bits), float(kv_bits))


def place_layers(layers: int, gpu_layers: int, shares: Sequence[float] = (1.0,)) -> Placement:
    """Which device holds which of `layers` repeating layers, for --gpu-layers `gpu_layers`.

        first = max(layers + 1 − n, 0); slot i (the output is slot `layers`) goes to the device in whose part
        of the running shares (i − first) / min(n, layers + 1) falls

    Example: 28 layers: n = 1 is the output alone, 28 leaves layer 0 on the host, 29 takes everything.
    """
    first = max(layers + 1 - gpu_layers, 0)
    active = min(gpu_layers, layers + 1)
    total = sum(shares)
    ends = [sum(shares[: number + 1]) / total for number in range(len(shares))]
    gpus: list[list[int]] = [[] for _ in shares]
    output_on: int | None = None
    for slot in range(first, layers + 1) if active else ():
        part = (slot - first) / active
        device = min(sum(end <= part for end in ends), len(shares) - 1)
        if slot == layers:
            output_on = device
        else:
            gpus[device].append(slot)
    return Placement(
        host=tuple(range(min(first, layers))),
        gpus=tuple(tuple(entry) for entry in gpus),
        output_on=output_on,
    )


def layer_weights(model: Model, *, weights_bytes: int, precision: Format | None = None) -> LayerWeights:
    """What each layer, the output and the token embedding take.

    Exact for a chosen `precision`; by role for a GGUF that was read; else `weights_bytes` (all of the
    decoder) shared out by parameters.
    """
    sized = _chosen_sizes(model, precision) if precision is not None else _equal_sizes(model)
    embedding = sum(size for tensor, _, size in sized if tensor.role == "embedding")
    output = sum(size for tensor, layer, size in sized if layer is None and tensor.role != "embedding")
    layers = [0] * model.layers
    if precision is None and model.stored is not None:
        return _from_stored(model, sized)
    for _, layer, size in sized:
        if layer is not None:
            layers[layer] += size
    if precision is None:
        factor = weights_bytes / (embedding + output + sum(layers))
        embedding = round(embedding * factor)
        output = round(output * factor)
        layers = [round(size * factor) for size in layers]
    if model.tied:
        output += embedding
    return LayerWeights(embedding=embedding, output=output, layers=tuple(layers))


_Sized = list[tuple[Tensor, int | None, int]]
"""Tensors with the layer they are in (None: outside) and their bytes."""


def _chosen_sizes(model: Model, precision: Format) -> _Sized:
    walked = placed_tensors(model)
    if precision.rules:
        from capplan.gguf_mix import mix_tensors  # llama.cpp's mixes only

        types: list[Format | None] = [stored for _, stored, _ in mix_tensors(model, precision)]
    else:
        types = [
            precision
            if precision.quantizes == "all" or (tensor.linear and tensor.role not in precision.keeps)
            else None
            for tensor, _ in walked
        ]
    return [
        # Vectors are 32 bits wide in every GGUF.
        (tensor, layer, tensor.parameters * F32_BYTES)
        if len(tensor.shape) < 2
        else (tensor, layer, stored_bytes(tensor, stored, kept_bits=precision.kept_bits))
        for (tensor, layer), stored in zip(walked, types, strict=True)
    ]


def _equal_sizes(model: Model) -> _Sized:
    return [(tensor, layer, tensor.parameters) for tensor, layer in placed_tensors(model)]


def _from_stored(model: Model, sized: _Sized) -> LayerWeights:
    """A file's own bytes by role, shared among the layers by parameters."""
    assert model.stored is not None
    whole: dict[str, int] = {}
    for tensor, _, size in sized:
        whole[tensor.role] = whole.get(tensor.role, 0) + size
    known = model.stored.bytes_by_role
    rates = {role: known[role] / count for role, count in whole.items() if count and role in known}  # type: ignore[index]
    embedding = output = 0.0
    layers = [0.0] * model.layers
    for tensor, layer, size in sized:
        scaled = size * rates.get(tensor.role, 0.0)
        if tensor.role == "embedding":
            embedding += scaled
        elif layer is None:
            output += scaled
        else:
            layers[layer] += scaled
    if model.tied:
        output += embedding
    return LayerWeights(
        embedding=round(embedding), output=round(output), layers=tuple(round(size) for size in layers)
    )


def layer_cache_bytes(
    model: Model, context: Context, *, kv_bits: float, ubatch: int, swa_full: bool = False, swa_pad: int = PAD
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """KV bytes and state bytes of each layer.

    Sliding and chunked layers keep pad(min(cells, window × (sequences if unified) + ubatch)) cells a stream.
    """
    kv = [0] * model.layers
    state = [0] * model.layers
    bits = kv_type_bits(kv_bits)
    for group in model.groups:
        group_kv = group_state = 0
        for cache in group.layer.caches():
            if cache.kind == "state":
                elements = sum(count for count, _ in cache.state_elements)
                group_state += elements * F32_BYTES * context.sequences
            elif cache.kind != "cross":
                group_kv += _cache_bytes(cache, context, bits, ubatch, swa_full, swa_pad)
        for index in group.indices:
            kv[index] += group_kv
            state[index] += group_state
    return tuple(kv), tuple(state)


def _cache_bytes(
    cache: Cache, context: Context, bits: float, ubatch: int, swa_full: bool, swa_pad: int
) -> int:
    cells = context.cells
    if cache.window is not None and cache.kind in ("sliding", "chunked") and not swa_full:
        window = cache.window * (context.sequences if context.unified else 1)
        cells = -(-min(cells, window + ubatch) // swa_pad) * swa_pad
    entry = memory.kv_entry_bytes(
        heads=cache.heads, k_width=cache.k_width, v_width=cache.v_width, element_bits=bits, extra_bytes=0
    )
    return round(entry * cells * context.streams)


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """What the compute buffer follows: widths of one token's tensors, in elements of 4 B.

    `routed` is what the experts of one token put out together, 0 without experts.
    """

    hidden: int
    ffn: int
    routed: int
    kv: int
    heads: int
    vocab: int
    latent: bool


def widths(model: Model) -> Widths:
    """The widest of each over the layers."""
    ffn = routed = kv = heads = 0
    latent = False
    for group in model.groups:
        for tensor in group.layer.tensors():
            if len(tensor.shape) < 2 or not tensor.name.endswith("up_proj"):
                continue
            if tensor.role == "experts":
                routed = max(routed, model.hidden * math.ceil(tensor.active_copies))
                ffn = max(ffn, tensor.shape[0] * math.ceil(tensor.active_copies))
            else:
                ffn = max(ffn, tensor.shape[0])
        for block in group.layer.blocks:
            if isinstance(block, Attention):
                heads = max(heads, block.heads)
        for cache in group.layer.caches():
            latent |= cache.kind == "mla"
            if cache.kind != "state":
                kv = max(kv, cache.heads * cache.k_width)
    return Widths(
        hidden=model.hidden,
        ffn=ffn,
        routed=routed,
        kv=kv,
        heads=heads or model.heads,
        vocab=model.vocab,
        latent=latent,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRule:
    """How a range of builds lays out its compute buffer; see `compute_bytes`.

    `mask_bytes` is what a mask cell takes on the device and `host_mask_bytes` in host memory, `ffn_copies`
    and `score_hidden` the FFN and hidden tensors alive at once, `all_outputs` whether logits are reserved for
    every token of a batch and not for every sequence, `copies` the batches several devices work on in turn
    (1: they take turns on one batch, and only the device with the output has the buffer).
    """

    flash_attention: bool
    mask_bytes: int
    host_mask_bytes: int
    ffn_copies: int
    score_hidden: int
    all_outputs: bool
    copies: int


def compute_bytes(
    size: Widths,
    rule: ComputeRule,
    *,
    cells: int,
    ubatch: int,
    sequences: int = 1,
    pipelined: bool = False,
    has_output: bool = True,
) -> int:
    """Compute buffer of one device for batches of `ubatch` tokens over a cache of `cells`; bytes.

        mask   = ubatch · cells · mask bytes
        FFN    = ubatch · 4 B · (max(ffn copies · ffn, routed) + 2 · hidden) + mask
        scores = ubatch · 4 B · (heads · cells + score hidden · hidden) + mask   (without flash attention)
        output = outputs · 4 B · vocabulary + ubatch · 4 B · hidden
        buffer = max of them; `pipelined`: + (copies − 1) masks + copies · ubatch · 4 B · hidden

    Example: Llama-3-8B, 8192 cells, 512 tokens, scores 512 MiB + 4 · 8 MiB + mask 16 MiB = 560 MiB.
    """
    if rule.copies == 1 and not has_output:
        return 0
    token = ubatch * F32_BYTES
    mask = ubatch * cells * rule.mask_bytes
    sizes = [token * (max(rule.ffn_copies * size.ffn, size.routed) + 2 * size.hidden) + mask]
    if not rule.flash_attention:
        sizes.append(token * (size.heads * cells + rule.score_hidden * size.hidden) + mask)
    if has_output:
        outputs = ubatch if rule.all_outputs else min(ubatch, sequences)
        sizes.append(outputs * F32_BYTES * size.vocab + token * size.hidden)
    more = (rule.copies - 1) * ubatch * cells * rule.host_mask_bytes + rule.copies * token * size.hidden
    return max(sizes) + (more if pipelined and rule.copies > 1 else 0)


def host_compute_bytes(
    size: Widths, rule: ComputeRule, *, cells: int, ubatch: int, pipelined: bool = False
) -> int:
    """Compute buffer in host memory with all layers on GPUs: embedded tokens, and the mask in each copy."""
    mask = ubatch * cells * rule.host_mask_bytes
    return mask * (rule.copies if pipelined else 1) + ubatch * F32_BYTES * size.hidden
