"""Rows of a measured table: units, notes, subjects, and rows that cannot be used."""

import math
from pathlib import Path

import pytest

from capplan.errors import InputError
from capplan.results.measured import COLUMNS, MeasuredRun, MeasuredTable, read_measured
from capplan.results.notes import read_notes
from capplan.results.predict import Prediction, Unanswered, kv_bits_of, layout_of, predict
from capplan.results.subject import Subject, Unknown, format_of, subject_of
from capplan.results.workload import fp8_cache, poll_steps
from capplan.specs import Parallelism

ROW = {
    "source": "somewhere", "engine": "vLLM", "model": "meta-llama/Llama-3.1-8B-Instruct",
    "gpu": "H100-SXM-80GB", "n_gpu": "1", "tp": "1", "pp": "1", "weight_dtype": "fp8", "isl": "1000",
    "osl": "100", "concurrency_or_batch": "8", "output_tok_s": "700", "ttft_ms": "120", "tpot_ms": "9.5",
    "mode": "online_closed_loop",
}  # fmt: skip


def table(tmp_path: Path, *rows: dict[str, str]) -> MeasuredTable:
    path = tmp_path / "runs.csv"
    lines = [",".join(COLUMNS)]
    lines += [",".join({**ROW, **row}.get(name, "") for name in COLUMNS) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_measured(path)


def run(tmp_path: Path, **changed: str) -> MeasuredRun:
    (found,) = table(tmp_path, changed).runs
    return found


def subject(found: MeasuredRun) -> Subject:
    made = subject_of(found)
    assert isinstance(made, Subject)
    return made


def test_a_row_in_si_units(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert (found.engine, found.ttft_s, found.tpot_s) == ("vllm", 0.12, 0.0095)
    assert (found.isl, found.osl, found.concurrency) == (1000, 100, 8)
    assert found.request_per_s is None
    assert found.statistic == "mean"
    assert found.e2e_s is None


def test_all_at_once_is_an_infinite_rate(tmp_path: Path) -> None:
    assert math.isinf(run(tmp_path, request_rate="inf").request_per_s or 0)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"mode": "guessed"}, "unknown mode"),
        ({"model": ""}, "no model"),
        ({"ttft_ms": "soon"}, "ttft_ms is no number"),
        ({"tpot_ms": "-3"}, "tpot_ms is not above 0"),
        ({"isl": "nan"}, "isl is not above 0"),
        ({"output_tok_s": "inf"}, "output_tok_s is not above 0"),
        ({"tp": "1.5"}, "tp is no whole number"),
        ({"ttft_ms": "", "tpot_ms": "", "output_tok_s": ""}, "nothing measured"),
    ],
)
def test_a_bad_row_is_counted_with_its_reason(tmp_path: Path, changed: dict[str, str], reason: str) -> None:
    made = table(tmp_path, {}, changed)
    assert len(made.runs) == 1
    ((line, why),) = made.rejected.items()
    assert line == 3
    assert why.startswith(reason)
    assert sum(made.reasons.values()) == 1


