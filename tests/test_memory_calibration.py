"""Memory calibrations: saved from a log, read strictly, used by vram."""
# ruff: noqa: E501  (log lines are as long as the engines make them)

import io
import json
from pathlib import Path

import pytest
import yaml

from capplan import memory_calibration
from capplan.engines.log_reader import read_log
from capplan.errors import InputError
from capplan.units import GIB
from tests.doctor_logs import AS_MEASURED, STARTED, cli, written


def test_saved_and_read_back(tmp_path: Path) -> None:
    target = tmp_path / "h100.yaml"
    code, _, err = cli("doctor", written(tmp_path, STARTED), "--gpu", "h100", "--save", str(target))
    assert code == 0
    assert "vllm 0.11.0 on h100-sxm-80gb" in err
    found = memory_calibration.read(target)
    assert found.engine == "vllm"
    assert found.version == "0.11.0"
    assert found.gpu_id == "h100-sxm-80gb"
    sizes = {"activation": 5.25, "non_torch": 0.35, "cuda_graphs": 0.50}
    assert found.terms == {name: pytest.approx(gib * GIB, abs=1) for name, gib in sizes.items()}
    assert found.overhead_bytes == pytest.approx(6.10 * GIB, abs=3)
    assert found.state["max_num_batched_tokens"] == 8192
    assert found.state["model"] == "meta-llama/Llama-3.1-8B"


def test_terms_that_are_not_told_apart_are_saved_together(tmp_path: Path) -> None:
    text = "\n".join(line for line in STARTED.splitlines() if "Free memory" not in line)
    text = text.replace("'max_num_seqs': 256", "'max_num_seqs': 256, 'gpu_memory_utilization': 0.9")
    text += "\nINFO Initial free memory: 78.70 GiB; Requested memory: 0.9 (util), 71.10 GiB\n"
    found = memory_calibration.from_log(read_log(io.StringIO(text)), model=None, gpu_id=None)
    # 71.10 − 15.00 − 50.50, and the graphs beside it, outside the fraction in 0.11
    assert found.terms == {
        "beside_weights_and_kv": pytest.approx(5.60 * GIB, abs=3),
        "cuda_graphs": pytest.approx(0.5 * GIB, abs=1),
    }


def test_nothing_of_the_machine_is_written(tmp_path: Path) -> None:
    text = STARTED.replace("meta-llama/Llama-3.1-8B-Instruct", "/home/ada/secret-model")
    text = text.replace("quantization=None", "kv_cache_dtype='/home/ada/x'")
    target = tmp_path / "out.yaml"
    folder = tmp_path / "host-of-ada"
    folder.mkdir()
    assert cli("doctor", written(folder, text), "--model", "8b", "--save", str(target))[0] == 0
    content = target.read_text()
    for word in ("ada", "secret", str(tmp_path), "home"):
        assert word not in content
    assert yaml.safe_load(content)["origin"] == "local"


def test_save_overwrites_only_with_force(tmp_path: Path) -> None:
    log, target = written(tmp_path, STARTED), tmp_path / "out.yaml"
    target.write_text("mine\n")
    code, out, err = cli("doctor", log, "--save", str(target))
    assert (code, out) == (2, "")
    assert "--force" in err
    assert target.read_text() == "mine\n"
    assert cli("doctor", log, "--save", str(target), "--force")[0] == 0
    assert memory_calibration.read(target).engine == "vllm"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine.log", "out.yaml"]
    assert cli("doctor", log, "--save", str(tmp_path / "no" / "out.yaml"))[0] == 2


