"""RWKV-4 and RWKV-5: time mixing and channel mixing with a fixed state instead of a KV cache."""

from dataclasses import dataclass

from capplan.blocks.state import state_cache, state_mixings
from capplan.specs import Cache, Mixing, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rwkv:
    """One RWKV-4 or RWKV-5 layer's two mixers.

    time mixing: g·hidden·inner (r, k, v; 5: gate) + inner·hidden + g·hidden + 2·inner (decay, first)
                 (5: + 2·inner, group norm),  g = 4 for version 5, 3 for version 4
    channel mixing: hidden·ffn + ffn·hidden + hidden·hidden + 2·hidden
    state of version 5 = inner · head_width (fp32) + 2 · hidden (last inputs)  elements a sequence
    state of version 4 = 3 · inner (fp32) + 2 · hidden
    """

    hidden: int
    inner: int
    head_width: int
    ffn: int
    version: int = 5

    @property
    def kind(self) -> str:
        """Key in BLOCKS."""
        return "rwkv"

    @property
    def _heads(self) -> int:
        return max(1, self.inner // self.head_width)

    def tensors(self) -> tuple[Tensor, ...]:
        """Matrices and mixing vectors of both mixers."""
        hidden, inner, ffn = self.hidden, self.inner, self.ffn
        heads = self._heads
        names = ("receptance", "key", "value", "gate")[: self.version - 1]
        made = [
            Tensor(
                name=f"attention.{name}",
                role="recurrent",
                shape=(inner, hidden),
                linear=True,
                split_axis=0,
                split_units=heads,
            )
            for name in names
        ]
        made += [
            Tensor(
                name="attention.output",
                role="recurrent",
                shape=(hidden, inner),
                linear=True,
                split_axis=1,
                split_units=heads,
            ),
            Tensor(
                name="attention.time_mix",
                role="recurrent",
                shape=(hidden,),
                copies=len(names),
                active_copies=len(names),
            ),
            Tensor(
                name="attention.time_decay_and_faaaa",
                role="recurrent",
                shape=(inner,),
                copies=2,
                active_copies=2,
            ),
            Tensor(name="feed_forward.key", role="mlp", shape=(ffn, hidden), linear=True),
            Tensor(name="feed_forward.value", role="mlp", shape=(hidden, ffn), linear=True),
            Tensor(name="feed_forward.receptance", role="mlp", shape=(hidden, hidden), linear=True),
            Tensor(
                name="feed_forward.time_mix",
                role="mlp",
                shape=(hidden,),
                copies=2,
                active_copies=2,
            ),
        ]
        if self.version == 5:
            norm = Tensor(name="attention.ln_x", role="norm", shape=(inner,), copies=2, active_copies=2)
            made.append(norm)
        return tuple(made)

    def caches(self) -> tuple[Cache, ...]:
        """The time-mixing state and the last inputs of both mixers."""
        wide = self.head_width if self.version == 5 else 3
        return state_cache(self._heads, (self.inner * wide, 32), (2 * self.hidden, 16))

    def mixings(self) -> tuple[Mixing, ...]:
        """The state, read and written each step."""
        return state_mixings(self.caches())
