"""DeepSeek-V4 attention: a short window of latents plus older tokens compressed `ratio` to one."""

from dataclasses import dataclass, replace

from capplan.specs import Cache, Mixing, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttention:
    """Attention over one shared key/value head of `width`, low-rank queries and grouped low-rank output.

        q: hidden·q_rank + q_rank·heads·width;  kv: hidden·width
        o: heads·width·o_rank (in o_groups) + o_groups·o_rank·hidden
        compressor (ratio > 0): 2·f·hidden·width + ratio·f·width, f = 2 with the indexer (overlapping), else 1

    Keeps the last `window` latents of `width`, and one compressed latent every `ratio` tokens; layers with
    ratio 4 also keep one indexer key of `index_width` every `ratio` tokens.
    """

    hidden: int
    heads: int
    width: int
    q_rank: int
    o_groups: int
    o_rank: int
    window: int
    ratio: int
    index_heads: int = 0
    index_width: int = 0
    selected: int | None = None
    path: str = "self_attn"

    @property
    def kind(self) -> str:
        """Key in BLOCKS."""
        return "compressed"

    @property
    def indexed(self) -> bool:
        """Whether this layer selects compressed entries by an indexer."""
        return self.index_heads > 0

    def tensors(self) -> tuple[Tensor, ...]:
        """Projections, norms, sinks, compressor, indexer."""
        path, heads, width = self.path, self.heads, self.width

        def linear(name: str, shape: tuple[int, int], axis: int | None = None, units: int = 1) -> Tensor:
            return Tensor(
                name=f"{path}.{name}",
                role="attention",
                shape=shape,
                linear=True,
                split_axis=axis,
                split_units=units,
            )

        def norm(name: str, size: int) -> Tensor:
            return Tensor(name=f"{path}.{name}", role="norm", shape=(size,))

        made = [
            linear("wq_a", (self.q_rank, self.hidden)),
            norm("q_norm", self.q_rank),
            linear("wq_b", (heads * width, self.q_rank), 0, heads),
            linear("wkv", (width, self.hidden)),
            norm("kv_norm", width),
            linear(
                "wo_a",
                (self.o_groups * self.o_rank, heads * width // self.o_groups),
                0,
                self.o_groups,
            ),
            linear("wo_b", (self.hidden, self.o_groups * self.o_rank), 1, self.o_groups),
            Tensor(
                name=f"{path}.attn_sink",
                role="attention",
                shape=(heads,),
                split_axis=0,
                split_units=heads,
            ),
        ]
        if self.ratio:
            made += self._compressor("compressor", width)
        if self.indexed:
            index = "indexer"
            made += self._compressor(f"{index}.compressor", self.index_width)
            made += [
                linear(f"{index}.wq_b", (self.index_heads * self.index_width, self.q_rank)),
                linear(f"{index}.weights_proj", (self.index_heads, self.hidden)),
            ]
        return tuple(made)

    def _compressor(self, name: str, width: int) -> list[Tensor]:
        overlap = 2 if self.indexed else 1
        path = f"{self.path}.{name}"
        return [
            Tensor(name=f"{path}.ape", role="attention", shape=(self.ratio, overlap * width)),
            Tensor(name=f"{path}.wkv", role="attention", shape=(overlap * width, self.hidden)),
            Tensor(name=f"{path}.wgate", role="attention", shape=(overlap * width, self.hidden)),
            Tensor(name=f"{path}.norm", role="norm", shape=(width,)),
        ]

    def caches(self) -> tuple[Cache, ...]:
        """Window, compressed entries, indexer keys."""
        made = [Cache(kind="sliding", k_width=self.width, window=self.window, splits=False)]
        if self.ratio:
            made.append(Cache(kind="compressed", k_width=self.width, stride=self.ratio, splits=False))
        if self.indexed:
            made.append(
                Cache(
                    kind="indexer",
                    k_width=self.index_width,
                    stride=self.ratio,
                    element_bits=8,
                    entry_extra_bytes=4,
                    splits=False,
                )
            )
        return tuple(made)

    def mixings(self) -> tuple[Mixing, ...]:
        """Heads over the window's latents and over the compressed ones, at most `selected` of those."""
        made = [
            Mixing(
                form="latent",
                heads=self.heads,
                k_width=self.width,
                v_width=self.width,
                prompt_k_width=self.width,
                prompt_v_width=self.width,
                window=self.window,
            )
        ]
        if self.ratio:
            made.append(replace(made[0], window=None, stride=self.ratio, selected=self.selected))
        if self.indexed:
            made.append(
                Mixing(
                    form="scan",
                    heads=self.index_heads,
                    k_width=self.index_width,
                    stride=self.ratio,
                    element_bits=8,
                    splits=False,
                )
            )
        return tuple(made)
