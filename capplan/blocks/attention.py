"""Attention over stored keys and values: MHA, GQA, MQA, windows, chunks, shared and cross caches."""

from dataclasses import dataclass
from typing import Literal

from capplan.specs import Cache, CacheKind, Mixing, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Scaled-dot-product attention with `heads` query heads over `kv_heads` key/value heads.

        parameters = hidden · heads · k_width · (2 if gate else 1)     queries (and their gate)
                   + hidden · kv_heads · (k_width + v_width)           keys, values
                   + heads · v_width · hidden                          output
                   + biases, q/k norms, sinks

    `input_width` is what q, k and v read where it is not `hidden` (Zamba joins two streams); `qk_norm` is one
    norm over a "head", over the whole "width", or one vector a head ("heads").

    `keeps` says what a sequence leaves behind: every token, the last `window` tokens, the current chunk
    of `window` tokens, the encoder's tokens, or nothing because another layer's cache is read ("shared").
    With `index_heads` (MiniMax-M3) an index branch selects blocks: queries, one key a token that is cached
    at 16 bits, and their norms.
    """

    hidden: int
    heads: int
    kv_heads: int
    k_width: int
    v_width: int
    keeps: Literal["full", "sliding", "chunked", "shared", "cross"] = "full"
    window: int | None = None
    qkv_bias: bool = False
    k_bias: bool = True
    o_bias: bool = False
    qk_norm: str = "none"
    qk_norm_bias: bool = False
    gate: bool = False
    sinks: bool = False
    has_k: bool = True
    has_v: bool = True
    input_width: int | None = None
    index_heads: int = 0
    index_width: int = 0
    path: str = "self_attn"
    extra: tuple[Tensor, ...] = ()

    @property
    def kind(self) -> str:
        """Key in BLOCKS."""
        return "attention"

    def _projection(self, name: str, heads: int, width: int, inputs: int, bias: bool) -> list[Tensor]:
        path = f"{self.path}.{name}"
        made = [
            Tensor(
                name=path,
                role="attention",
                shape=(heads * width, inputs),
                linear=True,
                split_axis=0,
                split_units=heads,
            )
        ]
        if bias:
            made.append(
                Tensor(
                    name=f"{path}.bias",
                    role="attention",
                    shape=(heads * width,),
                    split_axis=0,
                    split_units=heads,
                )
            )
        return made

    def _qk_norms(self) -> list[Tensor]:
        widths = {
            "none": None,
            "head": (self.k_width, self.k_width),
            "width": (self.heads * self.k_width, self.kv_heads * self.k_width),
            "heads": (self.heads * self.k_width, self.kv_heads * self.k_width),
        }[self.qk_norm]
        if widths is None:
            return []
        pairs = [("q_norm", widths[0]), ("k_norm", widths[1])] if self.has_k else [("q_norm", widths[0])]
        copies = 2 if self.qk_norm_bias else 1
        return [
            Tensor(
                name=f"{self.path}.{name}", role="norm", shape=(width,), copies=copies, active_copies=copies
            )
            for name, width in pairs
        ]

    def tensors(self) -> tuple[Tensor, ...]:
        """Projections (q, k, v, o), their biases, q/k norms and sinks."""
        inputs = self.input_width or self.hidden
        q_width = self.k_width * (2 if self.gate else 1)
        made = self._projection("q_proj", self.heads, q_width, inputs, self.qkv_bias)
        if self.has_k:
            k_bias = self.qkv_bias and self.k_bias
            made += self._projection("k_proj", self.kv_heads, self.k_width, inputs, k_bias)
        if self.has_v:
            made += self._projection("v_proj", self.kv_heads, self.v_width, inputs, self.qkv_bias)
        made.append(
            Tensor(
                name=f"{self.path}.o_proj",
                role="attention",
                shape=(self.hidden, self.heads * self.v_width),
                linear=True,
                split_axis=1,
                split_units=self.heads,
            )
        )
        if self.o_bias:
            made.append(Tensor(name=f"{self.path}.o_proj.bias", role="attention", shape=(self.hidden,)))
        if self.sinks:
            made.append(
                Tensor(
                    name=f"{self.path}.sinks",
                    role="attention",
                    shape=(self.heads,),
                    split_axis=0,
                    split_units=self.heads,
                )
            )
        return (*made, *self._qk_norms(), *self._index_branch(), *self.extra)

    def _index_branch(self) -> list[Tensor]:
        if not self.index_heads:
            return []
        width = self.index_width
        shapes = (("index_q_proj", self.index_heads * width), ("index_k_proj", width))
        return [
            Tensor(
                name=f"{self.path}.{name}",
                role="attention",
                shape=(rows, self.hidden),
                linear=True,
            )
            for name, rows in shapes
        ] + [Tensor(name=f"{self.path}.index_{letter}_norm", role="norm", shape=(width,)) for letter in "qk"]

    def caches(self) -> tuple[Cache, ...]:
        """Keys and values of the tokens it keeps; none when it reads another layer's cache."""
        if self.keeps == "shared":
            return ()
        kind: CacheKind = self.keeps
        kept = Cache(
            kind=kind,
            heads=self.kv_heads,
            k_width=self.k_width,
            v_width=self.v_width,
            window=self.window,
        )
        if not self.index_heads:
            return (kept,)
        keys = Cache(kind="indexer", k_width=self.index_width, element_bits=16, splits=False)
        return (kept, keys)

    def mixings(self) -> tuple[Mixing, ...]:
        """Query heads over the kept keys and values; one index key a token where a branch selects blocks."""
        own = Mixing(
            form="attention",
            heads=self.heads,
            kv_heads=self.kv_heads,
            k_width=self.k_width,
            v_width=self.v_width,
            window=self.window,
        )
        if not self.index_heads:
            return (own,)
        scan = Mixing(
            form="scan", heads=self.index_heads, k_width=self.index_width, element_bits=16, splits=False
        )
        return (own, scan)
