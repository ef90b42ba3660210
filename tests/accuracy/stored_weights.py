"""Stored bytes from config.json alone, beside vLLM's own modules, published files and llama.cpp.

A row may hold the decoder or the decoder with its vision tower; the nearer one is compared and counted.
"""

import functools
from dataclasses import dataclass, replace
from pathlib import Path

from capplan import catalog
from capplan.errors import InputError
from capplan.readers import hf_config
from capplan.readers.ggml_types import GGML_TYPES
from capplan.specs import Model
from capplan.weights import tower_bytes, weight_budget
from tests.accuracy import oracles

PUBLISHED_GPT_OSS_120B_BYTES = 65_248_815_744
# Rows of checkpoints.csv that do not describe what capplan is asked for, with the reason.
EXCEPTIONS = {
    ("openai--gpt-oss-120b", "MXFP4"): "vLLM pads expert widths on loading; the published files hold "
    f"{PUBLISHED_GPT_OSS_120B_BYTES:,} B, which is equal",
    ("meta-llama--Llama-3.1-405B", "GGUF Q4_K_M"): "a README's figure with one decimal, 4.91 bits a weight; "
    "the quantizer's rules, exact on every file it wrote here, give 4.79",
    ("meta-llama--Llama-2-13b-hf", "GGML v3 q2_K"): "the q2_K of 2023 was another mix",
}
_MODEL_OF_FBGEMM = "Llama-3.1-405B-FP8"


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesRow:
    """One row: bytes by capplan and by the oracle. `got` is None where `left` says why.

    `measured`: read off a running GPU, where loading's own allocations count too. `exception`: why the row
    is about something else.
    """

    name: str
    got: int | None
    want: int
    with_tower: bool = False
    measured: bool = False
    left: str = ""
    exception: str = ""

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


@functools.cache
def rank_rows() -> list[BytesRow]:
    """Every row of weights_by_tp.csv: bytes of one rank."""
    made = []
    for row in oracles.rows("weights_by_tp"):
        model = oracles.model_of(row)
        budget = weight_budget(model, None, tp=int(row["tp"]))
        name = f"{row['model']} tp {row['tp']}"
        made.append(nearer(name, budget.bytes, extra_bytes(model), int(row["rank0_param_bytes"])))
    return made


@functools.cache
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


@functools.cache
def checkpoint_rows() -> list[BytesRow]:
    """Every row of checkpoints.csv."""
    return [_checkpoint(row) for row in oracles.rows("checkpoints")]


def _checkpoint(row: oracles.Row) -> BytesRow:
    name, form, want = f"{row['model']} {row['format']}", row["format"], int(row["bytes"])
    exception = EXCEPTIONS.get((row["model"], form), "")
    family, _, kind = form.rpartition(" ")
    if family in ("GGUF", "GGML v3"):
        return replace(_gguf(name, _plain(row), kind, want), exception=exception)
    if form.endswith("one rank"):
        tp = int(form.split("tp ")[1].split(",")[0])
        model = _plain(row)
        if "FBGEMM" in form:
            model = catalog.load_model(catalog.resolve("models", _MODEL_OF_FBGEMM, "model"))
        size = weight_budget(model, None, tp=tp).bytes
        return BytesRow(name=name, got=size, want=want, measured=True)
    model = oracles.model_at(_checkpoint_config(row))
    made = nearer(name, weight_budget(model, None).bytes, extra_bytes(model), want)
    return replace(made, exception=exception)


def _gguf(name: str, model: Model, kind: str, want: int) -> BytesRow:
    try:
        stored = catalog.weight_format(kind)
    except InputError:
        return BytesRow(name=name, got=None, want=want, left=f"capplan has no {kind}")
    return BytesRow(name=name, got=weight_budget(model, stored).bytes, want=want)


def _checkpoint_config(row: oracles.Row) -> Path:
    names = (f"{row['model']}@{row['format']}.json", f"{row['model']}.json")
    folders = (oracles.ORACLES / "configs", oracles.HF_CONFIGS)
    return next(folder / name for name in names for folder in folders if (folder / name).exists())


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
    return hf_config.read_model(config, where="702M", name="702M", architecture=catalog.architecture("llama"))


@functools.cache
def gguf_rows() -> list[BytesRow]:
    """Every row of gguf_quantize_random_702M.csv: bytes of the tensors llama.cpp wrote."""
    return [
        _gguf(row["format"], random_702m(), row["format"], int(row["tensor_bytes"]))
        for row in oracles.rows("gguf_quantize_random_702M")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatRow:
    """A weight format beside its row of quant_bits.csv; `oracle` is "" where there is none."""

    format: str
    oracle: str
    got: float
    want: float | None

    @property
    def equal(self) -> bool:
        """Equal to the digits the oracle prints."""
        return round(self.got, 6) == self.want


# Formats whose row has a name of its own; GGUF's go by their type's name.
_ORACLE_NAMES = {
    "awq": "AWQ int4 g128 (qweight+qzeros+scales fp16)",
    "gptq": "GPTQ int4 g128 (sym; qzeros kept)",
    "int8-g128": "GPTQ int8 g128",
    "int4": "compressed-tensors W4A16 g128 symmetric (weight_packed+weight_scale)",
    "fp8-block": "FP8 block 128x128 (weight_scale_inv fp32)",
    "fp8": "FP8 per tensor (static: weight_scale+input_scale fp32)",
    "fp8-channel": "FP8 / INT8 per output channel",
    "int8": "FP8 / INT8 per output channel",
    "mxfp4": "MXFP4 (e2m1 x32 + e8m0 scale)",
    "nvfp4": "NVFP4 (e2m1 x16 + e4m3 scale, + fp32 a tensor)",
    "bnb-nf4": "bitsandbytes nf4 (block 64, fp32 absmax)",
    "bnb-nf4-dq": "bitsandbytes nf4 double quant (absmax int8, 256 blocks an fp32)",
    "bnb-int8": "bitsandbytes LLM.int8 (fp32 an output row)",
    "fp32": "GGUF F32",
    "fp16": "GGUF F16",
    "bf16": "GGUF BF16",
}


def _bits() -> dict[str, float]:
    return {row["format"]: float(row["bits_per_weight"]) for row in oracles.rows("quant_bits")}


@functools.cache
def format_rows() -> list[FormatRow]:
    """Every format of profiles/formats; a GGUF mix goes by the type most of its tensors have."""
    known = _bits()
    made = []
    for identity in catalog.ids("formats"):
        form = catalog.load_format(identity)
        base = form.rules[-1].stored.id if form.rules and form.rules[-1].tensor == "all" else identity
        name = _ORACLE_NAMES.get(identity, f"GGUF {base.upper()}")
        made.append(
            FormatRow(
                format=identity,
                oracle=name if name in known else "",
                got=form.effective_bits,
                want=known.get(name),
            )
        )
    return made


def ggml_type_rows() -> list[FormatRow]:
    """Every GGML type a GGUF file may hold."""
    known = _bits()
    return [
        FormatRow(format=name, oracle=f"GGUF {name}", got=size * 8 / block, want=known.get(f"GGUF {name}"))
        for name, block, size in GGML_TYPES.values()
    ]
