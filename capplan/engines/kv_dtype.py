"""The KV cache's dtype, and why: asked for, the checkpoint's own, the engine's rule, or 16-bit."""

from typing import Final

from capplan import catalog
from capplan.errors import InputError
from capplan.specs import Format, Model

AUTO: Final = "auto"


def kv_dtype(
    asked: str, model: Model | None, weights: Format | None, *, engine: str | None = None
) -> tuple[Format, str]:
    """The format of the KV cache and where it is from; `weights` None: the checkpoint's own formats.

    "auto" follows the checkpoint's own KV scheme, else 16-bit: never the weights' precision. With `engine`,
    for runs that others measured, an unknown scheme is what that engine's published checkpoints carry.
    Errors: InputError for an unknown format, and one that is for weights alone.
    Example: FP8 weights, no scheme known: bf16; measured under TensorRT-LLM: fp8.
    """
    if asked != AUTO:
        chosen = catalog.weight_format(asked)
        if not chosen.kv:
            raise InputError(
                f"{chosen.id} is a weight format, not a KV cache dtype",
                where="--kv-dtype",
                hint="use bf16, fp16, fp8 or int8",
            )
        return chosen, "asked"
    own = model.quantization if model is not None else None
    if own is not None and own.kv_format is not None:
        return catalog.load_format(own.kv_format), "the checkpoint's own KV scheme"
    if weights is None and own is not None and own.rules:
        weights = own.rules[-1][1]
    # ModelOpt, which makes TensorRT-LLM's checkpoints, quantizes the cache with the weights.
    if engine == "tensorrt-llm" and weights is not None and weights.arithmetic in ("fp8", "fp4"):
        return catalog.load_format("fp8"), "as TensorRT-LLM's FP8 and FP4 checkpoints carry it"
    return catalog.load_format("bf16"), "16-bit by default"
