"""Mamba mixers: a selective-scan state instead of a KV cache."""

from dataclasses import dataclass

from capplan.blocks.state import recurrent_tensor, state_cache, state_mixings
from capplan.specs import Cache, Mixing, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """Mamba-2 (SSD) mixer.

    inner = heads · head_width;  conv = inner + 2 · groups · state
    parameters = hidden·(inner + conv + heads) + conv·kernel (+ conv) + 3·heads + inner + inner·hidden
               (+ biases of the two projections, each with its own switch)
    state = heads · head_width · state (ssm) + conv · (kernel − 1)  elements a sequence
    """

    hidden: int
    heads: int
    head_width: int
    state: int
    n_groups: int
    kernel: int
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    gated_norm: bool = True
    state_bits: int = 16
    conv_bits: int = 16
    path: str = "mixer"

    @property
    def kind(self) -> str:
        """Key in BLOCKS."""
        return "mamba2"

    @property
    def inner(self) -> int:
        """Inner width."""
        return self.heads * self.head_width

    @property
    def conv(self) -> int:
        """Width of the causal convolution: x, B and C."""
        return self.inner + 2 * self.n_groups * self.state

    def tensors(self) -> tuple[Tensor, ...]:
        """Input and output projections, convolution, per-head scalars, gated norm."""
        path, heads = self.path, self.heads
        rows = self.inner + self.conv + heads
        made = [
            recurrent_tensor(f"{path}.in_proj", (rows, self.hidden), linear=True, axis=0, units=heads),
            recurrent_tensor(f"{path}.conv1d", (self.conv, self.kernel), axis=0, units=heads),
            recurrent_tensor(f"{path}.A_log", (heads,), axis=0, units=heads),
            recurrent_tensor(f"{path}.D", (heads,), axis=0, units=heads),
            recurrent_tensor(f"{path}.dt_bias", (heads,), axis=0, units=heads),
            recurrent_tensor(f"{path}.out_proj", (self.hidden, self.inner), linear=True, axis=1, units=heads),
        ]
        if self.conv_bias:
            made.append(recurrent_tensor(f"{path}.conv1d.bias", (self.conv,), axis=0, units=heads))
        if self.in_bias:
            made.append(recurrent_tensor(f"{path}.in_proj.bias", (rows,), axis=0, units=heads))
        if self.out_bias:
            made.append(recurrent_tensor(f"{path}.out_proj.bias", (self.hidden,)))
        if self.gated_norm:
            made.append(recurrent_tensor(f"{path}.norm", (self.inner,), norm=True, axis=0, units=heads))
        return tuple(made)

    def caches(self) -> tuple[Cache, ...]:
        """The SSM state and the convolution's last inputs."""
        return state_cache(
            self.heads,
            (self.inner * self.state, self.state_bits),
            (self.conv * (self.kernel - 1), self.conv_bits),
        )

    def mixings(self) -> tuple[Mixing, ...]:
        """The state, read and written each step."""
        return state_mixings(self.caches())


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1:
    """Mamba-1 (selective scan) mixer.

    parameters = hidden·2·inner + inner·kernel (+ inner) + inner·(dt_rank + 2·state)
               + dt_rank·inner + inner + inner·state + inner + inner·hidden
    state = inner · state + inner · (kernel − 1)  elements a sequence
    """

    hidden: int
    inner: int
    state: int
    dt_rank: int
    kernel: int
    conv_bias: bool = True
    proj_bias: bool = False
    inner_norms: bool = False
    state_bits: int = 16
    conv_bits: int = 16
    path: str = "mamba"

    @property
    def kind(self) -> str:
        """Key in BLOCKS."""
        return "mamba1"

    def tensors(self) -> tuple[Tensor, ...]:
        """Projections, convolution, scan parameters, Jamba's inner norms."""
        path, inner = self.path, self.inner

        def cut(name: str, shape: tuple[int, ...], axis: int, linear: bool = False) -> Tensor:
            return recurrent_tensor(f"{path}.{name}", shape, linear=linear, axis=axis, units=inner)

        made = [
            cut("in_proj", (2 * inner, self.hidden), 0, linear=True),
            cut("conv1d", (inner, self.kernel), 0),
            cut("x_proj", (self.dt_rank + 2 * self.state, inner), 1, linear=True),
            cut("dt_proj", (inner, self.dt_rank), 0, linear=True),
            cut("dt_proj.bias", (inner,), 0),
            cut("A_log", (inner, self.state), 0),
            cut("D", (inner,), 0),
            cut("out_proj", (self.hidden, inner), 1, linear=True),
        ]
        if self.conv_bias:
            made.append(cut("conv1d.bias", (inner,), 0))
        if self.proj_bias:
            made.append(cut("in_proj.bias", (2 * inner,), 0))
            made.append(recurrent_tensor(f"{path}.out_proj.bias", (self.hidden,)))
        if self.inner_norms:
            for name, width in (("dt", self.dt_rank), ("b", self.state), ("c", self.state)):
                made.append(recurrent_tensor(f"{path}.{name}_layernorm", (width,), norm=True))
        return tuple(made)

    def caches(self) -> tuple[Cache, ...]:
        """The scan state and the convolution's last inputs."""
        return state_cache(
            self.inner,
            (self.inner * self.state, self.state_bits),
            (self.inner * (self.kernel - 1), self.conv_bits),
        )

    def mixings(self) -> tuple[Mixing, ...]:
        """The state, read and written each step."""
        return state_mixings(self.caches())
