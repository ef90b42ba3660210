"""A log beside its plan: terms, refusals, flags, exit codes, calibrations, and bad input.

The logs are written here in the engines' words with other numbers; figures of a field report name its
thread. Real lines are read where the shared data is present.
"""
# ruff: noqa: E501  (log lines are as long as the engines make them)

import io
import json
import os
import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from capplan.doctor import Diagnosis, diagnose
from capplan.engines.log_reader import read_log
from capplan.errors import InputError
from capplan.log_subject import subject_of
from capplan.units import GIB
from tests.doctor_logs import REFUSED, SAMPLER, SHARED, STARTED, cli, diagnosed, written


@pytest.fixture(scope="module")
def started() -> Diagnosis:
    return diagnosed(STARTED, gpu="h100")


@pytest.fixture(scope="module")
def refused() -> Diagnosis:
    return diagnosed(REFUSED, gpu="rtx-3090-24gb")


# --- the table ---------------------------------------------------------------------------------------


def test_every_term_has_its_line_and_its_plan(started: Diagnosis) -> None:
    terms = {term.field: term for term in started.terms}
    assert started.outcome == "started"
    expected = {
        "gpu_total_bytes": (79.00, 10),
        "budget_bytes": (71.10, 10),
        "weights_bytes": (15.00, 5),
        "activation_bytes": (5.25, 10),
        "non_torch_bytes": (0.35, 10),
        "kv_pool_bytes": (50.50, 6),
    }
    for field, (gib, line) in expected.items():
        assert terms[field].log == pytest.approx(gib * GIB, abs=1)
        assert terms[field].line == line
        assert terms[field].plan is not None
    # 71.10 − 15.00 − 50.50
    assert terms["beside"].log == pytest.approx(5.60 * GIB, abs=2)
    assert terms["kv_tokens"].log == 413_696
    assert terms["max_concurrency"].log == 25.25


def test_the_plan_is_of_the_same_start(started: Diagnosis) -> None:
    plan = started.plan
    assert plan is not None
    assert plan.version == "0.11.0"
    assert plan.flag("max_model_len").value == 16384
    assert plan.flag("max_num_batched_tokens").value == 8192
    assert plan.flag("gpu_memory_utilization").value == 0.9
    # On the log's own total, not the catalog's.
    assert plan.terms["total"] == pytest.approx(79.00 * GIB, rel=1e-6)
    assert plan.terms["budget"] == pytest.approx(0.9 * 79.00 * GIB, rel=1e-6)


def test_difference_is_log_less_plan(started: Diagnosis) -> None:
    for term in started.terms:
        if term.log is not None and term.plan is not None:
            assert term.difference == term.log - term.plan
        else:
            assert term.difference is None


def test_the_widest_term_is_a_cause_not_a_result(started: Diagnosis) -> None:
    assert started.widest is not None
    assert started.widest.field == "activation_bytes"
    assert started.cause is not None
    assert started.cause.startswith("activations: ")
    assert "more than planned" in started.cause
    assert "--max-num-batched-tokens" in started.cause


def test_a_log_that_agrees_with_the_plan_has_no_widest(started: Diagnosis) -> None:
    assert started.plan is not None
    terms = started.plan.terms
    text = STARTED
    for said, term in (
        ("15.0000", "weights"),
        ("5.25", "activation"),
        ("0.35", "non_torch"),
        (" 0.50", "cuda"),
    ):
        value = next(size for name, size in terms.items() if name.startswith(term)) / GIB
        text = text.replace(said, f" {value:.4f}")
    text = text.replace("15.0 GiB for weight", f"{terms['weights'] / GIB:.4f} GiB for weight")
    text = text.replace("50.50", f"{started.plan.kv_pool.value / GIB:.4f}")
    found = diagnosed(text, gpu="h100")
    assert found.widest is None, found.widest
    assert found.cause is None


