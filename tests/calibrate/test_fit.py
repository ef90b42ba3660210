"""Folds, bands, and calibrations written from a folder: by function and by command."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from capplan import catalog
from capplan.calibrate import fit, forms, write
from capplan.calibrate.tables import Table
from capplan.cli import run
from capplan.errors import InputError


def test_a_group_is_never_on_both_sides() -> None:
    groups = [f"{number % 7}" for number in range(70)]
    folds = fit.fold_of(groups)
    assert {
        len({fold for name, fold in zip(groups, folds, strict=True) if name == one}) for one in groups
    } == {1}
    assert set(folds.tolist()) == {0, 1, 2, 3}


def test_a_band_holds_four_fifths_of_what_comes_next() -> None:
    """Of few values it is wider than their own P10–P90."""
    random = np.random.default_rng(0)
    assert list(fit.band(np.arange(1.0, 100.0))) == pytest.approx([10, 90], abs=0.1)
    inside = []
    for _ in range(2000):
        low, high = fit.band(random.normal(size=12))
        inside.append(low <= random.normal() <= high)
    assert 0.75 <= np.mean(inside) <= 0.85


def made(folder: Path, memory: float = 0.8) -> Path:
    """A folder with times of GEMMs that one set of numbers gives exactly."""
    gpu = catalog.load_gpu("h100-sxm-80gb")
    rows = ["gpu,backend,backend_version,kernel,dtype,m,n,k,latency_ms"]
    numbers = {
        "t0_us": 4.0, "compute": 0.7, "memory": memory, "p": 3.0, "steps": 0.5, "half_rows": 10.0,
        "quantise": 0.01, "cache_reach": 0.7, "cache_speed": 1.5, "tile_m": 16.0, "tile_n": 128.0,
    }  # fmt: skip
    shapes = [(m, n, k) for n, k in ((4096, 4096), (8192, 2048), (2048, 8192), (28672, 8192), (6144, 6144))
              for m in (1, 16, 64, 256, 1024, 4096)]  # fmt: skip
    columns = {
        name: np.array(values, dtype=float)
        for name, values in zip("mnk", zip(*shapes, strict=True), strict=True)
    }
    table = Table(
        op="gemm", gpu_id=gpu.id, dtype="bf16", engine="vllm", groups=(),
        columns={**columns, "copies": np.full(len(shapes), 6.0)}, seconds=np.ones(len(shapes)),
    )  # fmt: skip
    for (m, n, k), seconds in zip(shapes, forms.form(table, gpu)(numbers), strict=True):
        rows.append(f"h100_sxm,vllm,1.0,x,bfloat16,{m},{n},{k},{1e3 * seconds:.9f}")
    (folder / "gemm.csv").write_text("\n".join(rows) + "\n")
    return folder


def test_a_folder_becomes_a_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(["calibrate", "fit", str(made(tmp_path)), "--out", str(out), "-o", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "capplan.calibrate/1"
    (error,) = answer["errors"]
    assert (error["gpu"], error["operation"], error["rows"]) == ("h100-sxm-80gb", "gemm", 30)
    assert error["median_pct"] < 3
    document = yaml.safe_load((out / answer["files"][0]).read_text())
    assert document["schema"] == write.SCHEMA
    assert document["hash"] == write.fit_hash(document["fit"])
    found = document["fit"]["gemm"]["bf16"]["vllm"]
    assert len(found) <= 12
    assert found["memory"] == pytest.approx(0.8, rel=0.03)
    assert document["validity"]["gemm"]["bf16"]["vllm"] == {
        "m": [1, 4096],
        "n": [2048, 28672],
        "k": [2048, 8192],
    }
    assert document["sources"][0]["rows"] == 30


def test_the_table_is_readable_at_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", "fit", str(made(tmp_path)), "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "h100-sxm-80gb" in "".join(lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "nowhere"], "no such folder"),
        (["fit", "."], "no measured table in it"),
        (["train", "."], "no action 'train'"),
    ],
    ids=["no folder", "nothing in it", "action"],
)
def test_what_cannot_be_fitted_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["calibrate", *arguments, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert message in said[0]
    assert len(said) == 3


def test_a_profile_without_its_widths_says_so(tmp_path: Path) -> None:
    (tmp_path / "meta.yaml").write_text("gpu: NVIDIA GeForce RTX 4090\nmodel: meta-llama/Llama-3.1-8B\n")
    (tmp_path / "dense.csv").write_text("layer,tokens,time_us\n")
    with pytest.raises(InputError, match="engine_effective"):
        write.read([tmp_path])


def test_a_layer_profile_becomes_products_and_moves(tmp_path: Path) -> None:
    (tmp_path / "meta.yaml").write_text(
        "gpu: NVIDIA GeForce RTX 4090\nmodel: meta-llama/Llama-3.1-8B\nengine_effective:\n  hf_overrides:\n"
        "    num_attention_heads: 32\n    num_key_value_heads: 8\n    intermediate_size: 14336\n"
        "    vocab_size: 128256\n"
    )
    (tmp_path / "dense.csv").write_text("layer,tokens,time_us\nqkv_proj,16,56\nact_fn,16,3\nsampler,1,9\n")
    (tmp_path / "attention.csv").write_text(
        "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n64,128,0,0,14\n0,0,4,1024,36\n64,0,4,1024,40\n"
    )
    measured = write.read([tmp_path])
    tables = {table.op: table for table in measured.tables()}
    gemm = tables["gemm"].columns
    assert (gemm["m"][0], gemm["n"][0], gemm["k"][0]) == (16, (32 + 16) * 128, 4096)
    assert tables["elementwise"].columns["bytes_moved"][0] == 16 * 3 * 14336 * 2
    assert tables["prefill_attention"].columns["pairs"][0] == 64 * 128 + 64 * 65 / 2
    assert tables["decode_attention"].columns["kv_tokens"][0] == 4096
    (count,) = measured.counts.values()
    assert (count.rows, sum(count.excluded.values())) == (6, 2)
