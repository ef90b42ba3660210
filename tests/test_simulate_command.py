"""`capplan simulate` as typed: outputs, exit codes, errors in three lines, Ctrl-C, the replay of logs."""

import ast
import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capplan import cli, experiment_report
from capplan.cli.progress import line
from capplan.sim.experiment import Claim, Experiment
from capplan.simulate_report import LEVELS, narrowed, sparkline
from capplan.simulate_run import Progress
from tests import test_docs
from tests.accuracy import oracles

ROOT = Path(__file__).parent.parent
BASE = "simulate --model 8b --gpu h100 --price 2.5 --no-user-data"
PAGE = ROOT / "docs" / "simulate.md"
LOGS = oracles.DATA / "oracles" / "scheduler"


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def said(capsys: pytest.CaptureFixture[str], arguments: str, code: int = 0) -> str:
    assert cli.run(arguments.split()) == code
    captured = capsys.readouterr()
    return captured.out if code in (0, 130) else captured.err


def test_the_table_begins_with_the_load_and_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, f"{BASE} --request-rate 8 --requests 300 --slo chat --explain")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in text
    order = [text.index(part) for part in ("utilisation", "P50", "TTFT", "goodput", "KV usage", "the run")]
    assert order == sorted(order)
    for part in (
        "knee",
        "MSER-5",
        "± 95 %",
        "preemptions",
        "per million output tokens",
        "running",
        "waiting",
    ):
        assert part in text


def test_csv_has_a_row_a_latency(capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.DictReader(io.StringIO(said(capsys, f"{BASE} --request-rate 8 --requests 100 -o csv"))))
    assert [row["metric"] for row in rows] == ["ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s"]
    assert all(float(row["p50"]) <= float(row["p99"]) for row in rows)


def test_markdown_has_the_table_and_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, f"{BASE} --request-rate 8 --requests 100 -o md")
    assert "|  | P50 | P90 | P95 | P99 | mean | ± 95 % |" in text
    assert "\n- KV usage" in text


def test_json_is_the_answers_own(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, f"{BASE} --request-rate 8 --requests 100 --explain -o json"))
    assert found["schema"] == "capplan.simulate/1"
    assert found["explain"]
    assert found["price"]["usd_per_gpu_hour"] == 2.5


def test_one_output_token_has_no_tpot(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, f"{BASE} --request-rate 8 --requests 50 --osl 1 -o json"))
    assert found["metrics"]["tpot_s"] is None
    assert found["metrics"]["itl_s"] is None
    assert "–" in said(capsys, f"{BASE} --request-rate 8 --requests 50 --osl 1")


@pytest.mark.parametrize(
    ("arguments", "code", "what", "where"),
    [
        ("", 2, "no load", "--request-rate"),
        ("--request-rate 0", 2, "0 requests a second", "--request-rate 0"),
        ("--request-rate -1", 2, "no number", "--request-rate"),
        ("--request-rate nan", 2, "no number", "--request-rate"),
        ("--request-rate many", 2, "no number", "--request-rate"),
        ("--request-rate inf", 2, "without end", "--requests"),
        ("--request-rate 5 --concurrency 3", 2, "users who wait", "--concurrency"),
        ("--request-rate 5 --requests 0", 2, "out of range", "--requests"),
        ("--request-rate 5 --requests 1e3", 2, "no number of requests", "--requests"),
        ("--request-rate 5 --requests -4", 2, "no number of requests", "--requests"),
        ("--requests 900000000", 2, "hours and", "--requests"),
        ("--request-rate 1000000 --duration 1000000", 2, "hours and", "--duration"),
        ("--request-rate 5 --isl 0", 2, "length", "--isl 0"),
        ("--request-rate 5 --osl -3", 2, "length", "--osl -3"),
        ("--request-rate 5 --isl 1.5", 2, "length", "--isl 1.5"),
        ("--request-rate 5 --isl lognormal:mean=0,cv=1", 2, "mean", "--isl"),
        ("--request-rate 5 --arrivals gamma", 2, "burstiness", "--arrivals"),
        ("--concurrency 0", 2, "out of range", "--"),
        ("--concurrency 4 --think-time -1", 2, "pause", "--think-time"),
        ("--request-rate 5 --engine vlm", 2, "unknown engine", "--engine"),
        ("--request-rate 5 --scheduler fifo", 2, "no scheduler", "--scheduler"),
        ("--request-rate 5 --scheduler sglang", 2, "is sglang's", "--engine vllm"),
        ("--request-rate 1e-300", 2, "1e-300 requests a second", "--request-rate"),
        ("--request-rate 5 --duration 1e300", 2, "5e+300 requests would take", "--duration"),
        ("--concurrency 1000 --duration 1e9", 2, "hours and", "--concurrency, --duration"),
        ("--request-rate 5 --scheduler static", 2, "size that nobody gave", "--scheduler static"),
        ("--request-rate 5 --scheduler tgi:x=1 --engine tgi", 2, "no option 'x'", "--scheduler"),
        ("--request-rate 5 --max-new-tokens 0", 2, "out of range", "--max-new-tokens"),
        ("--request-rate 5 --max-new-tokens 900", 2, "does not go by", "--max-new-tokens"),
        ("--request-rate 5 --kv-link-gbps 0", 2, "out of range", "--kv-link-gbps"),
        ("--request-rate 5 --kv-link-ms 5", 2, "no link", "--kv-link-ms"),
        ("--request-rate 5 --kv-link-gbps 50 --step-log x.csv", 2, "two replicas in one log", "--step-log"),
        ("--request-rate 5 --warm-up x", 2, "no number", "--warm-up"),
        ("--request-rate 5 --repeat 0", 2, "out of range", "--repeat"),
        ("--request-rate 5 --slo quick", 2, "service level", "--slo"),
        ("--request-rate 5 --kv-blocks 0", 2, "out of range", "--kv-blocks"),
        ("--request-rate 5 --isl 200000 --requests 9", 2, "every request was rejected", "--isl"),
        ("--request-rate 5 --duration 0", 2, "no request came", "--duration"),
        ("--trace nowhere.csv", 2, "cannot be read", "nowhere.csv"),
        ("--trace pyproject.toml", 2, "no trace known", "pyproject.toml"),
        ("--request-rate 5 --isl 130000 --gpu-memory-utilization 0.3", 4, "would not start", "--gpu"),
        ("--engine-limits x.json", 2, "without meaning beside", "--model, --gpu"),
        ("--experiment straggler --tp 2", 2, "without meaning beside", "--tp"),
    ],
)
def test_bad_input_is_three_lines_and_its_code(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    code: int,
    what: str,
    where: str,
) -> None:
    monkeypatch.chdir(ROOT)
    lines = said(capsys, f"{BASE} {arguments}", code).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("error: ")
    assert what in lines[0]
    assert lines[1].startswith("  --> ")
    assert where in lines[1]
    assert lines[2].startswith("  = help: ")