def test_more_room_is_only_advised_where_there_is_more(started: Diagnosis) -> None:
    assert started.startable is None
    assert started.fixes
    for fix in started.fixes:
        assert fix.starts
        assert fix.kv_tokens is not None
        assert fix.kv_tokens > 413_696 * 0.999


def test_planned_changes_start_from_the_logs_own_pool(started: Diagnosis) -> None:
    """fp8 holds twice the tokens of the pool that was logged, whatever the plan had for it."""
    fp8 = next(fix for fix in started.fixes if fix.flag == "--kv-cache-dtype fp8")
    assert fp8.kv_tokens == pytest.approx(2 * 413_696, rel=0.001)


# --- refusals ----------------------------------------------------------------------------------------


def test_a_refused_context_in_the_engines_numbers(refused: Diagnosis) -> None:
    assert refused.outcome == "refused"
    assert refused.startable is True
    # 16.00 − 4.76
    assert "11.24 GiB short" in refused.explained[0]
    lengths = [fix for fix in refused.fixes if fix.flag == "--max-model-len 38976"]
    assert [fix.basis for fix in lengths] == ["log"]
    assert not any(fix.flag.startswith("--gpu-memory") for fix in refused.fixes), (
        "24 GB cannot give 11.24 more"
    )
    assert any(fix.flag == "--tensor-parallel-size 2" for fix in refused.fixes)


def test_a_fraction_is_raised_by_just_what_is_missing() -> None:
    text = REFUSED.replace("16.00 GiB KV", "6.00 GiB KV").replace("131072", "49152")
    text = (
        "INFO Free memory on device (23.30/24.00 GiB) on startup. Desired GPU memory utilization is (0.9, 21.60 "
        "GiB). Actual usage is 14.99 GiB for weight\n" + text
    )
    found = diagnosed(text, gpu="rtx-3090-24gb")
    # (6.00 − 4.76) / 24.00 = 0.0517 → 0.9517 → 0.96; 0.96 × 24.00 = 23.04 of the 23.30 that is free.
    assert "--gpu-memory-utilization 0.96" in [fix.flag for fix in found.fixes if fix.basis == "log"]
    assert "--kv-cache-dtype fp8" in [fix.flag for fix in found.fixes], "3.00 GiB do fit into 4.76"
    tight = diagnosed(text.replace("23.30/24.00", "23.00/24.00"), gpu="rtx-3090-24gb")
    assert not any(fix.flag.startswith("--gpu-memory") for fix in tight.fixes), "no more than is free"


def test_memory_held_by_others() -> None:
    text = (
        "INFO vllm/x Initializing a V1 LLM engine (v0.11.0) with config: model='meta-llama/Llama-3.1-8B', max_seq_len=8192\n"
        "ERROR ValueError: Free memory on device (60.00/80.00 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 72.00 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.\n"
    )
    found = diagnosed(text)
    assert found.outcome == "refused"
    assert "12.00 GiB too much" in found.explained[0]
    assert "20.00 GiB is held by something else" in found.explained[1]
    first = found.fixes[0]
    assert first.flag == "--gpu-memory-utilization 0.75"
    assert found.startable is True


def test_sampler_warm_up_wants_fewer_sequences_first() -> None:
    found = diagnosed(SAMPLER)
    assert found.outcome == "ran out of memory"
    # 605.88 MiB / (152,064 × 12 B) = 348 → 256
    assert found.fixes[0].flag == "--max-num-seqs 256"
    assert found.fixes[0].starts
    assert found.startable is True


AFTER_THE_POOL = """\
INFO vllm/v1 Initializing a V1 LLM engine (v0.9.1) with config: model='Qwen/Qwen2.5-VL-7B-Instruct', max_seq_len=32768, tensor_parallel_size=1
INFO Model loading took 15.6270 GiB and 3 s
INFO Free memory on device (23.20/23.57 GiB) on startup. Desired GPU memory utilization is (0.95, 22.39 GiB).
INFO Available KV cache memory: 3.10 GiB
INFO GPU KV cache size: 58,000 tokens
INFO Maximum concurrency for 32,768 tokens per request: 1.77x
ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 724.00 MiB. GPU 0 has a total capacity of 23.57 GiB of which 305.88 MiB is free. Of the allocated memory 21.90 GiB is allocated by PyTorch, and 901.00 MiB is reserved by PyTorch but unallocated.
"""


