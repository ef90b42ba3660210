"""Linear attention: a matrix state per head instead of a KV cache."""

from dataclasses import dataclass

from capplan.blocks.state import recurrent_tensor, state_cache, state_mixings
from capplan.specs import Cache, Mixing, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    """Gated delta net (Qwen3-Next, Qwen3.5).

    keys = k_heads·k_width; values = v_heads·v_width; conv = 2·keys + values
    parameters = hidden·(conv + values + 2·v_heads) + conv·kernel + 2·v_heads + v_width + values·hidden
    state = v_heads · k_width · v_width + conv · (kernel − 1)  elements a sequence
    """

    hidden: int
    k_heads: int
    v_heads: int
    k_width: int
    v_width: int
    kernel: int
    fused_inputs: bool = True
    state_bits: int = 16
    conv_bits: int = 16
    path: str = "linear_attn"

    @property
    def kind(self) -> str:
        """Key in BLOCKS."""
        return "gated_delta"

    def tensors(self) -> tuple[Tensor, ...]:
        """Projections (q, k, v, z, b, a), convolution, per-head scalars, gated norm, output."""
        path = self.path
        keys, values = self.k_heads * self.k_width, self.v_heads * self.v_width
        conv = 2 * keys + values
        if self.fused_inputs:
            inputs = [("in_proj_qkvz", conv + values), ("in_proj_ba", 2 * self.v_heads)]
        else:
            inputs = [
                ("in_proj_qkv", conv),
                ("in_proj_z", values),
                ("in_proj_b", self.v_heads),
                ("in_proj_a", self.v_heads),
            ]
        made = [
            recurrent_tensor(f"{path}.{name}", (rows, self.hidden), linear=True, axis=0, units=self.k_heads)
            for name, rows in inputs
        ]
        made += [
            recurrent_tensor(f"{path}.conv1d", (conv, self.kernel), axis=0, units=self.k_heads),
            recurrent_tensor(f"{path}.A_log", (self.v_heads,), axis=0, units=self.v_heads),
            recurrent_tensor(f"{path}.dt_bias", (self.v_heads,), axis=0, units=self.v_heads),
            recurrent_tensor(f"{path}.norm", (self.v_width,), norm=True),
            recurrent_tensor(
                f"{path}.out_proj", (self.hidden, values), linear=True, axis=1, units=self.v_heads
            ),
        ]
        return tuple(made)

    def caches(self) -> tuple[Cache, ...]:
        """The delta-rule state and the convolution's last inputs."""
        conv = 2 * self.k_heads * self.k_width + self.v_heads * self.v_width
        return state_cache(
            self.k_heads,
            (self.v_heads * self.k_width * self.v_width, self.state_bits),
            (conv * (self.kernel - 1), self.conv_bits),
        )

    def mixings(self) -> tuple[Mixing, ...]:
        """The state, read and written each step."""
        return state_mixings(self.caches())


@dataclass(frozen=True, slots=True, kw_only=True)
class Kda:
    """Kimi delta attention: gated delta rule with a decay per channel.

    width = heads · head_width
    parameters = 4·hidden·width + 3·width·kernel + decay (hidden·head_width + head_width·width + width)
               + gate (low-rank like the decay, or hidden·width) + hidden·heads + heads + head_width
    state = heads · head_width² + 3 · width · (kernel − 1)  elements a sequence
    """

    hidden: int
    heads: int
    head_width: int
    kernel: int
    full_gate: bool = False
    state_bits: int = 32
    conv_bits: int = 16
    path: str = "self_attn"

    @property
    def kind(self) -> str:
        """Key in BLOCKS."""
        return "kda"

    def tensors(self) -> tuple[Tensor, ...]:
        """Projections, three convolutions, decay and output gate, norm."""
        path, heads, width = self.path, self.heads, self.heads * self.head_width

        def cut(name: str, shape: tuple[int, ...], axis: int = 0, linear: bool = True) -> Tensor:
            return recurrent_tensor(f"{path}.{name}", shape, linear=linear, axis=axis, units=heads)

        def low_rank(prefix: str) -> list[Tensor]:
            return [
                recurrent_tensor(f"{path}.{prefix}_a_proj", (self.head_width, self.hidden), linear=True),
                cut(f"{prefix}_b_proj", (width, self.head_width)),
            ]

        made = [cut(f"{name}_proj", (width, self.hidden)) for name in "qkv"]
        made += [cut(f"{name}_conv1d", (width, self.kernel), linear=False) for name in "qkv"]
        made += low_rank("f")
        made += [cut("g_proj", (width, self.hidden))] if self.full_gate else low_rank("g")
        made += [
            cut("b_proj", (heads, self.hidden)),
            cut("A_log", (heads,), linear=False),
            cut("dt_bias", (width,), linear=False),
            recurrent_tensor(f"{path}.o_norm", (self.head_width,), norm=True),
            cut("o_proj", (self.hidden, width), 1),
        ]
        return tuple(made)

    def caches(self) -> tuple[Cache, ...]:
        """The delta-rule state and the three convolutions' last inputs."""
        width = self.heads * self.head_width
        return state_cache(
            self.heads,
            (width * self.head_width, self.state_bits),
            (3 * width * (self.kernel - 1), self.conv_bits),
        )

    def mixings(self) -> tuple[Mixing, ...]:
        """The state, read and written each step."""
        return state_mixings(self.caches())


@dataclass(frozen=True, slots=True, kw_only=True)
class Lightning:
    """Lightning (linear) attention of MiniMax-Text-01.

    parameters = hidden·3·width + hidden·width (gate) + width·hidden + width (norm), width = heads·head_width
    state = heads · head_width²  elements a sequence (fp32)
    """

    hidden: int
    heads: int
    head_width: int
    state_bits: int = 32
    path: str = "self_attn"

    @property
    def kind(self) -> str:
        """Key in BLOCKS."""
        return "lightning"

    def tensors(self) -> tuple[Tensor, ...]:
        """Fused q/k/v, output gate, output projection, norm."""
        path, heads, width = self.path, self.heads, self.heads * self.head_width
        return (
            recurrent_tensor(f"{path}.qkv_proj", (3 * width, self.hidden), linear=True, axis=0, units=heads),
            recurrent_tensor(f"{path}.output_gate", (width, self.hidden), linear=True, axis=0, units=heads),
            recurrent_tensor(f"{path}.out_proj", (self.hidden, width), linear=True, axis=1, units=heads),
            recurrent_tensor(f"{path}.norm", (width,), norm=True, axis=0, units=heads),
        )

    def caches(self) -> tuple[Cache, ...]:
        """The k·vᵀ state of every head."""
        return state_cache(self.heads, (self.heads * self.head_width**2, self.state_bits))

    def mixings(self) -> tuple[Mixing, ...]:
        """The state, read and written each step."""
        return state_mixings(self.caches())
