"""Multi-matrix factorization attention (Step-3): low-rank queries over very few key/value heads."""

from dataclasses import dataclass

from capplan.specs import Cache, Mixing, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FactoredAttention:
    """Queries through a shared low rank, one or few key/value heads.

    parameters = hidden·(q_rank + 2·kv_heads·width) + q_rank + q_rank·heads·width + heads·width·hidden
    """

    hidden: int
    heads: int
    kv_heads: int
    width: int
    q_rank: int
    path: str = "self_attn"

    @property
    def kind(self) -> str:
        """Key in BLOCKS."""
        return "factored"

    def tensors(self) -> tuple[Tensor, ...]:
        """Fused low-rank projection (whole on every rank), its norm, queries, output."""
        path, heads, inner = self.path, self.heads, self.heads * self.width
        return (
            Tensor(
                name=f"{path}.qkv_proj",
                role="attention",
                shape=(self.q_rank + 2 * self.kv_heads * self.width, self.hidden),
                linear=True,
            ),
            Tensor(name=f"{path}.inter_norm", role="norm", shape=(self.q_rank,)),
            Tensor(
                name=f"{path}.wq",
                role="attention",
                shape=(inner, self.q_rank),
                linear=True,
                split_axis=0,
                split_units=heads,
            ),
            Tensor(
                name=f"{path}.o_proj",
                role="attention",
                shape=(self.hidden, inner),
                linear=True,
                split_axis=1,
                split_units=heads,
            ),
        )

    def caches(self) -> tuple[Cache, ...]:
        """Keys and values of every token."""
        return (Cache(kind="full", heads=self.kv_heads, k_width=self.width, v_width=self.width),)

    def mixings(self) -> tuple[Mixing, ...]:
        """Query heads over the kept keys and values."""
        return (
            Mixing(
                form="attention",
                heads=self.heads,
                kv_heads=self.kv_heads,
                k_width=self.width,
                v_width=self.width,
            ),
        )
