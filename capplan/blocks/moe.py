"""Mixture of experts: routed experts of which a token uses some, and shared ones it always uses."""

from dataclasses import dataclass

from capplan.blocks.ffn import mlp_tensors
from capplan.specs import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """Routed experts, router, and optional shared experts.

        resident parameters = experts · m · width · expert_ffn + router + shared
        active parameters   = experts_per_token of those experts, everything else whole

    m = 3 gated, 2 plain. `router_rows` counts experts that do nothing too (LongCat's zero experts).
    `latent` routes a projection of the hidden state of that width (two extra matrices); `shared_ffn` is the
    summed width of the shared experts. Memory holds the resident ones; taking the active ones for memory is
    the classic mistake.
    """

    hidden: int
    experts: int
    experts_per_token: float
    expert_ffn: int
    gated: bool = True
    expert_bias: bool = False
    router_bias: bool = False
    shared_ffn: int = 0
    shared_bias: bool = False
    shared_gate: bool = False
    router_rows: int | None = None
    latent: int | None = None
    latent_norm: bool = False
    path: str = "mlp"
    router_name: str = "gate"
    shared_name: str = "shared_experts"
    extra: tuple[Tensor, ...] = ()

    @property
    def kind(self) -> str:
        """Key in BLOCKS."""
        return "moe"

    def tensors(self) -> tuple[Tensor, ...]:
        """Experts as `copies` of one expert, router, shared experts, latent projections."""
        width = self.latent or self.hidden
        made = list(
            mlp_tensors(
                path=f"{self.path}.experts.*",
                role="experts",
                hidden=width,
                ffn=self.expert_ffn,
                gated=self.gated,
                bias=self.expert_bias,
                copies=self.experts,
                active_copies=self.experts_per_token,
            )
        )
        router = f"{self.path}.{self.router_name}"
        rows = self.router_rows or self.experts
        made.append(Tensor(name=router, role="router", shape=(rows, self.hidden)))
        if self.router_bias:
            made.append(Tensor(name=f"{router}.bias", role="router", shape=(rows,)))
        if self.latent:
            for name, shape in (
                ("fc1_latent_proj", (self.latent, self.hidden)),
                ("fc2_latent_proj", (self.hidden, self.latent)),
            ):
                made.append(Tensor(name=f"{self.path}.{name}", role="mlp", shape=shape, linear=True))
            if self.latent_norm:
                made.append(Tensor(name=f"{self.path}.latent_norm", role="norm", shape=(self.latent,)))
        if self.shared_ffn:
            made += mlp_tensors(
                path=f"{self.path}.{self.shared_name}",
                role="shared_experts",
                hidden=self.hidden,
                ffn=self.shared_ffn,
                gated=self.gated,
                bias=self.shared_bias,
            )
        if self.shared_gate:
            made.append(
                Tensor(name=f"{self.path}.shared_expert_gate", role="shared_experts", shape=(1, self.hidden))
            )
        return (*made, *self.extra)

    def caches(self) -> tuple[()]:
        """Nothing."""
        return ()

    def mixings(self) -> tuple[()]:
        """Nothing."""
        return ()
