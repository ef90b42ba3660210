"""Transformer block kinds. BLOCKS is the one table: kind → class and what it keeps, one line each.

The classes are imported when first asked for: a model has two or three kinds, and a command should not
pay for the others.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from capplan.blocks.attention import Attention as Attention
    from capplan.blocks.compressed import CompressedAttention as CompressedAttention
    from capplan.blocks.convolution import RgLru as RgLru
    from capplan.blocks.convolution import ShortConv as ShortConv
    from capplan.blocks.factored import FactoredAttention as FactoredAttention
    from capplan.blocks.ffn import Ffn as Ffn
    from capplan.blocks.linear_attention import GatedDelta as GatedDelta
    from capplan.blocks.linear_attention import Kda as Kda
    from capplan.blocks.linear_attention import Lightning as Lightning
    from capplan.blocks.mamba import Mamba1 as Mamba1
    from capplan.blocks.mamba import Mamba2 as Mamba2
    from capplan.blocks.mixture_attention import MixtureAttention as MixtureAttention
    from capplan.blocks.mla import Mla as Mla
    from capplan.blocks.moe import Moe as Moe
    from capplan.blocks.reused import Reused as Reused
    from capplan.blocks.rwkv import Rwkv as Rwkv
    from capplan.specs import Block

    BLOCKS: dict[str, type[Block]]

_TABLE: Final = {
    "attention": "attention.Attention",  # every token, a window, a chunk, encoder tokens, or nothing
    "factored": "factored.FactoredAttention",  # every token, few heads
    "mixture_attention": "mixture_attention.MixtureAttention",  # every token
    "mla": "mla.Mla",  # one latent a token
    "compressed": "compressed.CompressedAttention",  # a window, and one latent every few tokens
    "mamba1": "mamba.Mamba1",  # a state
    "mamba2": "mamba.Mamba2",  # a state
    "gated_delta": "linear_attention.GatedDelta",  # a state
    "kda": "linear_attention.Kda",  # a state
    "lightning": "linear_attention.Lightning",  # a state
    "short_conv": "convolution.ShortConv",  # a state
    "rg_lru": "convolution.RgLru",  # a state
    "rwkv": "rwkv.Rwkv",  # a state
    "reused": "reused.Reused",  # what its inner block keeps
    "ffn": "ffn.Ffn",  # nothing
    "moe": "moe.Moe",  # nothing
}
_MODULES: Final = {path.split(".")[1]: path.split(".")[0] for path in _TABLE.values()}


def __getattr__(name: str) -> Any:
    if name == "BLOCKS":
        return {kind: __getattr__(path.split(".")[1]) for kind, path in _TABLE.items()}
    if name not in _MODULES:
        raise AttributeError(f"module 'capplan.blocks' has no attribute {name!r}")
    return getattr(import_module(f"capplan.blocks.{_MODULES[name]}"), name)
