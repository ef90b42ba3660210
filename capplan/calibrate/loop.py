"""A whole decode step of a dense GQA model on the bundled kernels: random weights, paged KV, greedy sampling.

The model is one of the catalog, cut to some layers. Biases and norms of queries and keys are left out: they
move too few bytes to show. Weights are random and scaled by 1/√K: larger scores make the softmax underflow,
and attention then runs half as fast as it does in a model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from capplan.blocks.attention import Attention
from capplan.blocks.ffn import Ffn
from capplan.calibrate.weights import Matrix, matrix
from capplan.errors import InputError
from capplan.specs import Model

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from capplan.kernels.split_kv import SplitWorkspace

BLOCK_SIZE: Final = 16
CHUNK: Final = 512
EPS: Final = 1e-5
THETA: Final = 500_000.0
MOST_KV_BYTES: Final = 2 << 30
"""Layers share caches beyond this: each is still far larger than any processor's cache."""
STEPS: Final = 8
"""Steps of a run (`advance`) before its sequences start anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopShape:
    """What of a model the step needs."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    layers: int

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The products of a layer, (n, k) each, projections of one input as one."""
        width = self.heads * self.head_dim
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "o": (self.hidden, width),
            "gate_up": (2 * self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
        }

    @property
    def small_bytes(self) -> dict[str, int]:
        """Bytes a token that the small kernels move, as a step's work counts them (work.py)."""
        return {
            "norm": 8 * self.hidden,
            "rope and cache": 4 * (self.heads + self.kv_heads) * self.head_dim,
            "activation": 6 * self.ffn,
            "embedding": 4 * self.hidden,
            "sampling": 16 * self.vocab,
        }

    def kv_bytes(self, tokens: int, element_bytes: int) -> int:
        """Keys and values of one layer."""
        return 2 * tokens * self.kv_heads * self.head_dim * element_bytes


def loop_shape(model: Model, layers: int | None = None) -> LoopShape:
    """The shape of a model of equal dense GQA layers, cut to `layers` of them.

    Raises InputError for any other model: experts, windows, latents, states, plain feed-forwards.
    """
    blocks = [block for group in model.groups for block in group.layer.blocks]
    attentions = [block for block in blocks if isinstance(block, Attention)]
    ffns = [block for block in blocks if isinstance(block, Ffn)]
    plain = len(model.groups) == 1 and len(blocks) == 2 and bool(attentions) and bool(ffns)
    if not plain or attentions[0].keeps != "full" or not ffns[0].gated:
        raise InputError(
            f"{model.name} is no plain dense model: the decode loop has full GQA attention and a gated MLP",
            where="--model",
            hint="profile a Llama, Qwen or Mistral of like size: the GPU's other models use its kernels",
        )
    attention, ffn = attentions[0], ffns[0]
    return LoopShape(
        hidden=attention.hidden,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.k_width,
        ffn=ffn.ffn,
        vocab=model.vocab,
        layers=min(layers or model.layers, model.layers),
    )


def _unwatched(name: str, run: Callable[..., Any], *arguments: Any) -> Any:
    """Just run it."""
    return run(*arguments)


@dataclass(slots=True, kw_only=True)
class Cache:
    """Keys and values of one layer: in blocks that `table` names, and the same tokens side by side."""

    keys: "Tensor"
    values: "Tensor"