def test_every_option_is_documented_and_every_example_current() -> None:
    source = ast.parse((ROOT / "capplan/cli/simulate.py").read_text())
    function = next(
        node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == "simulate"
    )
    text = PAGE.read_text()
    for argument in function.args.args:
        if argument.arg not in ("ctx", "output"):
            assert f"--{argument.arg.replace('_', '-')}" in text, argument.arg
    for block in test_docs.blocks(text):
        assert test_docs.current(block) == block, "run the example again and put its output into the page"


def test_every_key_of_the_json_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, f"{BASE} --request-rate 8 --requests 50 -o json"))
    text = PAGE.read_text()
    for key in found:
        assert f"`{key}" in text or key in ("schema", "metrics", "kv_waste"), key


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ("--engine-limits x.json", "without its requests"),
        ("--engine-limits x.json --requests y.csv", "answers in JSON"),
        ("--engine-limits x.json --requests y.csv -o json", "cannot be read"),
    ],
)
def test_a_replay_needs_its_files(capsys: pytest.CaptureFixture[str], arguments: str, what: str) -> None:
    assert what in said(capsys, f"simulate {arguments}", 2)


def test_no_model_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert "which model?" in said(capsys, "simulate --gpu h100 --request-rate 4", 2)


def test_a_broken_row_of_a_trace_is_named_by_its_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,5\n1,-3,5\n2,10,5\n")
    assert "line 3" in said(capsys, f"{BASE} --trace {trace}", 2)
    assert '"finished": 2' in said(capsys, f"{BASE} --trace {trace} --skip-bad-rows -o json")
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n5,10,5\n1,10,5\n")
    assert "before the row above" in said(capsys, f"{BASE} --trace {trace}", 2)


def test_ctrl_c_prints_what_there_is() -> None:
    arguments = [*BASE.split(), "--request-rate", "10", "--requests", "5000000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "capplan", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "80", "PYTHONIOENCODING": "utf-8"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    time.sleep(6)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    if out:  # a slow machine may not have served anybody yet
        assert out.startswith("partial: interrupted before its end")
        assert re.search(r"[0-9,]+ requests over", out)


def test_the_command_starts_without_heavy_libraries() -> None:
    heavy = "{'numpy', 'pandas', 'torch', 'capplan.sim'}"
    script = f"import sys, capplan.cli\nprint(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("progress", "passed_s", "expected"),
    [
        (Progress(time_s=9.0, finished=250, requests=1000), 5.0, " 25%  250 of 1,000 requests, 15 s left"),
        (Progress(time_s=9.0, finished=250, requests=None), 5.0, "250 requests, 9 s simulated"),
        (Progress(time_s=0.0, finished=0, requests=1000), 5.0, "  0%  0 of 1,000 requests"),
        (Progress(time_s=0.0, finished=9, requests=None, run=1, runs=4), 2.0, " 25%  1 of 4 runs, 6 s left"),
    ],
)
def test_progress_says_how_much_is_left(progress: Progress, passed_s: float, expected: str) -> None:
    assert line(progress, passed_s) == expected


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_the_timeline_is_as_wide_as_there_is_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = said(capsys, f"{BASE} --requests 3000").splitlines()[-4:]
    assert [row[:9].strip() for row in rows] == ["running", "waiting", "KV", ""]
    assert max(map(len, rows)) <= columns
    assert all("…" not in row for row in rows)
    assert all("≤" in row for row in rows[:3])
    # As many parts of the run as fit, 60 at most, and a label for the largest value.
    assert len(rows[0].split("≤")[0].strip()) - len("running  ") == min(60, columns - 20)


