"""What vLLM takes beside weights and KV cache: profiling peak, buffers outside torch, CUDA graphs.

Shapes are those of the profiling run: `max_num_batched_tokens` tokens through the layers, then
`max_num_seqs` rows of logits through the sampler. Fitted numbers are profiles/calibrations/memory-vllm.yaml.
"""

from capplan.blocks.ffn import Ffn
from capplan.blocks.moe import Moe
from capplan.engines.vllm_defaults import Number, calibration, facts, since
from capplan.specs import Model

_ACTIVATION_BYTES = 2
_ROW_BYTES = 4
_STREAMS = 3  # the residual, the layer's input and its output


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


def activation_bytes(
    model: Model, *, tokens: int, sequences: int, tp: int, version: Number, programs: int = 132
) -> int:
    """The profiling peak on one rank.

        max( tokens · 2 B · (3 · hidden + layer width),
             sampler + tokens · 2 B · hidden + experts' buffers )
        sampler = sequences · vocab · s                          sorting: s is fitted
                  sequences · vocab · 14 B + programs · vocab · 4 B   since 0.17

    14 B are 12 B of 32-bit values beside the 16-bit logits; `programs`, the GPU's multiprocessors, each hold
    a row. The experts' buffers stay allocated in those versions. Logits are whole on every rank.
    `sequences` 0 leaves the sampler out, as chunked prefill did before version 0.8.
    Not counted: encoders at their worst input, LoRA, attention workspaces.
    Example: Llama-3.1-8B, 29,000 tokens: 29,000 · 2 · (3 · 4,096 + 3 · 14,336) = 2.99 GiB, as logged.
    """
    dense, experts = layer_width(model, tp)
    layers = tokens * _ACTIVATION_BYTES * (_STREAMS * model.hidden + max(dense, experts))
    if not sequences:
        return layers
    newer = since("sampler_without_sort_since", version)
    per_logit = facts()["sampler_bytes_without_sort"] if newer else calibration()["sampler_bytes_with_sort"]
    sampler = sampler_bytes(model, sequences=sequences, per_logit=per_logit)
    held = model.hidden
    if newer:
        sampler += programs * model.vocab * _ROW_BYTES
        held += experts
    return max(layers, sampler + tokens * _ACTIVATION_BYTES * held)


def sampler_bytes(model: Model, *, sequences: int, per_logit: float) -> int:
    """Logits and what sampling makes of them: sequences · vocab · bytes; whole on every rank."""
    return round(sequences * model.vocab * per_logit)


def non_torch_bytes(tp: int, version: Number) -> int:
    """Memory outside torch's allocator: kernels, and communication buffers with tp > 1."""
    fit = calibration()["non_torch"]
    if tp > 1:
        return int(fit["several_ranks_bytes"])
    newer = since("sampler_without_sort_since", version)
    return int(fit["one_rank_newer_bytes" if newer else "one_rank_bytes"])


def graph_bytes() -> int:
    """CUDA graphs as captured, or estimated from 0.21 on."""
    return int(calibration()["cuda_graph_bytes"])