def test_a_plan_that_does_not_see_the_failure_advises_nothing() -> None:
    """The pool was there when it ran out: that a change leaves a pool says nothing."""
    found = diagnosed(AFTER_THE_POOL)
    assert found.outcome == "ran out of memory"
    assert "after the KV pool was sized" in found.explained[-1]
    assert "fragmentation" in " ".join(found.explained)
    assert {fix.basis for fix in found.fixes} == {"log"}
    # 724 − 305.88 MiB of 23.57 GiB: 0.0173 → 0.02, and 0.01 to spare; 3.10 − 0.71 GiB still hold one request.
    assert found.fixes[0].flag == "--gpu-memory-utilization 0.92"
    assert found.fixes[0].starts
    assert found.widest is not None
    assert found.widest.field == "beside", "activations are not told apart in this log"


@pytest.mark.parametrize(
    ("model", "startable"),
    [
        pytest.param("meta-llama/Llama-3.1-70B-Instruct", True, id="eight 24 GB cards hold 70B"),
        pytest.param("meta-llama/Llama-3.1-405B-Instruct", False, id="no flag makes 405B start on 24 GB"),
    ],
)
def test_weights_that_do_not_fit(tmp_path: Path, model: str, startable: bool) -> None:
    text = (
        f"INFO vllm/x Initializing a V1 LLM engine (v0.11.0) with config: model='{model}', max_seq_len=4096, "
        "tensor_parallel_size=1\nERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB. "
        "GPU 0 has a total capacity of 23.57 GiB of which 100.00 MiB is free. Of the allocated memory 23.00 GiB is "
        "allocated by PyTorch.\n"
    )
    code, out, _ = cli("doctor", written(tmp_path, text), "--gpu", "rtx-4090-24gb", "-o", "json")
    answer = json.loads(out)
    assert answer["outcome"] == "ran out of memory"
    assert "the weights themselves did not fit" in answer["explained"][-1]
    assert answer["startable"] is startable
    assert code == (0 if startable else 4)
    assert cli("compare", "--log", written(tmp_path, text), "--gpu", "rtx-4090-24gb")[0] == 0


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        pytest.param(
            "[sglang] server_args=ServerArgs(model_path='o/x', mem_fraction_static=0.8)\nRuntimeError: Loaded weights "
            "leave no GPU memory for the KV cache under --mem-fraction-static=0.8. Raise --mem-fraction-static above "
            "0.8423.\n",
            "--mem-fraction-static 0.85",
            id="sglang names the least fraction",
        ),
        pytest.param(
            "text_generation_launcher: Args {\n    model_id: \"o/x\",\n}\nERROR text_generation_launcher: "
            "RuntimeError: Not enough memory to handle 8000 prefill tokens.\n",
            "--max-batch-prefill-tokens 4000",
            id="tgi, half the prefill",
        ),
        pytest.param(
            "llama_model_loader: loaded meta data with 3 key-value pairs and 4 tensors from /m/x.gguf (version 3)\n"
            "load_tensors: offloaded 33/33 layers to GPU\nload_tensors:        CUDA0 model buffer size =  7000.00 MiB\n"
            "llama_context: n_ctx         = 131072\nggml allocating 16384.00 MiB on device 0: cudaMalloc failed: out "
            "of memory\nfailed to allocate buffer for kv cache\n",
            "--cache-type-k q8_0 --cache-type-v q8_0",
            id="llama.cpp, the KV buffer",
        ),
        pytest.param(
            "INFO vllm/x max_num_seqs (512) exceeds available Mamba cache blocks (300)\n",
            "--max-num-seqs 300",
            id="states",
        ),
    ],
)  # fmt: skip
def test_flags_in_each_engines_spelling(text: str, flag: str) -> None:
    found = diagnosed(text)
    assert found.outcome in ("refused", "ran out of memory")
    assert flag in [fix.flag for fix in found.fixes]
    assert found.explained


