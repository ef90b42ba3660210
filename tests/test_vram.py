"""`capplan vram`: the figures of its answer, the contract of its JSON, and what bad input says."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capplan import vram
from capplan.cli import run
from capplan.errors import InputError

GIB = 1 << 30


def answer_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(["vram", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


# --- figures ---------------------------------------------------------------------------------------


def test_kv_cache_of_64_users_at_8192_on_llama_3_8b() -> None:
    assert vram("llama-3-8b", users=64, context=8192).to_dict()["kv_cache"]["bytes"] == 68_719_476_736


def test_kv_cache_of_one_user_at_4096_on_llama_3_8b() -> None:
    assert vram("llama-3-8b", users=1, context=4096).to_dict()["kv_cache"]["bytes"] == 536_870_912


def test_kv_cache_of_one_user_at_4096_on_llama_2_13b() -> None:
    assert vram("llama-2-13b", users=1, context=4096).to_dict()["kv_cache"]["bytes"] == 3_355_443_200


@pytest.mark.parametrize(
    ("precision", "stored"),
    [("bf16", 16_060_522_496), ("awq", 5_727_854_592)],
    ids=["bf16 is two bytes each", "awq g128 with scales and zeros, head and embedding 16-bit"],
)
def test_stored_weights_of_llama_3_8b(precision: str, stored: int) -> None:
    assert vram("llama-3-8b", precision=precision).weights_bytes == stored


@pytest.mark.parametrize(
    ("params", "precision", "gigabytes"),
    [
        (7, "fp32", 28.0), (70, "fp32", 280.0),
        (7, "fp16", 14.0), (70, "fp16", 140.0),
        (7, "int8", 7.0), (70, "int8", 70.0),
        (7, "int4", 3.5), (70, "int4", 35.0),
    ],
)  # fmt: skip
def test_lesson_table_of_weights(params: int, precision: str, gigabytes: float) -> None:
    estimate = vram(params=params * 10**9, precision=precision)
    assert estimate.weights_bytes == gigabytes * 1e9


def test_lesson_example_in_its_own_units() -> None:
    estimate = vram(
        params=8 * 10**9,
        kv_from="llama-3-8b",
        precision="int4",
        overhead_bytes=1_500_000_000,
        gpu_memory_bytes=24 * 10**9,
    )
    lesson = estimate.lesson
    assert lesson is not None
    shown = [f"{lesson[key]:.1f}" for key in ("weights_gb", "kv_cache_gib", "total_mixed")]
    assert shown == ["4.0", "8.0", "13.5"]
    assert f"{lesson['headroom_mixed']:+.1f}" == "+10.5"
    assert estimate.need.total_bytes == 4_000_000_000 + 8_589_934_592 + 1_500_000_000


def test_total_is_the_sum_of_its_parts() -> None:
    data = vram("8b", users=7, context=1001, gpus=("l4",)).to_dict()
    kv = data["kv_cache"]["bytes"] + data["kv_cache"]["tail_bytes"]
    assert data["total"]["bytes"] == data["weights"]["bytes"] + kv + data["overhead"]["bytes"]
    assert data["headroom_bytes"] == data["gpu"]["usable_bytes"] - data["total"]["bytes"]
    assert sum(part["bytes"] for part in data["overhead"]["parts"]) == data["overhead"]["bytes"]
    assert sum(part["bytes"] for part in data["weights"]["roles"]) == data["weights"]["bytes"]


def test_tail_blocks_of_an_odd_context() -> None:
    # 1001 tokens take 63 blocks of 16 = 1008 slots: 7 empty ones of 131,072 B for each of 7 users.
    data = vram("8b", users=7, context=1001).to_dict()
    assert data["kv_cache"]["bytes"] == 7 * 1001 * 131_072
    assert data["kv_cache"]["tail_bytes"] == 7 * 7 * 131_072


def test_shared_prefix_is_stored_once_in_full_blocks() -> None:
    alone = vram("8b", users=64, context=4096).kv_bytes
    shared = vram("8b", users=64, context=4096, prefix_shared=1000).kv_bytes
    assert alone is not None
    assert shared == alone - 63 * 992 * 131_072


def test_capacity_is_what_just_fits() -> None:
    estimate = vram("8b", users=16, context=4096, gpus=("h100-sxm",))
    most = estimate.verdicts[0].max_users
    assert most is not None
    assert vram("8b", users=most, context=4096, gpus=("h100-sxm",)).fits is True
    assert vram("8b", users=most + 1, context=4096, gpus=("h100-sxm",)).fits is not True
    longest = estimate.verdicts[0].max_context
    assert longest is not None
    assert vram("8b", users=16, context=longest, gpus=("h100-sxm",)).fits is True


def test_longest_context_stops_at_the_models_own() -> None:
    estimate = vram("llama-3-8b", users=1, gpus=("b200",))
    assert estimate.verdicts[0].max_context == 8192


def test_verdict_is_open_where_the_overhead_band_straddles_the_memory() -> None:
    need = vram("8b", users=1).need
    between = (need.low_bytes + need.total_bytes) // 2
    assert vram("8b", users=1, gpu_memory_bytes=between).fits is None
    assert vram("8b", users=1, gpu_memory_bytes=need.total_bytes).fits is True
    assert vram("8b", users=1, gpu_memory_bytes=need.low_bytes - 1).fits is False


def test_kv_heads_are_replicated_past_their_number() -> None:
    # Eight KV heads: a rank of 16 holds one head, like a rank of 8.
    ranks = {tp: vram("70b", tp=tp).need.kv_bytes for tp in (1, 8, 16)}
    whole = ranks[1]
    assert whole is not None
    assert ranks[8] == ranks[16] == whole / 8


def test_fp8_weights_do_not_imply_fp8_kv() -> None:
    assert vram("8b", precision="fp8").kv_format.id == "bf16"
    assert vram("8b", precision="fp8", kv_dtype="fp8").kv_format.id == "fp8"


def test_remedies_hold_when_tried() -> None:
    estimate = vram("70b", gpus=("h100-sxm",))
    assert estimate.fits is False
    assert estimate.remedies
    for remedy in estimate.remedies:
        flag, value = remedy.flag.split()
        changes: dict[str, Any] = {
            "--users": lambda v: {"users": int(v)},
            "--context": lambda v: {"context": int(v)},
            "--kv-dtype": lambda v: {"kv_dtype": v},
            "--precision": lambda v: {"precision": v},
            "--tp": lambda v: {"tp": int(v)},
            "--gpu": lambda v: {"gpus": (v,)},
        }[flag](value)
        after = vram("70b", **({"gpus": ("h100-sxm",)} | changes))
        assert after.fits is True, remedy.flag
        assert after.need.total_bytes == remedy.total_bytes
        assert after.verdicts[0].headroom_bytes == remedy.headroom_bytes


# --- contract ----------------------------------------------------------------------------------------

CONTRACT = [
    "schema", "model.name", "model.parameters", "weights.bytes", "kv_cache.bytes_per_token",
    "kv_cache.bytes", "overhead.bytes", "overhead.parts", "total.bytes", "gpu.usable_bytes", "fits",
    "headroom_bytes", "max_users", "max_context", "per_gpu.weights.bytes", "per_gpu.kv_pool.bytes",
    "per_gpu.kv_pool.tokens", "per_gpu.max_concurrency",
]  # fmt: skip


@pytest.mark.parametrize("key", CONTRACT)
def test_json_has_the_key_others_rely_on(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = answer_of(capsys, "--model", "8b", "--gpu", "h100-sxm", "-o", "json")
    assert (code, err) == (0, "")
    node = json.loads(out)
    for part in key.split("."):
        node = node[part]
    assert node is not None


def test_without_a_gpu_there_is_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answer_of(capsys, "--model", "405b", "-o", "json")
    data = json.loads(out)
    assert code == 0
    assert (data["fits"], data["gpu"]) == (None, None)
    assert [row["name"] for row in data["fit_table"]] == [
        "24 GB", "40 GB", "48 GB", "80 GB", "141 GB", "192 GB"
    ]  # fmt: skip
    assert data["per_gpu"]["kv_pool"]["bytes"] == data["kv_cache"]["bytes"]


@pytest.mark.parametrize(
    "question",
    [
        {"model": "llama-2-70b", "tp": 16},
        {"model": "deepseek-v3", "tp": 8, "draft_model": "mtp"},
        {"model": "qwen3-vl-8b", "tp": 4},
        {"model": "nemotron-h-8b", "tp": 2, "context": 1001},
        {"model": "8b"},
    ],
    ids=["replicated KV heads", "latents and a draft", "a vision tower", "states and tails", "one GPU"],
)
def test_whole_is_the_sum_of_its_parts_on_all_gpus(question: dict[str, Any]) -> None:
    data = vram(**question).to_dict()
    gpus = question.get("tp", 1)
    draft = data["draft_kv_cache"]["bytes"] if data["draft_kv_cache"] else 0
    parts = data["weights"]["bytes"] + data["overhead"]["bytes"] + draft
    parts += data["kv_cache"]["bytes"] + data["kv_cache"]["tail_bytes"]
    parts += sum(part["bytes"] for part in data["extra"])
    assert data["total"]["bytes"] == parts + data["total"]["replicated_bytes"]
    assert data["total"]["bytes"] == data["per_gpu"]["total"]["bytes"] * gpus
    assert data["total"]["replicated_bytes"] >= 0
    assert (data["total"]["replicated_bytes"] > 0) == (gpus > 1)


def test_several_gpus_are_told_by_one_that_holds_it() -> None:
    data = vram("70b", gpus=("l4", "b200")).to_dict()
    assert (data["fits"], data["gpu"]["id"]) == (True, "b200-sxm-180gb")
    assert data["headroom_bytes"] >= 0
    assert data["max_users"] >= 16
    none = vram("405b", gpus=("l4", "t4")).to_dict()
    assert (none["fits"], none["gpu"]["id"]) == (False, "l4-24gb")


@pytest.mark.parametrize(("model", "limit"), [("gpt2", 1024), ("llama-3-8b", 4096)])
def test_default_context_is_cut_to_a_short_model(model: str, limit: int) -> None:
    assert vram(model).question.context == limit


def test_nothing_bounds_the_context_of_a_state_model() -> None:
    assert vram("mamba-2.8b", gpus=("l4",)).to_dict()["max_context"] is None


def test_pool_is_what_is_left_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = answer_of(capsys, "--model", "8b", "--gpu", "h100-sxm", "-o", "json")
    data = json.loads(out)
    left = data["gpu"]["usable_bytes"] - data["weights"]["bytes"] - data["overhead"]["bytes"]
    pool = data["per_gpu"]["kv_pool"]
    assert pool["bytes"] == left
    assert pool["tokens"] == left // (16 * 131_072) * 16


def test_text_and_json_agree(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", "8b", "--users", "64", "--gpu", "l40s")
    _, text, _ = answer_of(capsys, *arguments)
    _, out, _ = answer_of(capsys, *arguments, "-o", "json")
    data = json.loads(out)
    assert f"{data['total']['bytes'] / GIB:,.2f} GiB" in text
    assert f"{data['max_users']:,}" in text


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--model", "8b", "--gpu", "h100-sxm"), 0),
        (("--model", "405b", "--gpu", "l4"), 4),
        (("--model", "405b", "--gpu-memory", "24GB"), 4),
        (("--model", "405b", "--gpu", "l4", "--gpu", "t4"), 4),
        (("--model", "70b", "--gpu", "l4", "--gpu", "mi300x"), 0),
        (("--model", "405b", "--gpu", "all"), 0),
        (("--model", "405b"), 0),
        (("--params", "405b", "--gpu", "l4"), 4),
        (("--model", "nothing"), 2),
    ],
)
def test_exit_codes(arguments: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer_of(capsys, *arguments)[0] == code


# --- bad input -----------------------------------------------------------------------------------------

BAD = {
    "unknown model": ("--model", "lama-3-8b"),
    "unknown gpu": ("--model", "8b", "--gpu", "h1000"),
    "unknown format": ("--model", "8b", "--precision", "int5"),
    "weight format as kv dtype": ("--model", "8b", "--kv-dtype", "awq"),
    "no users": ("--model", "8b", "--users", "0"),
    "negative users": ("--model", "8b", "--users", "-5"),
    "absurd users": ("--model", "8b", "--users", "9" * 30),
    "exponent": ("--model", "8b", "--users", "1e3"),
    "fraction": ("--model", "8b", "--users", "1.5"),
    "no context": ("--model", "8b", "--context", "0"),
    "context past the model": ("--model", "llama-3-8b", "--context", "8193"),
    "no blocks": ("--model", "8b", "--block-size", "0"),
    "split of heads": ("--model", "8b", "--tp", "5"),
    "size without a unit": ("--model", "8b", "--gpu-memory", "24"),
    "negative size": ("--model", "8b", "--gpu-memory", "-24GB"),
    "no memory": ("--model", "8b", "--gpu-memory", "0GB"),
    "absurd memory": ("--model", "8b", "--gpu-memory", "9999999999TB"),
    "not a number of GiB": ("--model", "8b", "--gpu-memory-gib", "nan"),
    "infinite GiB": ("--model", "8b", "--gpu-memory-gib", "inf"),
    "memory twice": ("--model", "8b", "--gpu-memory", "24GB", "--gpu-memory-gib", "24"),
    "gpu and memory": ("--model", "8b", "--gpu", "l4", "--gpu-memory", "24GB"),
    "overhead without a unit": ("--model", "8b", "--overhead", "1.5"),
    "overhead of nan": ("--model", "8b", "--overhead", "nan%"),
    "negative overhead": ("--model", "8b", "--overhead", "-5%"),
    "prefix past the context": ("--model", "8b", "--prefix-shared", "5000"),
    "model and parameters": ("--model", "8b", "--params", "8b"),
    "neither": (),
    "kv of a model that has its own": ("--model", "8b", "--kv-from", "70b"),
    "parameters that are none": ("--params", "many"),
    "no parameters": ("--params", "0"),
    "absurd parameters": ("--params", "99999999t"),
    "missing file": ("--model", "./nowhere/config.json"),
    "empty model": ("--model", ""),
    "nul in the name": ("--model", "8b\0"),
    "unknown option": ("--model", "8b", "--user", "3"),
    "unknown output": ("--model", "8b", "-o", "xml"),
}


@pytest.mark.parametrize("arguments", BAD.values(), ids=list(BAD))
def test_bad_input_is_three_lines_and_exit_2(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = answer_of(capsys, *arguments)
    assert (code, out) == (2, "")
    lines = err.rstrip("\n").split("\n")
    assert len(lines) == 3, err
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("  --> ")
    assert lines[2].startswith("  = help: ")
    assert all(len(line) < 400 for line in lines)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("lama-3.1-8b", "llama-3.1-8b"), ("mixtral-8x7", "mixtral-8x7b"), ("gema-2-9b", "gemma-2-9b")],
)
def test_unknown_model_names_the_nearest(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert meant in answer_of(capsys, "--model", typed)[2]


BROKEN = {
    "empty": "",
    "not JSON": "{hidden_size: 4096}",
    "cut off": '{"hidden_size": 4096, "num_',
    "a list": "[1, 2]",
    "key twice": '{"hidden_size": 1, "hidden_size": 2}',
    "nested without end": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "a number of ten thousand digits": '{"hidden_size": ' + "9" * 10_000 + "}",
    "NaN": '{"model_type": "llama", "hidden_size": NaN}',
    "no model_type": '{"hidden_size": 4096}',
    "missing keys": '{"model_type": "llama", "hidden_size": 4096}',
    "text for a number": '{"model_type": "llama", "hidden_size": "4096"}',
    "1e3 as text": '{"model_type": "llama", "hidden_size": "1e3"}',
    "negative": '{"model_type": "llama", "hidden_size": -1}',
    "a million layers": '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 1,'
    ' "intermediate_size": 64, "vocab_size": 9, "num_hidden_layers": 1000000}',
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=list(BROKEN))
def test_broken_config_is_three_lines(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    code, out, err = answer_of(capsys, "--model", str(path))
    assert (code, out) == (2, "")
    assert len(err.rstrip("\n").split("\n")) == 3
    assert "config.json" in err


def test_config_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00\x01")
    assert answer_of(capsys, "--model", str(path))[0] == 2


WORDS = st.sampled_from(
    ["8b", "70b", "gemma-2-9b", "deepseek-v3", "x", "", "-1", "0", "1e3", "nan", "inf", "24GB", "24",
     "fp8", "int4", "auto", "all", "h100", "l4", "9" * 25, "1.5", "½", "15%", "--tp", "\u202e"]
)  # fmt: skip
OPTIONS = st.sampled_from(
    ["--model", "--params", "--kv-from", "--precision", "--kv-dtype", "--users", "--context", "--gpu",
     "--gpu-memory", "--gpu-memory-gib", "--tp", "--block-size", "--overhead", "--prefix-shared"]
)  # fmt: skip


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(st.tuples(OPTIONS, WORDS), max_size=5))
def test_no_command_line_crashes_or_prints_nonsense(
    pairs: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [word for pair in pairs for word in pair]
    code, out, err = answer_of(capsys, *arguments, "-o", "json")
    assert code in (0, 2, 4)
    assert "Traceback" not in err
    if code == 2:
        assert len(err.rstrip("\n").split("\n")) == 3
        return
    for size in _numbers(json.loads(out)):
        assert math.isfinite(size)
    data = json.loads(out)
    assert min(data["weights"]["bytes"], data["overhead"]["bytes"], data["total"]["bytes"]) >= 0


def _numbers(node: Any) -> list[float]:
    if isinstance(node, dict):
        return [number for value in node.values() for number in _numbers(value)]
    if isinstance(node, list):
        return [number for value in node for number in _numbers(value)]
    return [node] if isinstance(node, int | float) and not isinstance(node, bool) else []


@settings(max_examples=150, deadline=None)
@given(
    users=st.integers(1, 5000),
    context=st.integers(1, 8192),
    block_size=st.sampled_from([1, 8, 16, 32, 128]),
    memory=st.integers(1, 400 * GIB),
    model=st.sampled_from(["llama-3-8b", "gemma-2-9b", "deepseek-v2-lite", "nemotron-h-8b"]),
)
def test_capacities_are_consistent(
    users: int, context: int, block_size: int, memory: int, model: str
) -> None:
    estimate = vram(model, users=users, context=context, block_size=block_size, gpu_memory_bytes=memory)
    verdict = estimate.verdicts[0]
    assert verdict.max_users is not None
    assert verdict.max_context is not None
    assert (verdict.max_users >= users) == (verdict.headroom_bytes >= 0)
    if verdict.headroom_bytes >= 0:
        assert verdict.max_context >= context
    else:
        assert verdict.max_context < context
    assert estimate.tail_bytes < users * block_size * (
        estimate.layout.bytes_per_token * 64 if estimate.layout else 1
    )


def test_python_api_refuses_like_the_command_line() -> None:
    with pytest.raises(InputError, match="unknown model"):
        vram("lama")
