"""A block whose weights another layer holds: it costs time and cache here, not weight memory."""

from dataclasses import dataclass

from capplan.specs import Block, Cache, Mixing


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused:
    """`inner` run again with weights that an earlier layer counts (Zamba's shared transformer block).

    parameters = 0; it reads the weights of `inner` and keeps its own cache.
    """

    inner: Block

    @property
    def kind(self) -> str:
        """Key in BLOCKS."""
        return "reused"

    def tensors(self) -> tuple[()]:
        """Nothing of its own."""
        return ()

    def caches(self) -> tuple[Cache, ...]:
        """The caches of the inner block: every use keeps its own."""
        return self.inner.caches()

    def mixings(self) -> tuple[Mixing, ...]:
        """The work of the inner block."""
        return self.inner.mixings()
