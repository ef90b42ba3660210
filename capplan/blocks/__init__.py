"""Transformer block kinds. BLOCKS is the one table: kind → class, what it keeps, in one line."""

from capplan.blocks.attention import Attention
from capplan.blocks.compressed import CompressedAttention
from capplan.blocks.convolution import RgLru, ShortConv
from capplan.blocks.factored import FactoredAttention
from capplan.blocks.ffn import Ffn
from capplan.blocks.linear_attention import GatedDelta, Kda, Lightning
from capplan.blocks.mamba import Mamba1, Mamba2
from capplan.blocks.mixture_attention import MixtureAttention
from capplan.blocks.mla import Mla
from capplan.blocks.moe import Moe
from capplan.blocks.reused import Reused
from capplan.blocks.rwkv import Rwkv
from capplan.specs import Block

__all__ = [
    "BLOCKS",
    "Attention",
    "CompressedAttention",
    "FactoredAttention",
    "Ffn",
    "GatedDelta",
    "Kda",
    "Lightning",
    "Mamba1",
    "Mamba2",
    "MixtureAttention",
    "Mla",
    "Moe",
    "Reused",
    "RgLru",
    "Rwkv",
    "ShortConv",
]

BLOCKS: dict[str, type[Block]] = {
    "attention": Attention,  # every token, a window, a chunk, the encoder's tokens, or nothing
    "factored": FactoredAttention,  # every token, few heads
    "mixture_attention": MixtureAttention,  # every token
    "mla": Mla,  # one latent a token
    "compressed": CompressedAttention,  # a window, and one latent every few tokens
    "mamba1": Mamba1,  # a state
    "mamba2": Mamba2,  # a state
    "gated_delta": GatedDelta,  # a state
    "kda": Kda,  # a state
    "lightning": Lightning,  # a state
    "short_conv": ShortConv,  # a state
    "rg_lru": RgLru,  # a state
    "rwkv": Rwkv,  # a state
    "reused": Reused,  # what its inner block keeps
    "ffn": Ffn,  # nothing
    "moe": Moe,  # nothing
}
