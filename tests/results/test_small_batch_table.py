"""The reader of small-batch tables: names, rows that cannot be used, files that are no table."""

import csv
from pathlib import Path

import pytest

from capplan.errors import InputError
from capplan.results import small_batch_names as names
from capplan.results.small_batch import COLUMNS, read_small_batch
from capplan.weights import weight_budget

ROW = {
    "source": "github:someone/benchmarks/README.md@0123456789ab",
    "engine": "llama.cpp",
    "model": "llama 8B",
    "quant": "Q4_K - Medium",
    "model_bytes": "4917737553",
    "gpu": "RTX-4090",
    "n_gpu": "1",
    "gen_len": "512",
    "decode_tok_s": "127.7",
    "notes": "ngl=99; params=8.03 B",
}


def table(path: Path, *changes: dict[str, str], columns: tuple[str, ...] = COLUMNS) -> Path:
    """A file with one row for each of `changes` to ROW."""
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, restval="")
        writer.writeheader()
        for change in changes:
            writer.writerow({name: cell for name, cell in (ROW | change).items() if name in columns})
    return path


def test_a_row(tmp_path: Path) -> None:
    (run,) = read_small_batch(table(tmp_path / "a.csv", {"context_depth": "1000"})).runs
    assert (run.backend, run.family, run.model.name) == ("llama.cpp-cuda", "q4", "meta-llama/Meta-Llama-3-8B")
    assert (run.host.gpu.id, run.host.gpus, run.host.board) == ("rtx-4090-24gb", 1, False)
    assert run.context == 1256
    assert run.decode_token_per_s == 127.7
    assert run.prompt_token_per_s is None
    assert run.group == ("someone/benchmarks", "llama 8B", "RTX-4090")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"decode_tok_s": ""}, "no speed"),
        ({"decode_tok_s": "0"}, "no speed"),
        ({"decode_tok_s": "fast"}, "decode_tok_s is no number"),
        ({"decode_tok_s": "nan"}, "decode_tok_s is not above 0"),
        ({"decode_tok_s": "-3"}, "decode_tok_s is not above 0"),
        ({"n_gpu": "1.5"}, "n_gpu is no whole number"),
        ({"notes": "WARN possible CPU offload of experts"}, "doubted by the collector"),
        ({"gpu": "Framework Mainboard Cluster (512GB)"}, "GPU not in the catalog"),
        ({"model": "unheard-of 8B"}, "model not in the catalog"),
        ({"quant": "Q9_Z"}, "weight format not known"),
        # 1,008 GB/s over 4.6 GB: 218 a second.
        ({"decode_tok_s": "300"}, "faster than the memory's bandwidth allows"),
        ({"decode_tok_s": "", "prefill_tok_s": "9000"}, "prompt speed of a prompt of unknown length"),
    ],
)
def test_rows_that_are_none(tmp_path: Path, change: dict[str, str], reason: str) -> None:
    found = read_small_batch(table(tmp_path / "a.csv", {}, change))
    assert len(found.runs) == 1
    assert found.rejected == {3: reason}


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="column notes is missing"):
        read_small_batch(table(tmp_path / "a.csv", {}, columns=COLUMNS[:-1]))
    with pytest.raises(InputError, match="unknown column 'tokens'"):
        read_small_batch(table(tmp_path / "b.csv", {}, columns=(*COLUMNS, "tokens")))
    with pytest.raises(InputError, match="cannot be read"):
        read_small_batch(tmp_path / "none.csv")
    (tmp_path / "c.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="no CSV text"):
        read_small_batch(tmp_path / "c.csv")


@pytest.mark.parametrize(
    ("machine", "identity"),
    [
        ("Intel 13900K (Nvidia 4090)", "rtx-4090-24gb"),
        ("Pi 5 - 8GB (AMD RX 6700 XT) 12GB", "rx-6700-xt-12gb"),
        ("Pi 500+ - 16GB (Intel Arc A310 ECO)", "arc-a310-4gb"),
        ("Intel 265K Custom PC (AMD Radeon AI Pro R9700)", "r9700-32gb"),
        ("Dell Pro Max with GB10 (Nvidia Spark)", "dgx-spark-gb10-128gb"),
        ("Radeon-8060S (Ryzen AI Max+ 395)", "radeon-8060s-128gb"),
        ("A100-80GB (330 W cap)", "a100-sxm-80gb"),
        ("M1 Max Mac Studio (10 core - 64GB)", "apple-m1-max-64gb"),
        ("M1 Ultra (48 GPU Core) 64GB", "apple-m1-ultra-48c-64gb"),
        ("Mac Studio (M3 Ultra 512GB)", "apple-m3-ultra-256gb"),
        ("M4 Mac mini (10 core - 32GB)", "apple-m4-32gb"),
        ("Apple-M1-7c", "apple-m1-7c-8gb"),
        ("Apple-M3-Max-40c", "apple-m3-max-128gb"),
        ("RTX-4080-16GB", "rtx-4080-16gb"),
        ("Tesla-P40", "p40-24gb"),
        ("Xeon Phi", None),
    ],
)
def test_gpus(machine: str, identity: str | None) -> None:
    found = names.gpu_named(machine)
    assert (found.id if found else None) == identity


@pytest.mark.parametrize(
    ("engine", "machine", "gpu", "expected"),
    [
        ("llama.cpp llama-rocm-7.2.4", "", "RX-7900-XTX", ("llama.cpp", "rocm")),
        ("llama.cpp-vulkan_radv", "", "RX-7900-XTX", ("llama.cpp", "vulkan")),
        ("llama.cpp-hip", "", "RX-7900-XTX", ("llama.cpp", "rocm")),
        ("ollama", "Ryzen 9 9950X (AMD 7900 XT)", "7900-xt", ("ollama", "rocm")),
        ("ollama", "Pi 5 - 8GB (AMD RX 7600)", "rx-7600", ("ollama", "vulkan")),
        ("MLC-LLM", "", "RTX-4090", ("mlc", "cuda")),
        ("transformers (pytorch)", "", "A100-80GB", ("transformers", "cuda")),
        ("llama.cpp", "", "Apple-M3-Max-40c", ("llama.cpp", "metal")),
    ],
)
def test_engines_and_platforms(engine: str, machine: str, gpu: str, expected: tuple[str, str]) -> None:
    found = names.gpu_named(gpu)
    assert found is not None
    assert (names.engine_of(engine), names.platform_named(engine, machine, found)) == expected


@pytest.mark.parametrize(
    ("name", "model", "kind"),
    [
        ("Qwen3.5-122B-A10B-UD-Q4_K_XL-00001-of-00003", "Qwen/Qwen3.5-122B-A10B", "Q4_K_XL"),
        ("llama-2-7b.Q4_K_M", "meta-llama/Llama-2-7b-hf", "Q4_K_M"),
        ("shisa-v2-llama3.3-70b.i1-Q4_K_M", "meta-llama/Llama-3.3-70B-Instruct", "Q4_K_M"),
        ("gpt-oss-20b-F16", "openai/gpt-oss-20b", "F16"),
        ("dots.llm1.inst-UD-Q4_K_XL", "rednote-hilab/dots.llm1.inst", "Q4_K_XL"),
        ("Llama 3.1:70b", "meta-llama/Llama-3.1-70B", ""),
        ("DeepSeek R1 14b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", ""),
        # A size alone names no model, whatever stands before it.
        ("unheard-of-8b", None, ""),
    ],
)
def test_models(name: str, model: str | None, kind: str) -> None:
    found, file_type = names.model_named(name)
    assert (found.name if found else None, file_type) == (model, kind)


@pytest.mark.parametrize(
    ("label", "parameters", "file_bytes", "expected"),
    [
        ("llama 8B", 8.03e9, None, "meta-llama/Meta-Llama-3-8B"),
        ("llama 70B", 70.55e9, None, "meta-llama/Meta-Llama-3-70B"),
        ("qwen2 3B", None, 1_825_361_100, "Qwen/Qwen2.5-3B-Instruct"),
        ("gpt-oss 20B", 20.91e9, None, "openai/gpt-oss-20b"),
        ("qwen3moe ?B - 4.25 bpw", 30.53e9, None, "Qwen/Qwen3-30B-A3B"),
        ("llama 8B", 3e9, None, None),
        ("llama ?B", None, None, None),
        ("no label", None, None, None),
    ],
)
def test_labels(label: str, parameters: float | None, file_bytes: float | None, expected: str | None) -> None:
    q4_0 = names.format_named("Q4_0", file_type="", engine="llama.cpp", model=None)
    found = names.model_labelled(label, parameters=parameters, weights=q4_0, file_bytes=file_bytes)
    assert (found.name if found else None) == expected


@pytest.mark.parametrize(
    ("quant", "file_type", "engine", "expected"),
    [
        ("Q4_K - Medium", "", "llama.cpp", "q4_k_m"),
        ("Medium", "Q4_K_XL", "llama.cpp", "q4_k_m"),
        ("UD-Q8_K_XL", "", "llama.cpp", "q8_0"),
        ("ollama default tag (mostly Q4_K_M)", "", "ollama", "q4_k_m"),
        ("int4", "", "llama.cpp", "q4_k_m"),
        ("int4", "", "exllama", "gptq"),
        ("int8", "", "ctransformers", "q8_0"),
        ("int8", "", "transformers", "int8"),
        ("GPTQ-4bit-128g-act", "", "exllamav2", "gptq"),
        ("float16", "", "vllm", "fp16"),
        ("EXL2-2.5bpw", "", "exllamav2", "exl2-2.5bpw"),
    ],
)
def test_formats(quant: str, file_type: str, engine: str, expected: str) -> None:
    found = names.format_named(quant, file_type=file_type, engine=engine, model=None)
    assert found is not None
    assert found.id == expected


def test_a_model_published_in_mxfp4() -> None:
    model, _ = names.model_named("gpt-oss-20b")
    assert model is not None
    assert names.format_named("F16", file_type="", engine="llama.cpp", model=model) is None
    whole = names.format_named("MXFP4", file_type="", engine="llama.cpp", model=model)
    # ggml-org/gpt-oss-20b-GGUF: 12.11 GB with 8-bit attention and embeddings.
    assert weight_budget(model, whole).bytes == pytest.approx(12.11e9, rel=0.005)
