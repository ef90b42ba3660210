"""What one sequence alone needs of a model: the weights a token reads, its work, its past; a prompt's too.

Batch 1 is how llama.cpp and its kin are used. Their kernels differ from a serving engine's, and most of their
devices were never measured kernel by kernel: speed goes by fractions of a device's rates for each backend and
family of weight formats (small_batch_speed.py).
"""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from capplan.kv import KvLayout, kv_layout
from capplan.specs import Format, Gpu, Mixing, Model
from capplan.weights import model_tensors, weight_budget

Platform = Literal["cuda", "rocm", "metal", "vulkan", "sycl", "cpu"]
PLATFORMS: Final[tuple[Platform, ...]] = get_args(Platform)
"""What the kernels are written for."""

Family = Literal["f16", "q8", "q6", "q5", "q4", "q3", "q2", "iq", "legacy", "mxfp4", "fp8", "int8", "int4"]
FAMILIES: Final[tuple[Family, ...]] = get_args(Family)
"""Weight formats whose kernels are alike: 16 bits and up; GGUF's Q8_0, k-quants by bits, i-quants, and blocks
of 32 weights at 4 or 5 bits ("legacy"); MXFP4; other engines' formats by their width."""

GGUF_FAMILIES: Final[tuple[Family, ...]] = FAMILIES[: FAMILIES.index("mxfp4") + 1]
OTHER_FAMILIES: Final[tuple[Family, ...]] = ("f16", "fp8", "int8", "int4")
"""What engines of GGUF files have, and the others."""

_FAMILY_OF_TYPE: Final[tuple[tuple[str, Family], ...]] = (
    ("mxfp4", "mxfp4"),
    ("q8_0", "q8"),
    ("q6_k", "q6"),
    ("q5_k", "q5"),
    ("q4_k", "q4"),
    ("q3_k", "q3"),
    ("q2_k", "q2"),
    ("iq", "iq"),
    ("tq", "iq"),
    ("q4_", "legacy"),
    ("q5_", "legacy"),
)
_PLATFORMS: Final[dict[str, Platform]] = {
    "nvidia": "cuda",
    "amd": "rocm",
    "apple": "metal",
    "intel": "vulkan",
}
# Beside its layers a step takes a row of the embedding, a last norm and the output matrix.
_KERNELS_OUTSIDE: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelReads:
    """What a step reads and computes.

    `token_bytes`: weights that one token reads: of the experts those chosen, of the embedding nothing (a
    row), but all of it where it is the output matrix too. `prompt_bytes`: the same for many tokens, which
    meet every expert. `flop` are those of a token, two for each weight. `kernels` counts the layers' weight
    tensors: each takes part in at least one kernel of its own.
    """

    token_bytes: float
    prompt_bytes: float
    flop: float
    kernels: int
    layers: int
    kv: KvLayout
    mixings: tuple[tuple[int, Mixing], ...]

    def kv_bytes(self, context: float) -> float:
        """What a step reads of its own past: all kept tokens, and the states."""
        return self.kv.sequence_bytes(round(context))

    def attention_flop(self, *, tokens: int, past: int = 0) -> float:
        """Work of a prompt's queries against the past and each other, in FLOP."""
        return sum(count * _mixing_flop(mixing, tokens, past) for count, mixing in self.mixings)


def model_reads(
    model: Model, weights: Format | None, *, file_bytes: float | None = None, kv_bits: float = 16
) -> ModelReads:
    """The reads of a model in a format (None: the checkpoint's own).

    `file_bytes` is the size of the decoder's file where it is known: the roles' shares are then those of the
    format and their sum is the file's.
    """
    budget = weight_budget(model, weights)
    token_shares, prompt_shares, active = _shares(model)
    scale = 1.0 if file_bytes is None else file_bytes / budget.bytes
    return ModelReads(
        token_bytes=scale * sum(role.bytes * token_shares[role.role] for role in budget.roles),
        prompt_bytes=scale * sum(role.bytes * prompt_shares[role.role] for role in budget.roles),
        flop=2 * active,
        kernels=_KERNELS_OUTSIDE
        + sum(
            len(group.indices) * sum(not tensor.name.endswith(".bias") for tensor in group.layer.tensors())
            for group in model.groups
        ),
        layers=model.layers,
        kv=kv_layout(model, kv_bits=kv_bits),
        mixings=tuple(
            (len(group.indices), mixing)
            for group in model.groups
            for block in group.layer.blocks
            for mixing in block.mixings()
        ),
    )