# --- what a log is about -----------------------------------------------------------------------------


def about(model: str, rest: str = "") -> Any:
    text = f"INFO vllm/x Initializing a V1 LLM engine (v0.11.0) with config: model='{model}', max_seq_len=8192{rest}\nModel loading took 1.0 GiB\n"
    return subject_of(read_log(io.StringIO(text)))


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama/Llama-3.1-8B-Instruct",
        "/models/meta-llama/Llama-3.1-8B-Instruct/",
        "/data/Llama-3.1-8B-Instruct",
        "/cache/huggingface/hub/models--meta-llama--Llama-3.1-8B-Instruct/snapshots/0e9e39f249a1",
    ],
)
def test_models_by_declared_name(name: str) -> None:
    found = about(name)
    assert found.model is not None
    assert found.model.name == "meta-llama/Llama-3.1-8B"


@pytest.mark.parametrize("name", ["my-org/finetune-of-llama-3.1-8b", "/etc/passwd", "../x", "8", "\\\\", ""])
def test_models_never_by_substring_and_never_by_a_path_of_the_log(name: str) -> None:
    found = about(name)
    assert found.model is None
    assert found.missing


def test_a_path_in_a_log_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert about(str(tmp_path / "config.json")).model is None


def test_a_gguf_file_name_gives_model_and_type() -> None:
    text = (
        "llama_model_loader: loaded meta data with 3 key-value pairs and 4 tensors from "
        "/m/Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf (version 3)\nload_tensors: CUDA0 model buffer size =  4403.49 MiB\n"
    )
    found = subject_of(read_log(io.StringIO(text)))
    assert found.model is not None
    assert found.model.name == "meta-llama/Llama-3.1-8B"
    assert found.precision is not None
    assert found.precision.id == "q4_k_m"


def test_a_quantization_of_the_command_line_counts() -> None:
    assert about("meta-llama/Llama-3.1-8B", ", quantization=fp8").precision.id == "fp8"
    assert about("meta-llama/Llama-3.1-8B").precision is None


def test_without_model_the_logs_terms_stand_alone() -> None:
    found = diagnosed(STARTED.replace("meta-llama/Llama-3.1-8B-Instruct", "my/finetune"))
    assert found.plan is None
    assert any("--model" in text for text in found.missing)
    assert {term.field for term in found.terms} >= {"weights_bytes", "kv_pool_bytes", "beside"}
    assert all(term.plan is None for term in found.terms)
    named = diagnosed(STARTED.replace("meta-llama/Llama-3.1-8B-Instruct", "my/finetune"), model="8b")
    assert named.plan is not None


# --- output ------------------------------------------------------------------------------------------


def test_text_keeps_to_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for text in (STARTED, REFUSED, SAMPLER):
        code, out, err = cli("doctor", written(tmp_path, text))
        assert (code, err) == (0, "")
        assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("output", ["table", "json", "csv", "md"])
def test_formats(tmp_path: Path, output: str) -> None:
    path = written(tmp_path, STARTED.replace("meta-llama/Llama-3.1-8B-Instruct", "my/finetune"))
    code, out, err = cli("doctor", path, "-o", output)
    assert (code, err) == (0, "")
    again = cli("compare", "--log", path, "-o", output)
    assert again == (0, out, "")
    if output == "json":
        answer = json.loads(out)
        assert answer["schema"] == "capplan.doctor/1"
        assert answer["missing"]


def test_control_characters_of_a_log_do_not_reach_the_terminal(tmp_path: Path) -> None:
    text = STARTED.replace("meta-llama/Llama-3.1-8B-Instruct", "evil\x1b]0;title\x07\x9b31m/x")
    for output in ("table", "md"):
        out = cli("doctor", written(tmp_path, text), "-o", output)[1]
        assert not {"\x1b", "\x07", "\x9b"} & set(out)


