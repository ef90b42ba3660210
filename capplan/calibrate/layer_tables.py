"""Readers of layer-by-layer timings of models: LLMServingSim's profiles and Vidur's operator medians."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from capplan import catalog
from capplan.calibrate.kernel_tables import causal_pairs
from capplan.calibrate.tables import Cells, Measured, Row, Source, lines
from capplan.errors import InputError
from capplan.specs import Gpu

_US: Final = 1e-6
_MS: Final = 1e-3
_HALF: Final = 2
"""Bytes of an activation."""

SERVING_SIM: Final = Source(
    what="layer timings, LLMServingSim's profiler",
    source="casys-kaist/LLMServingSim at 5daddb21a545658d5150b535712d0494584b5278, profiler/perf",
    licence="MIT",
    date="2026-08",
)
VIDUR: Final = Source(
    what="operator medians, Vidur's profiler",
    source="microsoft/vidur at 7d47513363ec447a741ac5e47241580b47724fbf, data/profiling/compute",
    licence="MIT",
    date="2024",
)
MIXED: Final = "prompt chunks and decoding sequences in one call"
UNUSED: Final = "no operation of ours"
COARSE: Final = "under five steps of its clock"
REPEATED: Final = "measured by the kernel tables"
_CLOCK_STEP_S: Final = 1e-6


def read(folder: Path, into: Measured, *, elementwise_only: frozenset[str] = frozenset()) -> bool:
    """A profile's folder; False where it is none. Other tables have the rest of `elementwise_only` GPUs."""
    if (folder / "meta.yaml").exists() and (folder / "dense.csv").exists():
        _Profile(folder, into, elementwise_only).read()
        return True
    found = False
    for path in sorted(folder.glob("*dense_median_ms.csv")):
        gpu = catalog.gpu(folder.name.split("_")[0])
        for cells in lines(path):
            for row in _vidur(cells):
                into.add(gpu.id, VIDUR, row)
        found = True
    return found


def _gemm(n: int, k: int, m: int, seconds: float) -> Row:
    return Row(
        op="gemm",
        dtype="bf16",
        engine="vllm",
        columns={"m": m, "n": n, "k": k, "copies": float("inf")},
        seconds=seconds,
        group=f"{n}x{k}",
    )


def _elementwise(moved: float, seconds: float, tokens: int) -> Row:
    return Row(
        op="elementwise",
        dtype="bf16",
        engine="vllm",
        columns={"bytes_moved": moved},
        seconds=seconds,
        group=str(tokens),
    )


