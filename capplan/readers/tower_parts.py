"""Collects the tensors of a part beside the decoder, and what vision towers have in common."""

from capplan.readers.config_keys import Keys
from capplan.specs import Role, Tensor, Tower

MAX_DEPTH = 1024


class Parts:
    """A tower's tensors by name and shape; one entry stands for equal tensors of all layers."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.made: list[Tensor] = []

    def add(self, name: str, *shape: int, copies: int = 1, axis: int | None = None) -> None:
        """A tensor, `copies` times; `axis` is the one cut over ranks, None where each holds it whole."""
        self.made.append(
            Tensor(
                name=name,
                role=self.role,
                shape=shape,
                copies=copies,
                active_copies=copies,
                split_axis=axis,
                split_units=1 if axis is None else shape[axis],
            )
        )

    def linear(
        self,
        name: str,
        rows: int,
        *cols: int,
        bias: bool = True,
        copies: int = 1,
        axis: int | None = None,
    ) -> None:
        """A linear or convolution weight (rows, *cols) with its bias, which is cut with the rows."""
        self.add(name, rows, *cols, copies=copies, axis=axis)
        if bias:
            self.add(f"{name}.bias", rows, copies=copies, axis=0 if axis == 0 else None)

    def norm(self, name: str, width: int, *, bias: bool, copies: int = 1) -> None:
        """Norms of `width`: weight, and bias where it is a LayerNorm."""
        self.add(name, width, copies=copies * (2 if bias else 1))

    def encoder(
        self,
        layers: int,
        width: int,
        ffn: int,
        *,
        attention_width: int | None = None,
        kv_width: int | None = None,
        attention_bias: bool = True,
        k_bias: bool = True,
        o_bias: bool | None = None,
        gated: bool = False,
        mlp_bias: bool = True,
        norms: int = 2,
        norm_bias: bool = True,
        head_norms: int = 0,
    ) -> None:
        """`layers` equal transformer encoder layers, cut over ranks as a decoder's: heads and FFN columns."""
        inner = attention_width or width
        for name, rows, bias in (
            ("q", inner, attention_bias),
            ("k", kv_width or inner, attention_bias and k_bias),
            ("v", kv_width or inner, attention_bias),
        ):
            self.linear(f"blocks.{name}", rows, width, bias=bias, copies=layers, axis=0)
        o_has_bias = attention_bias if o_bias is None else o_bias
        self.linear("blocks.proj", width, inner, bias=o_has_bias, copies=layers, axis=1)
        if gated:
            self.linear("blocks.gate_proj", ffn, width, bias=mlp_bias, copies=layers, axis=0)
        self.linear("blocks.fc1", ffn, width, bias=mlp_bias, copies=layers, axis=0)
        self.linear("blocks.fc2", width, ffn, bias=mlp_bias, copies=layers, axis=1)
        self.norm("blocks.norms", width, bias=norm_bias, copies=norms * layers)
        if head_norms:
            self.norm("blocks.qk_norms", head_norms, bias=False, copies=2 * layers)

    def tower(self, name: str, *, exact: bool = True) -> Tower:
        """The finished part."""
        return Tower(role=self.role, name=name, tensors=tuple(self.made), exact=exact)


def side(keys: Keys, name: str, default: int | None) -> int:
    """An image or patch side: a number, or a square pair as a list."""
    present = keys.present(name)
    if present is None or not isinstance(keys.value(present), list):
        return keys.integer(name, default=default, high=1 << 16)
    pair = keys.integers(name, low=1, high=1 << 16) or []
    if not pair or len(set(pair)) != 1:
        raise keys.fail(name, f"{pair} is no square", "only square images and patches are read")
    return pair[0]


def patch_inputs(keys: Keys, temporal: int = 1, *, patch: int | None = 14) -> int:
    """Inputs of the patch embedding: channels × patch² × frames.

    `patch` is the class's own side where published files leave it out; None: the file must state it.
    """
    channels = keys.integer("in_channels", "num_channels", "in_chans", default=3, high=64)
    return channels * side(keys, "patch_size", patch) ** 2 * temporal


def patches(keys: Keys, image: int, patch: int) -> int:
    """Patches of one image of the stated size."""
    image, patch = side(keys, "image_size", image), side(keys, "patch_size", patch)
    if patch > image:
        raise keys.fail("patch_size", f"{patch} is larger than the image's {image}", "check the file")
    return (image // patch) ** 2


def depth(keys: Keys, *names: str, default: int | None = None) -> int:
    """Layers of a tower."""
    return keys.integer(*names, default=default, high=MAX_DEPTH)


def ratio_width(keys: Keys, width: int, *, default: float = 4) -> int:
    """Width of the feed-forward: the key, else mlp_ratio times the width."""
    ratio = keys.number("mlp_ratio", default=default) or default
    if not 0 < ratio <= 64:
        raise keys.fail("mlp_ratio", f"{ratio} is absurd", "a small factor, mostly 4")
    return keys.integer("intermediate_size", default=max(1, int(ratio * width)))
