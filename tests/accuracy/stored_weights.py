"""Stored bytes from config.json alone, beside vLLM's own modules, published files and llama.cpp.

A row may hold the decoder or the decoder with its vision tower; the nearer one is compared and counted.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

from capplan import catalog
from capplan.errors import InputError
from capplan.readers import hf_config
from capplan.specs import Format, Model
from capplan.weights import tower_bytes, weight_budget
from tests.accuracy import oracles

# vLLM pads the expert widths of gpt-oss on loading; the published files hold 65,248,815,744 B.
PADDED_AFTER_LOAD = ("openai--gpt-oss-120b", "MXFP4")
PUBLISHED_GPT_OSS_120B_BYTES = 65_248_815_744
# llama.cpp's file types that store every matrix in one type (its own quantizer, types per tensor in
# gguf_quantize_random_702M.csv); the other types of 2024 and later mix several.
UNIFORM_GGUF = ("F16", "BF16", "Q8_0", "Q6_K")
# The older GGML v3 files had one type throughout under these names.
UNIFORM_GGML = ("q4_0", "q4_1", "q5_0")


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesRow:
    """One row: bytes by capplan and by the oracle. `got` is None where `left` says why."""

    name: str
    got: int | None
    want: int
    with_tower: bool = False
    left: str = ""

    @property
    def error(self) -> float:
        """Relative error, signed."""
        assert self.got is not None
        return self.got / self.want - 1


def extra_bytes(model: Model) -> int:
    """Bytes of the parts beside the decoder, MTP layers not counted."""
    sizes = tower_bytes(model)
    return sum(sizes[tower.name] for tower in model.towers if tower.role != "mtp")


def nearer(name: str, decoder: int, extra: int, want: int) -> BytesRow:
    """The decoder, or the decoder with its towers where that is nearer."""
    with_tower = extra > 0 and abs(decoder + extra - want) < abs(decoder - want)
    got = decoder + extra if with_tower else decoder
    return BytesRow(name=name, got=got, want=want, with_tower=with_tower)


def rank_rows() -> list[BytesRow]:
    """Every row of weights_by_tp.csv: bytes of one rank."""
    made = []
    for row in oracles.rows("weights_by_tp"):
        model = oracles.model_of(row)
        budget = weight_budget(model, None, tp=int(row["tp"]))
        name = f"{row['model']} tp {row['tp']}"
        made.append(
            nearer(name, budget.bytes, extra_bytes(model), int(row["rank0_param_bytes"]))
        )
    return made


def rejected_splits() -> list[tuple[str, int, bool, str]]:
    """Every row of tp_rejected.csv: model, tp, whether capplan refuses it, vLLM's reason."""
    made = []
    for row in oracles.rows("tp_rejected"):
        model, tp = oracles.model_of(row), int(row["tp"])
        try:
            weight_budget(model, None, tp=tp)
        except InputError:
            refused = True
        else:
            refused = False
        made.append((row["model"], tp, refused, row["reason"]))
    return made


def checkpoint_rows() -> list[BytesRow]:
    """Every row of checkpoints.csv."""
    return [_checkpoint(row) for row in oracles.rows("checkpoints")]


def _checkpoint(row: oracles.Row) -> BytesRow:
    name, form, want = f"{row['model']} {row['format']}", row["format"], int(row["bytes"])

    def left(reason: str) -> BytesRow:
        return BytesRow(name=name, got=None, want=want, left=reason)

    if (row["model"], form) == PADDED_AFTER_LOAD:
        return left("vLLM's padded size after loading, not the checkpoint's")
    family, _, kind = form.rpartition(" ")
    if family in ("GGUF", "GGML v3"):
        stored = _gguf_format(kind, uniform=UNIFORM_GGUF if family == "GGUF" else UNIFORM_GGML)
        if stored is None:
            return left("a mix of GGUF types")
        return BytesRow(name=name, got=weight_budget(_plain(row), stored).bytes, want=want)
    if form.endswith("one rank"):
        tp = int(form.split("tp ")[1].split(",")[0])
        model = _plain(row)
        if "FBGEMM" in form:
            model = catalog.load_model(catalog.resolve("models", "Llama-3.1-405B-FP8", "model"))
        return BytesRow(name=name, got=weight_budget(model, None, tp=tp).bytes, want=want)
    model = oracles.model_at(_checkpoint_config(row))
    return nearer(name, weight_budget(model, None).bytes, extra_bytes(model), want)


def _gguf_format(kind: str, *, uniform: tuple[str, ...]) -> Format | None:
    """The format of this name: one uniform type, or a mix once capplan knows the mix by its name."""
    mixed = kind not in uniform
    try:
        stored = catalog.weight_format(kind)
    except InputError:
        return None
    # A type's name stands for a mix only where the format says it is one.
    return None if mixed and stored.group_shape == "gguf" else stored


def _checkpoint_config(row: oracles.Row) -> Path:
    names = (f"{row['model']}@{row['format']}.json", f"{row['model']}.json")
    folders = (oracles.ORACLES / "configs", oracles.HF_CONFIGS)
    return next(
        folder / name for name in names for folder in folders if (folder / name).exists()
    )


def _plain(row: oracles.Row) -> Model:
    """The unquantized model of a row without a config of its own."""
    return oracles.model_at(_checkpoint_config({**row, "format": ""}))


@functools.cache
def random_702m() -> Model:
    """The Llama shape that llama.cpp quantized: 24 × 1536, 12 heads, 4 KV heads, FFN 4096, vocab 32000."""
    config = {
        "model_type": "llama", "hidden_size": 1536, "intermediate_size": 4096,
        "num_hidden_layers": 24, "num_attention_heads": 12, "num_key_value_heads": 4,
        "vocab_size": 32000, "hidden_act": "silu", "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
    }  # fmt: skip
    return hf_config.read_model(
        config, where="702M", name="702M", architecture=catalog.architecture("llama")
    )


def gguf_rows() -> list[BytesRow]:
    """Every row of gguf_quantize_random_702M.csv: bytes of the tensors llama.cpp wrote."""
    made = []
    for row in oracles.rows("gguf_quantize_random_702M"):
        want = int(row["tensor_bytes"])
        stored = _gguf_format(row["format"], uniform=UNIFORM_GGUF)
        if stored is None:
            made.append(BytesRow(name=row["format"], got=None, want=want, left="a mix of GGUF types"))
        else:
            size = weight_budget(random_702m(), stored).bytes
            made.append(BytesRow(name=row["format"], got=size, want=want))
    return made