class _Profile:
    """One folder of LLMServingSim's profiler: one GPU's shard of one layer of a model under vLLM."""

    def __init__(self, folder: Path, into: Measured, elementwise_only: frozenset[str]) -> None:
        self.folder, self.into = folder, into
        meta = catalog.read_yaml(folder / "meta.yaml")
        try:
            widths: Mapping[str, Any] = meta["engine_effective"]["hf_overrides"]
            self.gpu: Gpu = catalog.gpu(str(meta["gpu"]))
            model = catalog.load_model(catalog.resolve("models", str(meta["model"]), "model"))
            self.heads = int(widths["num_attention_heads"])
            self.kv_heads = int(widths["num_key_value_heads"])
            self.ffn = int(widths["intermediate_size"])
            self.vocab = int(widths["vocab_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"no usable {error}", where=str(folder / "meta.yaml"), hint="give the profiler's own file"
            ) from error
        self.hidden = model.hidden
        self.head_dim = model.groups[0].layer.caches()[0].k_width
        self.whole = self.gpu.id not in elementwise_only

    def add(self, found: Row | str) -> None:
        if isinstance(found, Row) and found.op != "elementwise" and not self.whole:
            found = REPEATED
        self.into.add(self.gpu.id, SERVING_SIM, found)

    def read(self) -> None:
        for cells in lines(self.folder / "dense.csv"):
            self.add(self._dense(cells))
        for name, read_row in (("per_sequence.csv", self._last), ("attention.csv", self._attention)):
            path = self.folder / name
            if path.exists():
                for cells in lines(path):
                    self.add(read_row(cells))

    def _dense(self, cells: Cells) -> Row | str:
        layer, tokens = cells.text("layer"), cells.count("tokens")
        seconds = cells.seconds("time_us", _US)
        inner = self.heads * self.head_dim
        products = {
            "qkv_proj": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "o_proj": (self.hidden, inner),
            "gate_up_proj": (2 * self.ffn, self.hidden),
            "down_proj": (self.hidden, self.ffn),
        }
        if layer in products:
            return _gemm(*products[layer], tokens, seconds)
        # Reads and writes a token: a norm adds the residual and writes it back; rotary and head norms work
        # on queries and keys in place; the activation reads two halves.
        turned = (self.heads + self.kv_heads) * self.head_dim
        widths = {
            "layernorm": 4 * self.hidden,
            "final_layernorm": 4 * self.hidden,
            "rotary_emb": 2 * turned,
            "qk_norm": 2 * turned,
            "act_fn": 3 * self.ffn,
            "embedding": 2 * self.hidden,
        }
        if layer in widths:
            return _elementwise(tokens * widths[layer] * _HALF, seconds, tokens)
        return UNUSED

    def _last(self, cells: Cells) -> Row | str:
        if cells.text("layer") != "lm_head":
            return UNUSED
        return _gemm(self.vocab, self.hidden, cells.count("sequences"), cells.seconds("time_us", _US))

    def _attention(self, cells: Cells) -> Row | str:
        chunk, past = int(cells.number("prefill_chunk")), int(cells.number("kv_prefill"))
        decoding, context = int(cells.number("n_decode")), int(cells.number("kv_decode"))
        if chunk and decoding:
            return MIXED
        widths = {
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "k_width": self.head_dim,
            "v_width": self.head_dim,
        }
        seconds = cells.seconds("time_us", _US)
        if chunk:
            own = {"sequences": 1, "tokens": chunk, "pairs": causal_pairs(chunk, past, 0)}
            return Row(
                op="prefill_attention",
                dtype="bf16",
                engine="vllm",
                columns=widths | own,
                seconds=seconds,
                group=str(chunk),
            )
        return Row(
            op="decode_attention",
            dtype="bf16",
            engine="vllm",
            columns=widths | {"batch": decoding, "kv_tokens": decoding * context, "copies": 1},
            seconds=seconds,
            group=str(decoding),
        )


def _vidur(cells: Cells) -> list[Row | str]:
    """One line: medians of every operator for a token count and a tensor-parallel width."""
    tp, tokens = cells.count("num_tensor_parallel_workers"), cells.count("num_tokens")
    hidden, ffn = cells.count("n_embd"), cells.count("n_expanded_embd") // tp
    head_dim = hidden // cells.count("n_head")
    query, stored = cells.count("n_head") * head_dim // tp, cells.count("n_kv_head") * head_dim // tp
    made: list[Row | str] = []

    def timed(name: str) -> float | None:
        seconds = cells.seconds(name, _MS)
        return seconds if seconds >= 5 * _CLOCK_STEP_S else None

    products = {
        "attn_pre_proj_ms": (query + 2 * stored, hidden),
        "attn_post_proj_ms": (hidden, query),
        "mlp_up_proj_ms": (2 * ffn, hidden),
        "mlp_down_proj_ms": (hidden, ffn),
    }
    for name, (n, k) in products.items():
        seconds = timed(name)
        made.append(COARSE if seconds is None else _gemm(n, k, tokens, seconds))
    widths = {
        "emb_ms": 2 * hidden,
        "input_layernorm_ms": 2 * hidden,
        "post_attention_layernorm_ms": 2 * hidden,
        "attn_rope_ms": 2 * (query + stored),
        "mlp_act_ms": 3 * ffn,
        "add_ms": 3 * hidden,
    }
    for name, width in widths.items():
        seconds = timed(name)
        made.append(COARSE if seconds is None else _elementwise(tokens * width * _HALF, seconds, tokens))
    return made
