"""What vLLM takes beside weights and KV cache: profiling peak, buffers outside torch, CUDA graphs.

Shapes are those of the profiling run: `max_num_batched_tokens` tokens through the layers, then
`max_num_seqs` rows of logits through the sampler. Fitted numbers are profiles/calibrations/memory-vllm.yaml.
"""

import re
from dataclasses import dataclass
from typing import Self

from capplan.blocks.ffn import Ffn
from capplan.blocks.moe import Moe
from capplan.engines.vllm_defaults import Number, calibration, facts, since
from capplan.specs import Gpu, Model
from capplan.units import MIB

_ACTIVATION_BYTES = 2
_ROW_BYTES = 4
_STREAMS = 3  # the residual, the layer's input and its output
_COMPILED_STREAMS = 4  # and the residual before it, an input of the compiled piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What the terms depend on beside the model: one of `tp` ranks, its GPU, what runs on it.

    `processors` and `l2_bytes` are the GPU's (an H100's where it is not known); `recent` is compute
    capability 9.0 or newer, `linked` that and NVLink. `compiles`: torch.compile times kernels at a first
    start; `embeds`: this rank has the embeddings.
    """

    tp: int = 1
    processors: int = 132
    l2_bytes: int = 50 * MIB
    recent: bool = False
    linked: bool = False
    compiles: bool = False
    embeds: bool = True

    @classmethod
    def of(cls, gpu: Gpu | None, *, tp: int, compiles: bool, embeds: bool) -> Self:
        """A rank on `gpu`."""
        if gpu is None:
            return cls(tp=tp, compiles=compiles, embeds=embeds)
        # Of AMD's and Apple's names for theirs none counts.
        numbers = re.fullmatch(r"(\d+)\.\d+", gpu.compute_capability or "", re.ASCII)
        recent = numbers is not None and int(numbers.group(1)) >= 9
        return cls(
            tp=tp,
            processors=gpu.sm_count or 132,
            l2_bytes=gpu.l2_bytes or 50 * MIB,
            recent=recent,
            linked=recent and bool(gpu.nvlink_bytes_per_s),
            compiles=compiles,
            embeds=embeds,
        )


def visible_bytes(driver_bytes: int) -> int:
    """What CUDA calls the total, of what the driver reports.

        driver − what it keeps for itself, fitted on start-up logs

    Example: an H100's 79.65 GiB: 79.18 GiB.
    """
    return max(0, driver_bytes - int(calibration()["driver_keeps_bytes"]))


def layer_width(model: Model, tp: int) -> tuple[int, int]:
    """Elements a token has in flight in the widest feed-forward block on a rank: dense, and experts'.

    Dense: gate, up and their product, 3 · ffn / tp (plain: 2 · ffn / tp). Experts: for each of a token's
    experts the wider of up-projection and hidden, and the product.
    """
    dense = experts = 0
    for group in model.groups:
        for block in group.layer.blocks:
            if isinstance(block, Ffn):
                dense = max(dense, (3 if block.gated else 2) * -(-block.ffn // tp))
            elif isinstance(block, Moe):
                ffn = -(-block.expert_ffn // tp)
                up = (2 if block.gated else 1) * ffn
                width = block.latent or block.hidden
                experts = max(experts, round(block.experts_per_token * (max(up, width) + ffn)))
    return dense, experts


def activation_bytes(model: Model, *, tokens: int, sequences: int, rank: Rank, version: Number) -> int:
    """The profiling peak on one rank.

        max( tokens · 2 B · (n · hidden + layer width),            n = 3; 4 from 0.8, with compiled layers
             sampler + tokens · 2 B · hidden + experts' buffers,
             compilation )
        sampler = sequences · vocab · s                            sorting: s is fitted
                  sequences · (vocab · 14 B + 2 · hidden · 2 B)    since 0.17
                    + processors · vocab · 4 B + cuBLAS's workspace

    14 B are 12 B of 32-bit values beside the 16-bit logits; each multiprocessor holds a row; the states that
    logits are made from are there twice. The experts' buffers stay allocated in those versions. Logits are
    whole on every rank. `sequences` 0 leaves the sampler out, as chunked prefill did before version 0.8.
    Not counted: encoders at their worst input, LoRA, attention workspaces.
    Example: Llama-3.1-8B, 0.6.4, 29,000 tokens: 29,000 · 2 · (3 · 4,096 + 3 · 14,336) = 2.99 GiB, as logged.
    """
    dense, experts = layer_width(model, rank.tp)
    streams = _COMPILED_STREAMS if since("v1_since", version) else _STREAMS
    step = tokens * _ACTIVATION_BYTES
    peak = step * (streams * model.hidden + max(dense, experts))
    peak = max(peak, compilation_bytes(model, tokens=tokens, rank=rank))
    if not sequences:
        return peak
    if not since("sampler_without_sort_since", version):
        per_logit = calibration()["sampler_bytes_with_sort"]
        sampler = sampler_bytes(model, sequences=sequences, per_logit=per_logit)
        return max(peak, sampler + step * model.hidden)
    sampler = sampler_bytes(model, sequences=sequences, per_logit=facts()["sampler_bytes_without_sort"])
    sampler += 2 * sequences * model.hidden * _ACTIVATION_BYTES
    sampler += rank.processors * model.vocab * _ROW_BYTES
    workspace = float(facts()["cublas_workspace_mib"]["recent" if rank.recent else "older"])
    return max(peak, sampler + round(workspace * MIB) + step * (model.hidden + experts))


def compilation_bytes(model: Model, *, tokens: int, rank: Rank) -> int:
    """What torch.compile takes while it times kernels, at a first start; 0 from its cache and where eager.

        vocab / tp · hidden · 2 B + second-level cache + tokens · 2 B · hidden

    The kernel that looks up embeddings is among those timed: its inputs are made up in full size, beside a
    buffer as large as the cache that is cleared between runs, and its output.
    Holds for: text models; others look embeddings up before what is compiled.
    Example: Qwen3-4B on an RTX 4090, 2,048 tokens: 742 + 72 + 10 = 824 MiB, logged as 0.8 GiB; restarted with
    the compiled code at hand the same start logged 0.15 GiB.
    """
    if not (rank.compiles and rank.embeds) or any(tower.role != "mtp" for tower in model.towers):
        return 0
    table = -(-model.vocab // rank.tp) * model.hidden
    return (table + tokens * model.hidden) * _ACTIVATION_BYTES + rank.l2_bytes


def sampler_bytes(model: Model, *, sequences: int, per_logit: float) -> int:
    """Logits and what sampling makes of them: sequences · vocab · bytes; whole on every rank."""
    return round(sequences * model.vocab * per_logit)


def non_torch_bytes(rank: Rank, version: Number) -> int:
    """Memory outside torch's allocator: kernels and their stacks, and communication buffers with tp > 1."""
    fit = calibration()["non_torch"]
    newer = since("profiled_after_capture_since", version)
    if rank.tp > 1:
        return int(
            fit["several_ranks_newer_linked_bytes" if newer and rank.linked else "several_ranks_bytes"]
        )
    size = int(fit["one_rank_recent_bytes" if rank.recent else "one_rank_bytes"])
    return size + (int(fit["more_when_newer_bytes"]) if newer else 0)


def graph_bytes() -> int:
    """CUDA graphs as captured, or estimated from 0.21 on."""
    return int(calibration()["cuda_graph_bytes"])