class DecodeLoop:
    """A model's weights in one format, and the sequences it is decoding."""

    unwatched = staticmethod(_unwatched)

    def __init__(
        self,
        shape: LoopShape,
        *,
        dtype: str,
        device: "torch.device",
        kv_dtype: str = "bf16",
        seed: int = 0,
        distinct: bool = False,
        head: Matrix | None = None,
    ) -> None:
        """`distinct`: every layer has weights of its own (slow to make), else copies of the first's.

        `head`: another loop's, whose making takes long.
        """
        import torch

        from capplan.kernels.split_k import largest_workspace

        self.shape, self.dtype, self.device, self.kv_dtype = shape, dtype, device, kv_dtype
        self.generator = torch.Generator().manual_seed(seed)
        first = {name: self._matrix(n, k, dtype) for name, (n, k) in shape.linears.items()}
        self.layers = [first]
        for _ in range(shape.layers - 1):
            fresh = {name: self._matrix(*shape.linears[name], dtype) for name in first} if distinct else None
            self.layers.append(fresh or {name: made.copy() for name, made in first.items()})
        self.head = head or self._matrix(shape.vocab, shape.hidden, "bf16")
        # Runs one operation of a step, told its name.
        self.watch: Callable[..., Any] = _unwatched
        rows = torch.randn(min(shape.vocab, 4096), shape.hidden, generator=self.generator)
        self.embedding = rows.to(device, torch.bfloat16)
        self.norm = torch.ones(shape.hidden, dtype=torch.bfloat16, device=device)
        # Scratch of a GPU's kernels, which follow one another: it is zeroed once, not in every launch.
        self.workspace = largest_workspace(self.norm) if device.type == "cuda" else None
        self.splits: SplitWorkspace | None = None

    def _matrix(self, n: int, k: int, dtype: str) -> Matrix:
        return matrix(n=n, k=k, dtype=dtype, device=self.device, generator=self.generator)

    def extend(self, layers: int) -> None:
        """Layers up to this many, copies of the first."""
        while len(self.layers) < layers:
            self.layers.append({name: made.copy() for name, made in self.layers[0].items()})
            self.shape = replace(self.shape, layers=len(self.layers))

    def start(
        self, *, batch: int, context: int, seed: int = 1, room: int = STEPS, cold_bytes: int = 0
    ) -> None:
        """`batch` sequences of `context` tokens, the one being decoded counted; `room` more may follow.

        With `cold_bytes` there are caches of so many bytes in all, however few the layers: for attention that
        is timed by itself and must not find its tokens in the processor's cache.
        """
        import torch

        from capplan.kernels.paged_attention_decode import decode_workspace
        from capplan.kernels.rope import rope_table

        shape = self.shape
        columns = -(-(context + room) // BLOCK_SIZE)
        blocks = batch * columns
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randperm(blocks, generator=generator).to(torch.int32)
        self.table = ids.view(batch, columns).to(self.device)
        stored = torch.float8_e4m3fn if self.kv_dtype == "fp8" else torch.bfloat16
        one = shape.kv_bytes(blocks * BLOCK_SIZE, stored.itemsize)
        sets = max(1, min(shape.layers, MOST_KV_BYTES // max(1, one)), -(-cold_bytes // max(1, one)))
        size = (blocks, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
        first = torch.randn(size, generator=generator)
        first_values = torch.randn(size, generator=generator)
        self.caches = [
            Cache(keys=first.to(self.device, stored), values=first_values.to(self.device, stored))
            for _ in range(sets)
        ]
        self.context = context
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device=self.device)
        self.positions = self.lengths - 1
        self.rope = rope_table(
            positions=columns * BLOCK_SIZE, rotary_dim=shape.head_dim, theta=THETA, like=self.norm
        )
        self.tokens = torch.randint(
            0, self.embedding.shape[0], (batch,), generator=generator, dtype=torch.int32
        ).to(self.device)
        self.longest = context + room
        if self.device.type == "cuda":
            self.splits = decode_workspace(
                batch=batch, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
                longest=self.longest, device=self.norm,
            )  # fmt: skip
        self.prompt = False

    def start_prompt(self, *, tokens: int, seed: int = 1) -> None:
        """One sequence's prompt, to be worked on in a single step."""
        import torch

        self.start(batch=1, context=tokens, seed=seed)
        self.prompt = True
        self.positions = torch.arange(tokens, dtype=torch.int32, device=self.device)
        self.table = self.table.expand(tokens, -1)
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(
            0, self.embedding.shape[0], (tokens,), generator=generator, dtype=torch.int32
        ).to(self.device)

    def contiguous(self) -> list[Cache]:
        """The same tokens without blocks: [batch, tokens, kv_heads, head_dim] for every cache."""

        def gathered(blocks: "Tensor") -> "Tensor":
            return blocks[self.table.long()].flatten(1, 2).contiguous()

        used = self.caches[: len(self.layers)]
        return [Cache(keys=gathered(each.keys), values=gathered(each.values)) for each in used]

    def step(self, *, flat: list[Cache] | None = None) -> "Tensor":
        """One token of every sequence, its keys and values written at `positions`; → the next tokens.

        With `flat` (from `contiguous`) attention reads those instead of the blocks.
        """
        from capplan.kernels.greedy_sampling import greedy_sampling

        h = self.hidden_state(flat=flat)
        made: Tensor = self.watch("sampling", greedy_sampling, self.watch("lm_head", self.head, h))
        return made

    def hidden_state(self, *, flat: list[Cache] | None = None) -> "Tensor":
        """The step up to the last norm: bf16 [batch, hidden]."""
        from capplan.kernels.silu_mul import silu_mul

        run, space = self.watch, self.workspace
        residual = run("embedding", self.embedded)
        h: Tensor = self.normed(residual)
        for number, layer in enumerate(self.layers):
            query = run("rope and cache", self.rotated, run("qkv", layer["qkv"], h, space), number, flat)
            mixed = run("attention", self.attention, query, number, flat)
            h = run("norm", self.normed, run("o", layer["o"], mixed.flatten(1), space), residual)
            acted = run("activation", silu_mul, run("gate_up", layer["gate_up"], h, space))
            h = run("norm", self.normed, run("down", layer["down"], acted, space), residual)
        return h

    def embedded(self) -> "Tensor":
        """The embedding's row of every token."""
        return self.embedding[self.tokens.long()]

    def normed(self, x: "Tensor", residual: "Tensor | None" = None) -> "Tensor":
        """RMS norm of x, or of x + residual, which becomes the residual."""
        from capplan.kernels.rmsnorm import rmsnorm

        made: Tensor = rmsnorm(x, self.norm, eps=EPS, residual=residual)
        return made

    def rotated(self, qkv: "Tensor", number: int, flat: list[Cache] | None = None) -> "Tensor":
        """Queries of a layer; its keys and values are written to the cache."""
        from capplan.kernels.rope import rope
        from capplan.kernels.write_kv import write_kv

        shape = self.shape
        heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
        first, last = shape.heads, shape.heads + shape.kv_heads
        query, key, value = heads[:, :first], heads[:, first:last], heads[:, last:]
        rope(query, key, self.positions, self.rope)
        self.fresh = (key, value)
        if flat is None:
            cache = self.caches[number % len(self.caches)]
            write_kv(key, value, cache.keys, cache.values, self.table, self.positions)
        else:
            cache, at = flat[number % len(flat)], self.positions.long()
            rows = self.rows
            cache.keys[rows, at] = key.to(cache.keys.dtype)
            cache.values[rows, at] = value.to(cache.values.dtype)
        return query

    @property
    def rows(self) -> "Tensor":
        """0 … batch − 1."""
        import torch

        return torch.arange(len(self.positions), device=self.device)

    def attention(self, query: "Tensor", number: int, flat: list[Cache] | None = None) -> "Tensor":
        """Attention of one layer over its cache; of a prompt over itself."""
        from capplan.kernels.paged_attention_decode import paged_attention_decode
        from capplan.kernels.prefill_attention import prefill_attention

        if self.prompt:
            key, value = self.fresh
            mixed: Tensor = prefill_attention(query[None], key[None], value[None])[0]
            return mixed
        if flat is not None:
            cache = flat[number % len(flat)]
            return contiguous_attention(query, cache, self.lengths)
        cache = self.caches[number % len(self.caches)]
        made: Tensor = paged_attention_decode(
            query,
            cache.keys,
            cache.values,
            self.table,
            self.lengths,
            max_context=self.longest,
            workspace=self.splits,
        )
        return made

    def at(self, context: int) -> None:
        """Go to where the sequences are `context` tokens long, the one being decoded counted."""
        self.lengths.fill_(context)
        self.positions.fill_(context - 1)

    def fed(self, *, flat: list[Cache] | None = None) -> "Tensor":
        """A step whose tokens the next one takes; → the tokens. In place, nothing waits for the device."""
        made = self.step(flat=flat)
        self.tokens.copy_(made % self.embedding.shape[0])
        self.positions.add_(1)
        self.lengths.add_(1)
        return made

    def advance(self, number: int, *, flat: list[Cache] | None = None) -> "Tensor":
        """Step `number` of runs of STEPS, which a CUDA graph can hold: fed, and each run starts anew.

        `context` is the sequences' length in the middle of a run.
        """
        if number % STEPS == 0:
            self.at(max(1, self.context - (STEPS - 1) // 2))
        return self.fed(flat=flat)

    def decode(self, steps: int) -> list[list[int]]:
        """Greedy decoding: the tokens of `steps` steps. `start` needs as much room."""
        return [[int(token) for token in self.fed()] for _ in range(steps)]

    def weight_bytes(self) -> int:
        """Bytes of all weights that a step reads."""
        inside = sum(made.bytes for layer in self.layers for made in layer.values())
        return inside + self.head.bytes

    def kv_bytes(self) -> int:
        """Bytes of keys and values that one layer's attention reads at `context`."""
        element = self.caches[0].keys.element_size()
        return self.shape.kv_bytes(len(self.lengths) * self.context, element)

    def matrix(self, name: str) -> Matrix:
        """One product's weights, by its name in a step."""
        return self.head if name == "lm_head" else self.layers[0][name]

    def products(self) -> Iterator[tuple[str, list[Matrix]]]:
        """Each product by name with its copies, one a layer, for rotation."""
        for name in self.shape.linears:
            yield name, [layer[name] for layer in self.layers]
        yield "lm_head", [self.head]


def contiguous_attention(query: "Tensor", cache: Cache, lengths: "Tensor") -> "Tensor":
    """The same attention without blocks: SDPA on a GPU, grouped products on a CPU (SDPA is ten times slower).

    query bf16 [batch, heads, head_dim]; keys, values [batch, tokens, kv_heads, head_dim].
    """
    import torch

    batch, heads, head_dim = query.shape
    kv_heads = cache.keys.shape[2]
    if query.is_cuda:
        keys, values = (each.to(query.dtype).transpose(1, 2) for each in (cache.keys, cache.values))
        attend: Any = torch.nn.functional.scaled_dot_product_attention
        out: Tensor = attend(query[:, :, None], keys, values, enable_gqa=True)
        return out[:, :, 0]
    # As the paged route: chunks that stay in cache, widened to fp32.
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, head_dim).float()
    made = []
    for row, length in enumerate(lengths.tolist()):
        chunks = [slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)]
        parts = (cache.keys[row, chunk].float().permute(1, 2, 0) for chunk in chunks)
        scores = torch.cat([grouped[row] @ part for part in parts], -1)
        weights = torch.softmax(scores.mul_(head_dim**-0.5), dim=-1)
        mixed = [weights[..., c] @ cache.values[row, c].float().transpose(0, 1) for c in chunks]
        made.append(torch.stack(mixed).sum(0))
    return torch.stack(made).reshape(batch, heads, head_dim).to(query.dtype)