def test_a_narrower_series_keeps_its_mean() -> None:
    assert narrowed([1, 3, 5, 7], 2) == [2, 6]
    assert narrowed([1, 2], 5) == [1, 2]
    assert sum(narrowed(list(range(60)), 20)) / 20 == pytest.approx(29.5)


def test_prompts_apart_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    base = f"{BASE} --request-rate 5 --requests 100 --kv-link-gbps 50 --kv-link-ms 1"
    text = " ".join(said(capsys, f"{base} --explain").split())
    for part in (
        "for prompts and as many to decode",
        "KV over 50 Gbit/s",
        "of E2E",
        "the replica of prompts: busy",
    ):
        assert part in text
    found = json.loads(said(capsys, f"{base} -o json"))
    assert found["gpu"]["count"] == 2
    assert found["usd_per_hour"] == 5.0
    assert found["disaggregated"]["transfer_s"]["p50"] >= 1024 * 131072 / 6.25e9 + 0.001
    assert "KV over 50 Gbit/s" in said(capsys, f"{base} -o md")
    assert next(csv.DictReader(io.StringIO(said(capsys, f"{base} -o csv"))))["gpus"] == "2"


def test_sparkline_levels() -> None:
    assert sparkline([0, 1, 4, 8], 8) == f" {LEVELS[1]}{LEVELS[4]}{LEVELS[7]}"
    assert sparkline([0.0, 0.0], 1.0) == "  "
    assert sparkline([0.001], 1.0) == LEVELS[0]


def test_an_experiment_says_where_its_claim_holds() -> None:
    rows = [
        {"batch": batch, "gain": gain, "at_least_2": gain >= 2}
        for batch, gain in ((2, 1.5), (2, 2.5), (8, 2.0), (8, 4.0))
    ]
    made = Experiment(
        name="static-gain",
        source="a lesson",
        claims=(Claim(text="twice as fast", column="at_least_2"),),
        variables=("batch",),
        measure="gain",
        rows=tuple(rows),
        model="8b",
        gpu="h100",
    )
    lines = experiment_report.lines(made)
    assert "twice as fast: holds in 3 of 4 workloads (batch: 2 1/2, 8 2/2)" in lines
    assert "gain: 1.5 to 4 over 4 workloads" in lines
    text = experiment_report.markdown(made)
    assert "| batch | 2 | 2 | 1.5 | 2.5 | 1 |" in text
    assert "| batch | 8 | 2 | 2 | 4 | 2 |" in text
    assert len(experiment_report.csv(made).splitlines()) == 5
    assert experiment_report.view(made)


def test_an_unknown_experiment_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--> --experiment" in said(capsys, "simulate --experiment stragler", 2)


@pytest.mark.skipif(not LOGS.is_dir(), reason="the scheduler logs are not here")
@pytest.mark.parametrize("name", sorted(path.stem for path in LOGS.glob("*.json")))
def test_the_replay_door_writes_vllms_own_log(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    steps, requests = tmp_path / "steps.csv", tmp_path / "requests.csv"
    arguments = f"simulate --requests {LOGS / name}.requests.csv --engine-limits {LOGS / name}.json"
    text = said(capsys, f"{arguments} --step-log {steps} --request-log {requests} -o json")
    expected = (LOGS / f"{name}.steps.csv").read_text().splitlines()
    assert steps.read_text().splitlines() == expected
    found, limits = json.loads(text), json.loads((LOGS / f"{name}.json").read_text())
    assert found["steps"] == limits["steps"] == len(expected) - 1
    assert found["preemptions"] == limits["preemptions"]
    assert found["duration_s"] == pytest.approx(limits["end_us"] / 1e6)
    logged = list(csv.DictReader((LOGS / f"{name}.requests.csv").open()))
    ours = {row["index"]: row for row in csv.DictReader(requests.open())}
    for row in logged:
        mine = ours[row["id"]]
        assert float(mine["done_s"]) == pytest.approx(int(row["done_us"]) / 1e6)
        assert mine["preemptions"] == row["preemptions"]
        assert mine["cached_tokens"] == row["cached_tokens"]
