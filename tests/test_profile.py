"""`capplan profile` and what reads its files: a device whose law is known, and a tiny model on the CPU."""

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "calibrate"))
import synthetic

from capplan import catalog
from capplan.calibrate import local_fit, profile_file
from capplan.calibrate.loop import DecodeLoop
from capplan.calibrate.points import Point
from capplan.calibrate.run import QUICK_GRID
from capplan.cli import run
from capplan.errors import InputError
from capplan.latency_estimate import LatencyEstimate, figures, latency
from capplan.latency_question import LatencyQuestion
from capplan.latency_setup import Setup
from capplan.local_calibration import read

torch = pytest.importorskip("torch", reason="profiling runs on torch")
TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256,
    "vocab_size": 512, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "p.yaml"
    profile_file.save(synthetic.data(), path)
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY))
    return tmp_path / "tiny"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def profiled(tiny: Path, out: Path, *more: str) -> int:
    options = ["--clock", "thread-cpu", "--threads", "1", "--quick", "--budget", "10s", "--out", str(out)]
    return run(
        ["profile", "--device", "cpu", "--model", str(tiny), "--formats", "bf16,int4", *options, *more]
    )


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points timed for a moment only: their values do not matter here."""
    from capplan.calibrate import bench, clock, hardware, run

    monkeypatch.setattr(run, "STEP_S", 0.0)
    monkeypatch.setattr(run, "OP_S", 0.0)
    monkeypatch.setattr(bench, "CANARY_LIMIT", 100.0)
    monkeypatch.setattr(clock, "CANARY_REPEATS", 1)
    rates = {"read_bytes_per_s": 1e11, "bf16_flop_per_s": 1e12, "fp32_flop_per_s": 1e12}
    monkeypatch.setattr(hardware, "ceilings", lambda *_: rates)


# -- latency on a profiled device


def test_sizes_beyond_what_was_profiled_are_named(file: Path) -> None:
    # Timed: products of 1 to 4 rows, attention of 1 to 4 sequences with 128 to 1,024 tokens.
    def told(batch: int, context: int) -> LatencyEstimate:
        load = LatencyQuestion(
            model=synthetic.MODEL, gpu="", profile=str(file), batch=batch, isl=context, osl=2
        )
        return figures(load)

    assert [op.outside for op in told(4, 1000).decode_ops if op.outside] == []
    far = {op.outside for op in told(64, 1000).decode_ops}
    assert {"m 64 (1 to 4)", "batch 64 (1 to 4)"} <= far
    assert any("context 8,00" in op.outside for op in told(2, 8000).decode_ops)
    assert [note for note in told(64, 1000).notes if note.startswith("outside what was measured")]


def test_the_band_of_a_profile_widens_beyond_what_it_timed(file: Path) -> None:
    setup = Setup(LatencyQuestion(model=synthetic.MODEL, gpu="", profile=str(file)))
    narrow = setup.behaviour.band("tpot", False)
    made = latency(synthetic.MODEL, profile=str(file), batch=64, isl=1000, osl=2, figures_alone=True)
    assert made.tpot.high is not None
    assert made.tpot.estimate is not None
    assert made.tpot.high / made.tpot.estimate == pytest.approx(narrow.high**setup.behaviour.doubted)
    assert narrow.high > 1


@pytest.mark.parametrize(("precision", "dtype"), [("auto", "bf16"), ("int8", "w8a16"), ("int4", "w4a16")])
def test_latency_is_the_step_that_the_profile_predicts(file: Path, precision: str, dtype: str) -> None:
    """TPOT of a batch of 3 at 700 tokens: 699 in and 2 out."""
    made = figures(
        LatencyQuestion(
            model=synthetic.MODEL, gpu="", precision=precision, profile=str(file), batch=3, isl=699, osl=2
        )
    )
    name = "bf16" if precision == "auto" else precision
    step = Point(kind="step", key=(name, dtype, "bf16", 3, 700, 16, "held out", 0))
    expected = local_fit.predicted_s(read(file), catalog.load_model(synthetic.MODEL), step)
    assert made.tpot.estimate is not None
    assert made.tpot.estimate == pytest.approx(expected, rel=2e-3)
    assert made.tpot.provenance == "calibrated"
    assert made.tpot.bound is not None
    assert made.tpot.low is not None
    assert made.tpot.high is not None
    assert made.tpot.low <= made.tpot.estimate <= made.tpot.high
    assert made.gpu.id == "cpu-test-avx2-2t"


def test_profile_brings_its_memory(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    profile_file.save(synthetic.data(memory_bytes=2 << 30), path)
    assert latency(synthetic.MODEL, profile=str(path)).fits is False


def test_profile_of_another_device_is_refused(file: Path) -> None:
    with pytest.raises(InputError, match="the profile is of cpu-test-avx2-2t"):
        latency(synthetic.MODEL, gpu="h100", profile=str(file))


def test_without_gpu_and_profile() -> None:
    with pytest.raises(InputError, match="on which GPU"):
        latency(synthetic.MODEL)


def test_what_a_cpu_profile_lacks_is_not_borrowed_from_a_gpu(file: Path) -> None:
    with pytest.raises(InputError, match="the profile has no experts"):
        latency("mixtral-8x7b", profile=str(file), precision="int4", isl=64, osl=8)


def test_dtype_that_stands_in_is_no_calibration(tmp_path: Path) -> None:
    data = synthetic.data()
    del data["fit"]["gemm"]["w4a16"]
    from capplan.local_calibration import fit_hash

    data["hash"] = fit_hash(data["fit"])
    profile_file.save(data, tmp_path / "p.yaml")
    made = latency(synthetic.MODEL, profile=str(tmp_path / "p.yaml"), precision="int4", figures_alone=True)
    assert made.tpot.provenance == "estimate"
    assert any("w8a16 stands in" in note for note in made.notes)


def test_latency_command(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["latency", "--model", synthetic.MODEL, "--profile", str(file), "-o", "json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["gpu"]["id"] == "cpu-test-avx2-2t"
    assert made["tpot_s"]["provenance"] == "calibrated"


def test_newest_own_profile_of_that_very_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "data" / "capplan" / "calibrations"
    profile_file.save(synthetic.data(key="h100-sxm-80gb", kind="gpu"), folder / "mine.yaml")
    command = ["latency", "--model", synthetic.MODEL, "-o", "json"]
    assert run([*command, "--gpu", "h100"]) == 0
    made = capsys.readouterr()
    assert "your own profile mine.yaml" in made.err
    assert json.loads(made.out)["tpot_s"]["provenance"] == "calibrated"
    for others in (["--gpu", "h100", "--no-user-data"], ["--gpu", "h200"]):
        assert run([*command, *others]) == 0
        made = capsys.readouterr()
        assert "own profile" not in made.err
        assert json.loads(made.out)["tpot_s"]["provenance"] == "estimate"


# -- files


def test_verify_reports_every_step_held_out(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "verify", str(file), "-o", "json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert len(made["held_out"]) == 12
    assert {row["kernels"] for row in made["speed_up"]} == {"w4a16", "w8a16"}


def test_report_fits_a_terminal(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["profile", "verify", str(file)]) == 0
    text = capsys.readouterr().out
    assert "steps held out, predicted from the file" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_import_list_export(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "import", str(file)]) == 0
    (tmp_path / "data" / "capplan" / "calibrations" / "broken.yaml").write_text("schema: x\n")
    capsys.readouterr()
    assert run(["list", "profiles", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["device"] for row in rows] == ["cpu-test-avx2-2t", None]
    assert "schema" in rows[1]["problem"]
    assert run(["profile", "export", str(file), "--out", str(tmp_path / "sent.yaml")]) == 0
    assert read(tmp_path / "sent.yaml").fit == read(file).fit


def test_merge_command(file: Path, tmp_path: Path) -> None:
    assert run(["profile", "merge", str(file), str(file), "--out", str(tmp_path / "both.yaml")]) == 0
    assert read(tmp_path / "both.yaml").hardware_key == "cpu-test-avx2-2t"


def test_no_profiles_yet(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "profiles"]) == 0
    assert "no profiles yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["verfy", "x"], "no action", id="a typo"),
        pytest.param(["verify"], "takes one file", id="no file"),
        pytest.param(["verify", "none.yaml"], "cannot be read", id="a missing file"),
        pytest.param(["merge", "a.yaml"], "two files", id="one file to merge"),
        pytest.param(["--budget", "soon"], "no budget", id="no time"),
        pytest.param(["--formats", ","], "nothing named", id="no format"),
        pytest.param(["--grid", "special"], "no grid", id="another grid"),
        pytest.param(["--device", "cpu", "--formats", "int5"], "int5", id="an unknown format"),
        pytest.param(["--device", "cpu", "--formats", "fp8"], "multiplies no FP8", id="FP8 on a CPU"),
        pytest.param(["--device", "cpu", "--kv-dtypes", "int3"], "no KV cache", id="another KV dtype"),
        pytest.param(["--device", "cpu", "--clock", "sun"], "no clock", id="another clock"),
        pytest.param(["--device", "cpu", "--threads", "9999"], "9999 threads", id="too many threads"),
        pytest.param(["--device", "cpu", "--model", "mixtral-8x7b"], "no plain dense", id="experts"),
        pytest.param(["--compare-to", "h1000"], "h1000", id="an unknown GPU beside it"),
    ],
)
def test_bad_input(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "= help:" in error


# -- devices


def test_no_gpu_offers_the_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(["profile", "--model", "llama-3.2-1b"]) == 2
    error = capsys.readouterr().err
    assert "torch sees no GPU here" in error
    assert "--device cpu" in error


def test_driver_that_does_not_go_with_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def mismatch() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nmore")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", mismatch)
    assert run(["profile"]) == 2
    assert "driver on your system is too old (found version 11040)." in capsys.readouterr().err


def test_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = builtins.__import__

    def missing(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "torch":
            raise ImportError(name)
        return found(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert run(["profile", "--device", "cpu"]) == 5
    assert "pip install 'capplan[profile]'" in capsys.readouterr().err


# -- whole runs of a tiny model

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


@pytest.mark.usefixtures("hasty")
def test_tiny_model_end_to_end(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from capplan.calibrate import hardware

    monkeypatch.setattr(hardware, "last_level_cache_bytes", lambda: None)
    out = tmp_path / "own.yaml"
    assert profiled(tiny, out, "-o", "json") == 0
    told, said = capsys.readouterr()
    made = json.loads(told)
    local = read(out)
    assert local.data["run"]["assumed"] == ["cache_bytes"]
    assert "warning: the system does not tell the last-level cache: 32.00 MiB are assumed" in said
    assert set(local.fit["gemm"]) == {"bf16", "w4a16"}
    assert {row["precision"] for row in made["held_out"]} == {"bf16", "int4"}
    assert local.data["run"]["model"] == "tiny"
    assert str(tmp_path) not in out.read_text()
    assert not list(tmp_path.glob("*.jsonl"))
    answer = latency(str(tiny), profile=str(out), precision="int4", isl=64, osl=16, figures_alone=True)
    assert answer.tpot.estimate is not None
    assert 0 < answer.tpot.estimate < 1
    assert [note for note in answer.notes if "assumed the size of the last-level cache" in note]


@pytest.mark.usefixtures("hasty")
def test_a_moving_machine_is_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every canary moves: all points are void, and no file is made of them."""
    from capplan.calibrate import bench

    monkeypatch.setattr(bench, "CANARY_LIMIT", -1.0)
    assert profiled(tiny, tmp_path / "own.yaml") == 2
    assert "no point of products counts: canary moved" in capsys.readouterr().err
    assert not (tmp_path / "own.yaml").exists()