def test_a_log_is_read_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = types.SimpleNamespace(buffer=io.BytesIO(REFUSED.encode()))
    monkeypatch.setattr(sys, "stdin", pipe)
    code, out, _ = cli("doctor", "-", "-o", "csv")
    assert code == 0
    assert "kv_pool_bytes" in out


# --- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\n\n\n", id="blank"),
        pytest.param(
            b"GET / HTTP/1.1\nkernel: Out of memory: Killed process 1 (python)\n", id="another program"
        ),
        pytest.param(bytes(range(256)) * 400, id="binary"),
        pytest.param(b"\x1f\x8b\x08\x00" + b"\x00" * 100, id="gzip"),
        pytest.param(b"x" * 3_000_000, id="one line of 3 MB"),
        pytest.param(b"GGUF\x03\x00\x00\x00" + b"\x00" * 1000, id="a model"),
    ],
)
def test_no_engines_log(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.log"
    path.write_bytes(content)
    code, out, err = cli("doctor", str(path))
    assert (code, out) == (2, "")
    assert [line[:5] for line in err.splitlines()] == ["error", "  -->", "  = h"]


def test_gigantic_lines_do_not_hide_the_rest(tmp_path: Path) -> None:
    path = written(tmp_path, "INFO vllm " + "GPU memory " * 400_000 + "\n" + STARTED)
    assert diagnose(path, gpu="h100").log.number("kv_tokens") == 413_696


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("doctor", "absent.log"), ""),
        (("doctor",), ""),
        (("compare",), "--log"),
        (("doctor", "LOG", "--gpu", "h1000"), ""),
        (("doctor", "LOG", "--model", "no-such-model"), ""),
    ],
)
def test_unusable_arguments(tmp_path: Path, arguments: tuple[str, ...], hint: str) -> None:
    path = written(tmp_path, STARTED)
    code, out, err = cli(*(path if word == "LOG" else word for word in arguments))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 3
    assert hint in err


def test_any_mix_of_lines_gives_an_answer() -> None:
    """Lines left out, doubled, out of order and with other numbers: a diagnosis or an InputError."""
    draw = random.Random(4)
    lines = (STARTED + REFUSED + SAMPLER).splitlines(keepends=True)
    read = 0
    for _ in range(24):
        picked = [draw.choice(lines) for _ in range(draw.randint(1, 12))]
        text = "".join(picked)
        if draw.random() < 0.5:
            digits = draw.choice(["0", "-1", "99999999999", "1e308", "NaN", "0.5"])
            text = text.replace(
                draw.choice(["16384", "0.9", "256", "79.00", "4.76", "131072", "8192"]), digits
            )
        try:
            found = diagnosed(text, gpu=draw.choice(["h100", None, None]))
        except InputError:
            continue
        read += 1
        json.dumps(found.to_dict(), allow_nan=False)
    assert read > 8


# --- real lines --------------------------------------------------------------------------------------


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        if os.environ.get("CI"):
            pytest.fail(f"{name} is missing")
        pytest.skip("the shared data is not here")
    return path


def test_real_lines_of_a_vllm_server() -> None:
    found = diagnose(shared("oracles/vllm_bench/startup_log_lines.txt"))
    assert found.log.engine == "vllm"
    assert found.outcome == "started"
    terms = {term.field: term.log for term in found.terms}
    assert terms["kv_pool_bytes"] == 2 * GIB
    assert terms["kv_tokens"] == 43_648
    assert any("--model" in text for text in found.missing)


def test_real_lines_of_llama_cpp() -> None:
    found = diagnose(shared("oracles/llama_cpp_load_log_lines.txt"))
    assert found.log.engine == "llama.cpp"
    assert found.outcome in ("started", "not said")
    assert {"host_weights_bytes", "host_kv_bytes", "host_compute_bytes"} <= {
        term.field for term in found.terms
    }
