"""Dense feed-forward block: gated (three matrices) or plain (two)."""

from dataclasses import dataclass

from capplan.specs import Role, Tensor


def mlp_tensors(
    *,
    path: str,
    role: Role,
    hidden: int,
    ffn: int,
    gated: bool,
    bias: bool = False,
    copies: int = 1,
    active_copies: float = 1,
) -> tuple[Tensor, ...]:
    """The matrices of one MLP, or of `copies` equal ones.

    parameters = copies · (3 if gated else 2) · hidden · ffn   (+ biases)
    """
    made: list[Tensor] = []
    names = ("gate_proj", "up_proj") if gated else ("up_proj",)
    shapes = [(name, (ffn, hidden), 0) for name in names] + [("down_proj", (hidden, ffn), 1)]
    for name, shape, axis in shapes:
        made.append(
            Tensor(
                name=f"{path}.{name}",
                role=role,
                shape=shape,
                linear=True,
                copies=copies,
                active_copies=active_copies,
                split_axis=axis,
                split_units=ffn,
            )
        )
        if bias:
            made.append(
                Tensor(
                    name=f"{path}.{name}.bias",
                    role=role,
                    shape=(shape[0],),
                    copies=copies,
                    active_copies=active_copies,
                    split_axis=0 if axis == 0 else None,
                    split_units=ffn,
                )
            )
    return tuple(made)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ffn:
    """Dense feed-forward block.

    parameters = 3 · hidden · ffn gated (SwiGLU, GeGLU), 2 · hidden · ffn plain; keeps nothing per token.
    """

    hidden: int
    ffn: int
    gated: bool = True
    bias: bool = False
    path: str = "mlp"

    @property
    def kind(self) -> str:
        """Key in BLOCKS."""
        return "ffn"

    def tensors(self) -> tuple[Tensor, ...]:
        """Gate, up and down projections."""
        return mlp_tensors(
            path=self.path,
            role="mlp",
            hidden=self.hidden,
            ffn=self.ffn,
            gated=self.gated,
            bias=self.bias,
        )

    def caches(self) -> tuple[()]:
        """Nothing."""
        return ()

    def mixings(self) -> tuple[()]:
        """Nothing."""
        return ()
