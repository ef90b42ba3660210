"""Multi-head latent attention (DeepSeek V2/V3, Kimi, GLM-5), its sparse indexer, and V4's compressed form."""

from dataclasses import dataclass

from capplan.specs import Cache, Mixing, Tensor


def _linear(name: str, shape: tuple[int, int], axis: int | None = None, units: int = 1) -> Tensor:
    return Tensor(name=name, role="attention", shape=shape, linear=True, split_axis=axis, split_units=units)


def _norm(name: str, width: int, copies: int = 1) -> Tensor:
    return Tensor(name=name, role="norm", shape=(width,), copies=copies, active_copies=copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """Attention through one latent per token: kv_rank + rope_width elements, whole on every rank.

        q: hidden·q_rank + q_rank·heads·(nope+rope)       (or hidden·heads·(nope+rope) without q_rank)
        kv: hidden·(kv_rank + rope) + kv_rank·heads·(nope + v_width);   o: heads·v_width·hidden

    Cache per token: kv_rank + rope elements, not 2 · heads · width. With `index_heads`, a lightning
    indexer adds its own projections and one key of `index_width` per token (fp8 and a 4-byte scale), or per
    `index_pool` tokens (GLM-5 next), beside which the unfinished pool keeps its 16-bit keys and gate scores.
    `selected` is how many entries the indexer leaves a query to read.
    """

    hidden: int
    heads: int
    q_rank: int | None
    kv_rank: int
    nope_width: int
    rope_width: int
    v_width: int
    bias: bool = False
    index_heads: int = 0
    index_width: int = 0
    indexer: bool = False
    latent_cache: bool = True
    index_pool: int | None = None
    selected: int | None = None
    gate: bool = False
    gate_name: str = "g_proj"
    sinks: bool = False
    path: str = "self_attn"

    @property
    def kind(self) -> str:
        """Key in BLOCKS."""
        return "mla"

    def tensors(self) -> tuple[Tensor, ...]:
        """Low-rank q and kv projections, their norms, output, indexer."""
        path, heads = self.path, self.heads
        q_width = self.nope_width + self.rope_width
        made: list[Tensor] = []
        if self.q_rank:
            made += [
                _linear(f"{path}.q_a_proj", (self.q_rank, self.hidden)),
                _norm(f"{path}.q_a_layernorm", self.q_rank),
                _linear(f"{path}.q_b_proj", (heads * q_width, self.q_rank), 0, heads),
            ]
            if self.bias:
                made.append(Tensor(name=f"{path}.q_a_proj.bias", role="attention", shape=(self.q_rank,)))
        else:
            made.append(_linear(f"{path}.q_proj", (heads * q_width, self.hidden), 0, heads))
        made += [
            _linear(f"{path}.kv_a_proj_with_mqa", (self.kv_rank + self.rope_width, self.hidden)),
            _norm(f"{path}.kv_a_layernorm", self.kv_rank),
            _linear(f"{path}.kv_b_proj", (heads * (self.nope_width + self.v_width), self.kv_rank), 0, heads),
            _linear(f"{path}.o_proj", (self.hidden, heads * self.v_width), 1, heads),
        ]
        if self.bias:
            made += [
                Tensor(
                    name=f"{path}.kv_a_proj_with_mqa.bias",
                    role="attention",
                    shape=(self.kv_rank + self.rope_width,),
                ),
                Tensor(name=f"{path}.o_proj.bias", role="attention", shape=(self.hidden,)),
            ]
        if self.gate:
            made.append(_linear(f"{path}.{self.gate_name}", (heads * self.v_width, self.hidden), 0, heads))
        if self.sinks:
            made.append(
                Tensor(
                    name=f"{path}.sinks",
                    role="attention",
                    shape=(heads,),
                    split_axis=0,
                    split_units=heads,
                )
            )
        if self.indexer:
            index = f"{path}.indexer"
            source = self.q_rank or self.hidden
            made += [
                _linear(f"{index}.wq_b", (self.index_heads * self.index_width, source)),
                _linear(f"{index}.wk", (self.index_width, self.hidden)),
                _norm(f"{index}.k_norm", self.index_width, copies=2),  # LayerNorm: weight and bias
                Tensor(
                    name=f"{index}.weights_proj",
                    role="attention",
                    shape=(self.index_heads, self.hidden),
                ),
            ]
            if self.index_pool:
                made += [
                    Tensor(name=f"{index}.kpool_{name}", role="attention", shape=shape)
                    for name, shape in (
                        ("ape", (self.index_pool, self.index_width)),
                        ("gate", (self.index_width, self.hidden)),
                    )
                ]
        return tuple(made)

    def caches(self) -> tuple[Cache, ...]:
        """The latent with its rotary part, and the indexer's key."""
        if not self.latent_cache:
            # Some classes expand the latent and cache whole heads, values padded to the keys' width.
            width = self.nope_width + self.rope_width
            return (Cache(kind="full", heads=self.heads, k_width=width, v_width=width),)
        latent = Cache(kind="mla", k_width=self.kv_rank + self.rope_width, splits=False)
        if not self.indexer:
            return (latent,)
        keys = Cache(
            kind="indexer",
            k_width=self.index_width,
            stride=self.index_pool or 1,
            element_bits=8,
            entry_extra_bytes=4,
            splits=False,
        )
        if not self.index_pool:
            return (latent, keys)
        tail = Cache(
            kind="sliding",
            k_width=self.index_width,
            v_width=self.index_width,
            window=self.index_pool,
            element_bits=16,
            splits=False,
        )
        return (latent, keys, tail)

    def mixings(self) -> tuple[Mixing, ...]:
        """Heads over the latent, absorbed in decode; the indexer's scan where it selects."""
        width = self.nope_width + self.rope_width
        own = Mixing(
            form="latent",
            heads=self.heads,
            k_width=self.kv_rank + self.rope_width,
            v_width=self.kv_rank,
            prompt_k_width=width,
            prompt_v_width=self.v_width,
            selected=self.selected,
        )
        if not self.latent_cache:
            own = Mixing(
                form="attention", heads=self.heads, kv_heads=self.heads, k_width=width, v_width=self.v_width
            )
        if not self.indexer:
            return (own,)
        scan = Mixing(
            form="scan",
            heads=self.index_heads,
            k_width=self.index_width,
            stride=self.index_pool or 1,
            element_bits=8,
            splits=False,
        )
        return (own, scan)
