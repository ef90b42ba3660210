"""Mixers that look back over a short convolution: LFM2, and Griffin with a gated recurrence."""

from dataclasses import dataclass

from capplan.blocks.state import recurrent_tensor, state_cache, state_mixings
from capplan.specs import Cache, Mixing, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """Gated short convolution (LFM2).

    parameters = hidden·3·hidden + hidden·kernel + hidden·hidden
    state = hidden · (kernel − 1) elements a sequence (vLLM)
    """

    hidden: int
    kernel: int
    bias: bool = False
    path: str = "conv"

    @property
    def kind(self) -> str:
        """Key in BLOCKS."""
        return "short_conv"

    def tensors(self) -> tuple[Tensor, ...]:
        """Input projection (B, C, x), convolution, output projection."""
        hidden, path = self.hidden, self.path

        def cut(name: str, shape: tuple[int, ...], axis: int = 0, linear: bool = False) -> Tensor:
            return recurrent_tensor(f"{path}.{name}", shape, linear=linear, axis=axis, units=hidden)

        made = [
            cut("in_proj", (3 * hidden, hidden), linear=True),
            cut("conv", (hidden, self.kernel)),
            cut("out_proj", (hidden, hidden), 1, linear=True),
        ]
        if self.bias:
            made += [
                cut("in_proj.bias", (3 * hidden,)),
                cut("conv.bias", (hidden,)),
                recurrent_tensor(f"{path}.out_proj.bias", (hidden,)),
            ]
        return tuple(made)

    def caches(self) -> tuple[Cache, ...]:
        """The convolution's last inputs."""
        return state_cache(self.hidden, (self.hidden * (self.kernel - 1), 16))

    def mixings(self) -> tuple[Mixing, ...]:
        """The state, read and written each step."""
        return state_mixings(self.caches())


@dataclass(frozen=True, slots=True, kw_only=True)
class RgLru:
    """Griffin's recurrent block (RecurrentGemma): a short convolution and a real-gated linear recurrence.

    parameters = 2·(hidden·width + width) + width·hidden + hidden        x, y and output, with biases
               + width·kernel + width                                    convolution
               + 2·(width²/heads + width) + width                        block-diagonal gates, decay
    state = width (fp32) + width · (kernel − 1)  elements a sequence
    """

    hidden: int
    width: int
    heads: int
    kernel: int
    conv_bits: int = 16
    path: str = "temporal_block"

    @property
    def kind(self) -> str:
        """Key in BLOCKS."""
        return "rg_lru"

    def tensors(self) -> tuple[Tensor, ...]:
        """Projections and their biases, convolution, gates of the recurrence."""
        path, width, heads = self.path, self.width, self.heads
        head = width // heads

        def cut(name: str, shape: tuple[int, ...], axis: int = 0, linear: bool = False) -> Tensor:
            return recurrent_tensor(f"{path}.{name}", shape, linear=linear, axis=axis, units=heads)

        made: list[Tensor] = []
        for name in ("linear_x", "linear_y"):
            made += [cut(name, (width, self.hidden), linear=True), cut(f"{name}.bias", (width,))]
        made += [
            cut("linear_out", (self.hidden, width), 1, linear=True),
            recurrent_tensor(f"{path}.linear_out.bias", (self.hidden,)),
            cut("conv_1d", (width, self.kernel)),
            cut("conv_1d.bias", (width,)),
            cut("rg_lru.recurrent_param", (width,)),
        ]
        for name in ("input_gate", "recurrent_gate"):
            made += [
                cut(f"rg_lru.{name}_weight", (heads, head, head)),
                cut(f"rg_lru.{name}_bias", (heads, head)),
            ]
        return tuple(made)

    def caches(self) -> tuple[Cache, ...]:
        """The recurrence's state and the convolution's last inputs."""
        return state_cache(self.heads, (self.width, 32), (self.width * (self.kernel - 1), self.conv_bits))

    def mixings(self) -> tuple[Mixing, ...]:
        """The state, read and written each step."""
        return state_mixings(self.caches())
