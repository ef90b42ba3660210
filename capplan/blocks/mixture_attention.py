"""Attention whose query and output projections are experts (JetMoE)."""

from dataclasses import dataclass

from capplan.specs import Cache, Mixing, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureAttention:
    """Mixture of attention heads: every token picks `experts_per_token` of `experts` groups of heads.

        parameters = 2·experts·hidden·kv_heads·width   queries and output of each expert
                   + 2·hidden·kv_heads·width           keys and values, shared by all
                   + experts·hidden + hidden           router, bias

    Keys and values are kept once per token, whatever the number of experts.
    """

    hidden: int
    kv_heads: int
    width: int
    experts: int
    experts_per_token: int
    path: str = "self_attention"

    @property
    def kind(self) -> str:
        """Key in BLOCKS."""
        return "mixture_attention"

    def tensors(self) -> tuple[Tensor, ...]:
        """Expert projections, shared keys and values, router, bias."""
        inner, path = self.kv_heads * self.width, self.path
        experts = [
            Tensor(
                name=f"{path}.experts.*.{name}",
                role="experts",
                shape=shape,
                linear=True,
                copies=self.experts,
                active_copies=self.experts_per_token,
                split_axis=axis,
                split_units=self.kv_heads,
            )
            for name, shape, axis in (
                ("input_linear", (inner, self.hidden), 0),
                ("output_linear", (self.hidden, inner), 1),
            )
        ]
        return (
            *experts,
            Tensor(
                name=f"{path}.kv_proj",
                role="attention",
                shape=(2 * inner, self.hidden),
                linear=True,
                split_axis=0,
                split_units=self.kv_heads,
            ),
            Tensor(name=f"{path}.router", role="router", shape=(self.experts, self.hidden)),
            Tensor(name=f"{path}.experts.bias", role="experts", shape=(self.hidden,)),
        )

    def caches(self) -> tuple[Cache, ...]:
        """Keys and values of every token."""
        return (Cache(kind="full", heads=self.kv_heads, k_width=self.width, v_width=self.width),)

    def mixings(self) -> tuple[Mixing, ...]:
        """The chosen experts' heads over the kept keys and values."""
        return (
            Mixing(
                form="attention",
                heads=self.kv_heads * self.experts_per_token,
                kv_heads=self.kv_heads,
                k_width=self.width,
                v_width=self.width,
            ),
        )