def test_nothing_measured_is_nothing_to_save(tmp_path: Path) -> None:
    text = "INFO vllm/x Initializing a V1 LLM engine (v0.11.0) with config: model='a/b'\nModel loading took 1.0 GiB\n"
    code, _, err = cli("doctor", written(tmp_path, text), "--save", str(tmp_path / "x.yaml"))
    assert code == 2
    assert "nothing beside weights and KV cache" in err


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    target = tmp_path / "saved.yaml"
    found = memory_calibration.from_log(read_log(io.StringIO(STARTED)), model=None, gpu_id="h100-sxm-80gb")
    memory_calibration.save(found, target)
    return target


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("kind: memory", "kind: step", "memory"),
        ("capplan.calibration/1", "capplan.calibration/2", "capplan.calibration/1"),
        ("  terms:", "  terns:", "terms"),
        ("    activation:", "    activations:", "activation"),
        ("    activation: ", "    activation: 1", "changed after it was measured"),
        ("    activation: ", "    activation: -", "outside"),
        ("origin: local", "origin: local\nhost: x", "host"),
        ("state:", "state:\n  user: x", "user"),
        ("schema:", "- [[", "broken YAML"),
    ],
)
def test_calibrations_are_read_strictly(saved: Path, before: str, after: str, said: str) -> None:
    text = saved.read_text()
    assert before in text
    saved.write_text(text.replace(before, after, 1))
    with pytest.raises(InputError) as error:
        memory_calibration.read(saved)
    assert said in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\x00\xff\xfe", b"[" * 100_000, b"a: 1\n", b"x" * (2 << 20)])
def test_what_is_no_calibration(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    for bad in (path, tmp_path, tmp_path / "absent", "a\0b"):
        with pytest.raises(InputError):
            memory_calibration.read(bad)


def test_vram_takes_measured_terms_for_the_rule_of_thumb(saved: Path) -> None:
    arguments = ("vram", "--model", "8b", "--gpu", "h100", "--calibration", str(saved), "-o", "json")
    code, out, _ = cli(*arguments)
    answer = json.loads(out)
    assert code == 0
    # 5.25 + 0.35 + 0.50
    assert answer["overhead"]["bytes"] == pytest.approx(6.10 * GIB, abs=3)
    assert answer["overhead"]["rule"] == "measured: vllm 0.11.0 on h100-sxm-80gb"
    assert [part["name"] for part in answer["overhead"]["parts"]] == [
        "activation",
        "non_torch",
        "cuda_graphs",
    ]
    without = json.loads(cli(*arguments[:5], "-o", "json")[1])
    assert answer["total"]["bytes"] - without["total"]["bytes"] == (
        answer["overhead"]["bytes"] - without["overhead"]["bytes"]
    )
    assert "measured: vllm 0.11.0" in cli(*arguments[:-2])[1]


def test_an_engines_plan_takes_measured_terms(saved: Path) -> None:
    arguments: tuple[str, ...] = ("vram", "--model", "8b", "--gpu", "h100", "-o", "json", *AS_MEASURED)
    plain = json.loads(cli(*arguments)[1])["engine"]
    engine = json.loads(cli(*arguments, "--calibration", str(saved))[1])["engine"]
    terms = engine["terms"]
    assert terms["activation"] == pytest.approx(5.25 * GIB, abs=1)
    assert terms["cuda_graphs_outside"] == pytest.approx(
        0.50 * GIB, abs=1
    )  # outside the fraction before 0.21
    pool = terms["budget"] - terms["weights"] - terms["activation"] - terms["non_torch"]
    assert engine["kv_pool"] == {"bytes": pool, "low_bytes": pool, "high_bytes": pool}
    assert engine["kv_tokens"] == pool // (16 * 131072) * 16
    assert engine["kv_tokens"] < plain["kv_tokens"]
    assert engine["starts"] is True
    # Under other settings the band stays, and it says which.
    arguments = tuple("4096" if word == "8192" else word for word in arguments)
    other = json.loads(cli(*arguments, "--calibration", str(saved))[1])["engine"]
    assert other["kv_pool"]["low_bytes"] < other["kv_pool"]["bytes"]
    assert any("max_num_batched_tokens 4096 (measured at 8192)" in note for note in other["notes"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--calibration", "absent.yaml"), "absent.yaml"),
        (("--calibration", "SAVED", "--overhead", "1GB"), "--overhead"),
        (("--calibration", "SAVED", "--engine", "sglang"), "measured with vllm"),
    ],
)
def test_calibrations_that_do_not_apply(saved: Path, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = cli(
        *("vram", "--model", "8b", "--gpu", "h100"),
        *(str(saved) if word == "SAVED" else word for word in arguments),
    )
    assert (code, out) == (2, "")
    assert said in err