def _shares(model: Model) -> tuple[dict[str, float], dict[str, float], float]:
    """Which part of each role's weights a token reads, which many tokens do, and the weights of a token."""
    held: dict[str, float] = {}
    token: dict[str, float] = {}
    prompt: dict[str, float] = {}
    for _, tensor, layers in model_tensors(model, by_path=False):
        whole = tensor.elements * tensor.copies * layers
        looked_up = tensor.role == "embedding" and not model.tied
        active = tensor.elements * tensor.active_copies * layers if tensor.copies > 1 else whole
        held[tensor.role] = held.get(tensor.role, 0) + whole
        token[tensor.role] = token.get(tensor.role, 0) + (0 if looked_up else active)
        prompt[tensor.role] = prompt.get(tensor.role, 0) + (0 if looked_up else whole)
    return (
        {role: token[role] / held[role] for role in held},
        {role: prompt[role] / held[role] for role in held},
        sum(token.values()),
    )


def _mixing_flop(mixing: Mixing, tokens: int, past: int) -> float:
    """Work of one layer's mixing for `tokens` new tokens after `past` others, causal."""
    if mixing.form == "state":
        return tokens * mixing.state_flop
    window = mixing.window
    if window is None or past + tokens <= window:
        pairs = tokens * past + tokens * (tokens + 1) / 2
    else:
        growing = max(0, window - past)
        pairs = growing * past + growing * (growing + 1) / 2 + (tokens - growing) * window
    pairs /= mixing.stride
    if mixing.selected is not None:
        pairs = min(pairs, tokens * mixing.selected)
    latent = mixing.form == "latent"
    widths = mixing.prompt_k_width + mixing.prompt_v_width if latent else mixing.k_width + mixing.v_width
    return 2 * mixing.heads * widths * pairs


def family_of(weights: Format | None, model: Model) -> Family:
    """The family of kernels that multiply by weights of this format (None: the checkpoint's own)."""
    if weights is None:
        if model.quantization is None or not model.quantization.rules:
            return "f16"
        weights = model.quantization.rules[-1][1]
    name = weights.id.lower()
    if weights.group_shape == "gguf" or weights.rules or name.startswith("mxfp4"):
        return next((family for start, family in _FAMILY_OF_TYPE if name.startswith(start)), "iq")
    if weights.element_bits >= 16:
        return "f16"
    if weights.element_bits > 6:
        return "fp8" if weights.arithmetic == "fp8" else "int8"
    return "int4"


def platform_of(gpu: Gpu) -> Platform:
    """What an accelerator is programmed through where nothing else is said."""
    return _PLATFORMS.get(gpu.vendor, "cpu")


def vector_flop_per_s(gpu: Gpu) -> float | None:
    """Rate of the plain arithmetic that a token's dequantisation runs on; None where no source gives it."""
    return gpu.flop_per_s.get("fp32")


def matrix_flop_per_s(gpu: Gpu) -> float | None:
    """Rate of a prompt's products: at 16 bits, with 16-bit sums where that is faster, or half that at 8 bits.

    Quantised weights are multiplied at 8 bits (llama.cpp's MMQ) or expanded to 16; old cards have but one.
    """
    names = ("fp16_fp16acc", "fp16", "bf16", "fp32")
    wide = max(gpu.flop_per_s.get(name, 0.0) for name in names)
    return max(wide, gpu.flop_per_s.get("int8", 0.0) / 2) or None