@pytest.mark.usefixtures("hasty")
def test_wall_clock_gives_way_on_a_busy_machine(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Idle at the start, then every canary moves on the wall clock: one thread's own time instead."""
    from capplan.calibrate import clock, profile_question

    monkeypatch.setattr(profile_question, "cpu_share", lambda *_, **__: 1.0)
    whole = clock.Canary.moved

    def moved(self: clock.Canary) -> float:
        whole(self)
        return 1e3 if self.clock.name == "wall" else 0.0

    monkeypatch.setattr(clock.Canary, "moved", moved)
    options = ["--quick", "--budget", "20s", "--formats", "bf16", "--out", str(tmp_path / "own.yaml")]
    assert run(["profile", "--device", "cpu", "--model", str(tiny), *options]) == 0
    assert "again with one thread, timed by its own CPU time" in capsys.readouterr().err
    assert read(tmp_path / "own.yaml").data["run"]["clock"] == "thread-cpu"


@pytest.mark.usefixtures("hasty")
def test_killed_run_goes_on(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted at the fifth start of sequences; resumed, it starts none of the first four again."""
    out, whole = tmp_path / "own.yaml", DecodeLoop.start
    started: list[tuple[int, int]] = []

    def interrupted(self: DecodeLoop, *, batch: int, context: int, **options: Any) -> None:
        if len(started) == 4:
            raise KeyboardInterrupt
        if self.shape.layers == TINY["num_hidden_layers"]:
            started.append((batch, context))
        whole(self, batch=batch, context=context, **options)

    monkeypatch.setattr(DecodeLoop, "start", interrupted)
    assert profiled(tiny, out) == 130
    assert "--resume" in capsys.readouterr().err
    first = list(started)
    started[:] = []

    def counted(self: DecodeLoop, *, batch: int, context: int, **options: Any) -> None:
        if self.shape.layers == TINY["num_hidden_layers"]:
            started.append((batch, context))
        whole(self, batch=batch, context=context, **options)

    monkeypatch.setattr(DecodeLoop, "start", counted)
    assert profiled(tiny, out, "--resume") == 0
    assert read(out).error["step"]
    assert first == list(QUICK_GRID[:4])
    assert started[0] == QUICK_GRID[4]


@pytest.mark.usefixtures("hasty")
def test_out_of_memory_is_recorded_and_the_rest_goes_on(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = DecodeLoop.start

    def short(self: DecodeLoop, *, batch: int, context: int, **options: Any) -> None:
        if batch * context > 2000:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        whole(self, batch=batch, context=context, **options)

    monkeypatch.setattr(DecodeLoop, "start", short)
    out = tmp_path / "own.yaml"
    assert profiled(tiny, out) == 0
    assert "does not fit into memory: left out" in capsys.readouterr().err
    rows = read(out).data["points"]["step"]["rows"]
    assert "out of memory" in {row[-1] for row in rows}


@pytest.mark.usefixtures("hasty")
def test_layers_that_memory_does_not_hold(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def short(self: DecodeLoop, layers: int) -> None:
        raise MemoryError

    monkeypatch.setattr(DecodeLoop, "extend", short)
    assert profiled(tiny, tmp_path / "own.yaml") == 0
    assert "memory holds 2 of 3 layers" in capsys.readouterr().err


@pytest.mark.usefixtures("hasty")
def test_cut_model_is_timed_whole_too(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where time allows two layers of three: anchors of one, two and three; held out of two and three."""
    from capplan.calibrate import run as running

    monkeypatch.setattr(running, "STEPS_A_FORMAT", 10**9)
    assert profiled(tiny, tmp_path / "own.yaml", "--formats", "bf16") == 0
    table = read(tmp_path / "own.yaml").data["points"]["step"]
    use, layers = (table["cols"].index(name) for name in ("use", "layers"))
    seen = {(row[use], row[layers]) for row in table["rows"]}
    assert {("anchor", 1), ("anchor", 2), ("anchor", 3), ("held out", 2), ("held out", 3)} <= seen


@pytest.mark.usefixtures("hasty")
def test_format_that_does_not_run_here_is_left_out(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from capplan.calibrate import profile, step_check

    def picky(shape: Any, dtype: str, device: Any) -> dict[str, float]:
        if dtype == "w4a16":
            raise RuntimeError('"int4" not implemented for this device\nmore')
        return step_check.check_step(shape, dtype, device)

    monkeypatch.setattr(profile, "check_step", picky)
    assert profiled(tiny, tmp_path / "own.yaml") == 0
    assert 'int4 does not run on this device ("int4" not implemented' in capsys.readouterr().err
    assert set(read(tmp_path / "own.yaml").fit["gemm"]) == {"bf16"}


@pytest.mark.usefixtures("hasty")
def test_another_error_is_not_swallowed(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = DecodeLoop.start

    def broken(self: DecodeLoop, *, batch: int, context: int, **options: Any) -> None:
        if self.shape.layers == TINY["num_hidden_layers"]:
            raise RuntimeError("a kernel's own fault")
        whole(self, batch=batch, context=context, **options)

    monkeypatch.setattr(DecodeLoop, "start", broken)
    with pytest.raises(RuntimeError, match="own fault"):
        profiled(tiny, tmp_path / "own.yaml")