def test_a_row_with_a_cell_too_many_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(",".join(COLUMNS) + "\n" + "x," * (len(COLUMNS) + 2) + "\n", encoding="utf-8")
    assert list(read_measured(path).rejected.values()) == ["another number of cells than columns"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"source,engine\n", "column engine_version is missing"),
        (",".join((*COLUMNS, "coloor")).encode() + b"\n", "unknown column"),
        (b"\xff\xfe\x00 no text", "no CSV text"),
        (b"", "column source is missing"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_measured(path)
    assert caught.value.message.startswith(message)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_measured(tmp_path / "none.csv")


def test_notes_of_a_served_run() -> None:
    notes = read_notes(
        "section=x; flags=--model-path zai --tp-size 8 --enable-dp-attention --dp-size=8 "
        "--max-running-requests=256 --chunked-prefill-size 4096; mean TTFT/TPOT; median_ttft=17.5; "
        "p99_tpot=48.25; requests=1000; duration_s=109.16; req_s=9.16"
    )
    assert notes.attention_dp is True
    assert notes.attention_dp_ranks == 8
    assert (notes.max_num_seqs, notes.max_num_batched_tokens) == (256, 4096)
    assert (notes.requests, notes.duration_s, notes.request_per_s) == (1000, 109.16, 9.16)
    assert notes.more == {"median_ttft_s": 0.0175, "p99_tpot_s": 0.04825}
    assert notes.flags["tp-size"] == "8"
    assert notes.statistic == "mean"
    assert notes.origin is None
    assert read_notes("requests=5; isl/osl are means").varied


def test_notes_of_a_layout_and_its_doubts() -> None:
    notes = read_notes("origin=x y; attn_dp=1; moe_tp=2; moe_ep=4; WARN n_gpu blanked; more")
    assert (notes.origin, notes.varied) == ("x y", False)
    assert (notes.attention_dp, notes.moe_tp, notes.moe_ep) == (False, 2, 4)
    assert notes.warnings == ("n_gpu blanked",)


def test_notes_of_two_kinds_of_workers() -> None:
    notes = read_notes("disagg prefill workers=2 tp=8 dp=1 ep=8; decode workers= tp=4 dp=1 ep=1")
    assert notes.prefill_worker == {"workers": 2, "tp": 8, "dp": 1, "ep": 8}
    assert notes.decode_worker == {"tp": 4, "dp": 1, "ep": 1}


@pytest.mark.parametrize(
    ("text", "speculative"),
    [
        ("flags=--speculative-config", True),
        ("speculative decoding; x", True),
        ("section=Quantization", False),
    ],
)
def test_guessed_tokens_are_seen(text: str, speculative: bool) -> None:
    assert read_notes(text).speculative is speculative


def test_medians_are_told_from_means() -> None:
    assert read_notes("median TTFT and ITL; 150 requests; duration 347.4s").statistic == "median"
    assert read_notes("median TTFT and ITL; 150 requests; duration 347.4s").requests == 150
    assert read_notes("mean TTFT/TPOT; median_ttft=3").statistic == "mean"
    assert read_notes("").statistic == "mean"


@pytest.mark.parametrize(
    ("name", "identity"),
    [
        ("fp16/bf16", "bf16"),
        ("bf16 (recipe prints FP16)", "bf16"),
        ("fp8 online", "fp8"),
        ("int4_wo", "int4"),
        ("fp4", "nvfp4"),
        ("fp8 or bf16", None),
        ("w4a8", None),
    ],
)
def test_formats_as_tables_write_them(name: str, identity: str | None) -> None:
    found = format_of(name)
    assert (found.id if found else None) == identity


@pytest.mark.parametrize(
    ("model", "dtype", "identity"),
    [
        # The checkpoint's 128 × 128 blocks are what a table calls fp8.
        ("deepseek-ai/DeepSeek-R1", "fp8", None),
        ("deepseek-ai/DeepSeek-R1", "nvfp4", "nvfp4"),
        # Published in MXFP4 only, whatever the activations are.
        ("openai/gpt-oss-120b", "fp8", None),
        ("openai/gpt-oss-120b", "nvfp4", None),
        # INT4 is no FP4.
        ("moonshotai/Kimi-K2.5", "int4_wo", None),
        ("moonshotai/Kimi-K2.5", "nvfp4", "nvfp4"),
        ("Qwen/Qwen3-32B", "fp8", "fp8"),
        ("Qwen/Qwen3-32B", "", None),
    ],
)
def test_whose_weight_format_a_run_has(tmp_path: Path, model: str, dtype: str, identity: str | None) -> None:
    found = subject(run(tmp_path, model=model, weight_dtype=dtype)).weights
    assert (found.id if found else None) == identity


def test_unknown_names_say_what_is_unknown(tmp_path: Path) -> None:
    assert subject_of(run(tmp_path, model="Nobody/Nothing-7B")) == Unknown(
        what="model", name="Nobody/Nothing-7B"
    )
    assert subject_of(run(tmp_path, gpu="80GB-class (8x)")) == Unknown(what="gpu", name="80GB-class (8x)")
    assert subject_of(run(tmp_path, weight_dtype="w4a8")) == Unknown(what="format", name="w4a8")


def test_a_path_stands_for_the_model_it_ends_in(tmp_path: Path) -> None:
    assert subject(run(tmp_path, model="/workspace/DeepSeek-v3.2")).model.name == "deepseek-ai/DeepSeek-V3.2"


@pytest.mark.parametrize(
    ("changed", "parallel", "replicas"),
    [
        ({"n_gpu": "8", "tp": "2"}, Parallelism(tp=2), 4),
        ({"n_gpu": "8", "tp": "4", "pp": "2"}, Parallelism(tp=4, pp=2), 1),
        ({"n_gpu": "8", "tp": "1", "notes": "attn_dp=8; moe_tp=1; moe_ep=8"}, Parallelism(dp=8, ep=8), 1),
        (
            {"n_gpu": "8", "tp": "8", "notes": "flags=--tp-size 8 --dp-size 8 --enable-dp-attention"},
            Parallelism(dp=8, ep=8),
            1,
        ),
        ({"n_gpu": "4", "tp": "4", "notes": "attn_dp=1; moe_tp=1; moe_ep=4"}, Parallelism(tp=4, ep=4), 1),
    ],
)
def test_layouts(tmp_path: Path, changed: dict[str, str], parallel: Parallelism, replicas: int) -> None:
    found = run(tmp_path, model="deepseek-ai/DeepSeek-R1", **changed)
    assert layout_of(found, subject(found)) == (parallel, replicas)


OVERVIEW = "github:NVIDIA/TensorRT-LLM/docs/source/performance/perf-overview.md@00f37686aa85"


@pytest.mark.parametrize(
    ("model", "version", "parallel"),
    [
        pytest.param("Qwen/Qwen3-235B-A22B", "1.0", Parallelism(dp=8, ep=8), id="experts: a rank a GPU"),
        pytest.param("Qwen/Qwen3-235B-A22B", "0.17", Parallelism(tp=8), id="before 1.0"),
        pytest.param("meta-llama/Llama-3.1-405B", "1.0", Parallelism(tp=8), id="dense"),
    ],
)
def test_a_document_says_how_its_runs_were_laid_out(
    tmp_path: Path, model: str, version: str, parallel: Parallelism
) -> None:
    found = run(
        tmp_path,
        source=OVERVIEW,
        engine="TensorRT-LLM",
        engine_version=version,
        model=model,
        n_gpu="8",
        tp="8",
    )
    assert layout_of(found, subject(found)) == (parallel, 1)


def test_a_limit_on_running_requests_is_over_all_ranks_of_sglang(tmp_path: Path) -> None:
    flags = "flags=--dp-size=8 --enable-dp-attention --max-running-requests=256"
    changed = {"model": "deepseek-ai/DeepSeek-R1", "gpu": "H200-SXM", "n_gpu": "8", "tp": "8"}
    busy = {"concurrency_or_batch": "4000", "notes": flags, **changed}
    for engine, most in (("sglang", 256), ("vllm", 8 * 256)):
        found = run(tmp_path, engine=engine, **busy)
        answer = predict(found, subject(found))
        assert isinstance(answer, Prediction)
        assert answer.served.running <= most
        assert (answer.served.running == most) == (answer.served.limit == "max_num_seqs")


def test_launch_scripts_of_a_known_client(tmp_path: Path) -> None:
    notes = "origin=InferenceX/InferenceMAX dump; attn_dp=1"
    changed = {
        "engine": "sglang",
        "model": "deepseek-ai/DeepSeek-R1",
        "n_gpu": "8",
        "tp": "8",
        "gpu": "B200-SXM",
    }
    few, many = (run(tmp_path, notes=notes, concurrency_or_batch=users, **changed) for users in ("8", "16"))
    assert [poll_steps(found, subject(found)) for found in (few, many)] == [10, 30]
    assert fp8_cache(few, subject(few))
    for other in ({"notes": ""}, {"gpu": "H200-SXM", "notes": notes}):
        found = run(tmp_path, **{**changed, **other})
        assert (poll_steps(found, subject(found)), fp8_cache(found, subject(found))) == (1, False)


def test_groups_of_experts_that_do_not_divide_the_gpus_are_left_open(tmp_path: Path) -> None:
    found = run(tmp_path, tp="2", n_gpu="2", notes="moe_ep=4")
    assert isinstance(layout_of(found, subject(found)), Unanswered)


def test_tensorrt_checkpoints_of_eight_bits_carry_an_fp8_cache(tmp_path: Path) -> None:
    own = subject(run(tmp_path, engine="trtllm"))
    assert kv_bits_of(own, "tensorrt-llm") == 8
    assert kv_bits_of(own, "vllm") == 16
    assert kv_bits_of(subject(run(tmp_path, kv_dtype="fp8")), "vllm") == 8
    assert kv_bits_of(subject(run(tmp_path, engine="trtllm", weight_dtype="bf16")), "tensorrt-llm") == 16


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"request_rate": "2"},
        {"request_rate": "inf", "concurrency_or_batch": "", "notes": "requests=100"},
        {"mode": "static_batch"},
        {"mode": "offline_max", "concurrency_or_batch": ""},
        {"mode": "mlperf_offline", "tp": "", "pp": "", "n_gpu": "8", "concurrency_or_batch": ""},
    ],
)
def test_every_kind_of_run_is_predicted(tmp_path: Path, changed: dict[str, str]) -> None:
    found = run(tmp_path, **changed)
    answer = predict(found, subject(found))
    assert isinstance(answer, Prediction)
    assert math.isfinite(answer.output_token_per_s)
    assert answer.total_token_per_s == pytest.approx(11 * answer.output_token_per_s)
    assert answer.served.tpot_s is not None
    assert 1e-3 < answer.served.tpot_s < 1


def test_what_a_row_leaves_open_is_said(tmp_path: Path) -> None:
    for changed in ({"mode": "disagg_closed_loop"}, {"isl": ""}, {"tp": "", "n_gpu": ""}):
        found = run(tmp_path, **changed)
        assert isinstance(predict(found, subject(found)), Unanswered)


def test_weights_that_fill_the_memory_leave_a_run_open(tmp_path: Path) -> None:
    # 70.6 · 10⁹ parameters of 2 bytes on one GPU of 80 GB: nothing is made up for the cache.
    found = run(tmp_path, model="meta-llama/Llama-3.1-70B-Instruct", weight_dtype="bf16")
    answer = predict(found, subject(found))
    assert isinstance(answer, Unanswered)
    assert answer.reason == "the weights leave no room for a KV cache"


def test_a_version_without_rules_counts_as_the_newest(tmp_path: Path) -> None:
    nightly, newest = (run(tmp_path, engine_version=version) for version in ("nightly-dev", ""))
    answers = [predict(found, subject(found)) for found in (nightly, newest)]
    assert isinstance(answers[0], Prediction)
    assert isinstance(answers[1], Prediction)
    assert answers[0].served == answers[1].served
