"""`capplan check`: statuses, exit codes, formats, determinism; what cannot be evaluated fails."""

import json
import socket
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capplan import answers, check_report
from capplan.baseline import Baseline
from capplan.check import CheckReport, Status, check_paths, scenario_files
from capplan.cli import run
from capplan.errors import ExitStatus, InputError
from capplan.scenario import load_scenario

ROOT = Path(__file__).parent.parent
HEAD = "capplan: 1\nmodel: 8b\n"
HOLDS = f"{HEAD}precision: int4\nfleet: {{gpu: l40s}}\nworkload: {{users: 64}}\nexpect: {{vram.fits: true}}\n"
FAILS = HOLDS.replace("64", "640")
BROKEN = "capplan: 1\nmodle: 8b\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work from, so that paths in reports are short."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def statuses(report: CheckReport) -> list[Status]:
    return [scenario.status for scenario in report.scenarios]


def test_the_exit_code_is_the_worst_of_2_3_0(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, a=HOLDS)
    assert run(["check", "."]) == ExitStatus.OK
    write(folder, b=FAILS)
    assert run(["check", "."]) == ExitStatus.EXPECTATION
    write(folder, c=BROKEN)
    assert run(["check", "."]) == ExitStatus.INPUT
    out = capsys.readouterr().out
    assert "1 of 3 scenarios hold, 1 failed, 1 cannot be used" in out
    assert "--> c.yaml:2:1" in out


@pytest.mark.parametrize(
    "lines",
    [
        "expect: {vram.headroom_bytes: {at_least: 1GiB}}",  # no GPU
        "expect: {latency.ttft_ms: {at_most: 800}}",  # no GPU, no lengths
        "expect: {cost.usd_per_month: {at_most: 800}}",  # no GPU
        "fleet: {gpu: h100}\nexpect: {vram.total.bytes: {within: 5% of baseline}}",
        "fleet: {gpu: h100}\nexpect: {vram.max_users: {at_least: 1, confidence: p90}}",
        "fleet: {gpu: h100}\nlora_slots: 2\nlora: ['rank=8,targets=q_proj']\n"
        "workload: {users: 1, isl: 8, osl: 8}\nexpect: {latency.ttft_ms: {at_most: 800}}",
        "fleet: {gpu: h100}",  # nothing expected
    ],
)
def test_what_cannot_be_evaluated_fails(
    folder: Path, lines: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "socket", lambda *_, **__: pytest.fail("the network is not asked"))
    write(folder, a=f"{HEAD}{lines}\n")
    assert run(["check", "a.yaml"]) == ExitStatus.EXPECTATION
    assert "could not be evaluated" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("lines", "line", "says"),
    [
        ("fleet: {gpu: h1000}\nexpect: {vram.fits: true}", 3, "unknown gpu"),
        ("precision: fp9\nexpect: {vram.fits: true}", 3, "unknown format"),
        ("workload:\n  users: 8\n  isl: 4\n  context: 2\nexpect: {vram.fits: true}", 5, "context"),
        ("fleet: {gpu: h100}\nexpect: {vram.fitz: true}", 4, "no figure fitz"),
        (
            "engine: {max_model_len: 9}\nworkload: {context: 99}\nfleet: {gpu: l4}\nexpect: {vram.fits: 1}",
            4,
            "9",
        ),
    ],
)
def test_a_question_that_cannot_be_asked_points_to_its_line(
    folder: Path, lines: str, line: int, says: str
) -> None:
    write(folder, a=f"{HEAD}{lines}\n")
    report = check_paths(["a.yaml"])
    assert report.exit_status is ExitStatus.INPUT
    (result,) = report.scenarios[0].results
    assert (result.status, result.place.line) == (Status.UNUSABLE, line)
    assert says in result.got
    assert result.hint


def test_one_bad_value_is_told_once(folder: Path) -> None:
    lines = "fleet: {gpu: h1000}\nexpect: {vram.fits: true, vram.max_users: 3, vram.total.bytes: 1}\n"
    write(folder, a=HEAD + lines)
    assert len(check_paths(["a.yaml"]).scenarios[0].results) == 1


def test_files_are_found_in_order_and_names_with_a_dash_below_are_left_out(folder: Path) -> None:
    (folder / "z").mkdir()
    (folder / "_shared").mkdir()
    for name in ("b.yaml", "a.yml", "_base.yaml", ".hidden.yaml", "z/c.yaml", "_shared/d.yaml", "readme.md"):
        (folder / name).write_text(HOLDS)
    assert scenario_files(["."]) == ["a.yml", "b.yaml", "z/c.yaml"]
    assert scenario_files(["_base.yaml", "b.yaml", "."]) == ["_base.yaml", "b.yaml", "a.yml", "z/c.yaml"]
    with pytest.raises(InputError, match="no such file"):
        scenario_files(["nothing"])
    (folder / "empty").mkdir()
    with pytest.raises(InputError, match="no scenario files"):
        scenario_files(["empty"])


def test_paths_that_are_not_there_are_exit_code_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "nothing"]) == ExitStatus.INPUT
    assert "--> nothing" in capsys.readouterr().err


def test_does_not_fit_comes_with_the_arithmetic(folder: Path) -> None:
    write(folder, a=FAILS)
    (result,) = check_paths(["a.yaml"]).scenarios[0].results
    # 640 × 4,096 tokens × 128 KiB = 320 GiB of KV cache, 5.31 GiB of weights, 1.06 GiB of overhead.
    assert result.hint == "326.37 GiB needed on a GPU, 44.99 GiB there; room for 77 users"


def test_fail_fast_stops_after_the_first(folder: Path) -> None:
    write(folder, a=HOLDS, b=FAILS, c=BROKEN)
    for jobs in (1, 2):
        report = check_paths(["."], fail_fast=True, jobs=jobs)
        assert statuses(report) == [Status.HOLDS, Status.FAILS]
        assert report.stopped
    assert len(check_paths(["a.yaml"], fail_fast=True).scenarios) == 1


def test_the_same_bytes_whatever_the_processes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, **{f"s{number}": HOLDS.replace("64", str(number)) for number in range(40, 90, 5)})
    write(
        folder, m=f"{HEAD}matrix: {{workload.users: [1, 2]}}\nexpect: {{vram.max_users: {{at_least: 1}}}}\n"
    )
    made = {}
    for jobs in ("1", "2", "3", "0"):
        for name in ("json", "table", "junit", "github", "markdown", "csv"):
            run(["check", ".", "--format", name, "--jobs", jobs])
            made.setdefault(name, set()).add(capsys.readouterr().out)
    assert {name: len(texts) for name, texts in made.items()} == dict.fromkeys(made, 1)
    # And in another process, with other hash seeds.
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "capplan", "check", ".", "-o", "json"],
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed, "PATH": "", "LANG": "C"},
            check=False,
        )
        assert {done.stdout} == made["json"]


def test_a_user_s_profiles_gpus_and_clock_change_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, a=HOLDS.replace("vram.fits: true", "cost.usd_per_month: {at_least: 1}, vram.fits: true"))
    run(["check", ".", "-o", "json"])
    first = capsys.readouterr().out
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, str(folder / "elsewhere"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    run(["check", ".", "-o", "json"])
    assert capsys.readouterr().out == first


def figure(**values: float) -> dict[str, Any]:
    return {"bound": None, "low": None, "high": None, "provenance": "estimate", **values}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Speeds without a calibration: what `latency` is asked, and a fixed answer."""
    asked: list[Any] = []

    def figures(question: Any) -> Any:
        asked.append(question)
        answer = {
            "schema": "capplan.latency/1",
            "engine": {"name": "vllm"},
            "ttft_s": figure(estimate=0.5, low=0.3, high=0.9),
            "output_token_per_s": figure(estimate=500.0, low=400.0, high=700.0),
        }
        return SimpleNamespace(
            to_dict=lambda: answer,
            served=SimpleNamespace(steady=question.request_per_s != 99, running=36.2),
            e2e=SimpleNamespace(estimate=3.0),
        )

    monkeypatch.setattr("capplan.latency_estimate.figures", figures)
    return asked


FAST = f"{HEAD}fleet: {{gpu: h100, replicas: 2}}\nworkload: {{request_per_s: 12, isl: 2k, osl: 256}}\n"


@pytest.mark.parametrize(
    ("expected", "status", "got"),
    [
        ("latency.ttft_ms: {at_most: 800}", Status.HOLDS, "500 ms"),
        ("latency.ttft_ms: {at_most: 800, confidence: p90}", Status.FAILS, "900 ms"),
        ("latency.output_token_per_s: {at_least: 450, confidence: p90}", Status.FAILS, "400"),
        ("latency.output_token_per_s: {at_least: 450, confidence: p10}", Status.HOLDS, "700"),
    ],
)
def test_latency_is_judged_at_the_side_asked_for(
    folder: Path, told: list[Any], expected: str, status: Status, got: str
) -> None:
    write(folder, a=f"{FAST}expect: {{{expected}}}\n")
    (result,) = check_paths(["a.yaml"]).scenarios[0].results
    assert (result.status, result.got) == (status, got)


def test_the_load_is_shared_by_the_replicas(folder: Path, told: list[Any]) -> None:
    write(folder, a=f"{FAST}expect: {{latency.ttft_ms: {{at_most: 800}}}}\n")
    check_paths(["a.yaml"])
    assert (told[0].request_per_s, told[0].isl, told[0].osl) == (6, 2000, 256)
    write(folder, a=f"{FAST.replace('request_per_s: 12', 'concurrency: 13')}expect: {{latency.ttft_ms: 1}}\n")
    check_paths(["a.yaml"])
    assert told[1].concurrency == 7


def test_memory_at_a_rate_is_that_of_the_requests_under_way(folder: Path, told: list[Any]) -> None:
    """Little's law: the estimate's 36.2 requests at once are planned as 37 users of a replica."""
    write(folder, a=f"{FAST}expect: {{vram.question.users: 37, vram.question.context: 2256}}\n")
    report = check_paths(["a.yaml"])
    assert statuses(report) == [Status.HOLDS]
    assert "37 users a replica" in report.scenarios[0].notes[0]


def test_no_steady_state_means_memory_cannot_be_told(folder: Path, told: list[Any]) -> None:
    write(folder, a=f"{FAST.replace('12', '198')}expect: {{vram.fits: true}}\n")
    assert statuses(check_paths(["a.yaml"])) == [Status.NOT_EVALUATED]


def test_no_estimate_of_what_does_not_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = {"bound": 0.1, "estimate": None, "low": None, "high": None, "provenance": "bound"}
    made = SimpleNamespace(to_dict=lambda: {"fits": False, "ttft_s": none})
    monkeypatch.setattr("capplan.latency_estimate.figures", lambda question: made)
    write(folder, a=f"{FAST}expect: {{latency.ttft_ms: {{at_most: 800}}}}\n")
    (result,) = check_paths(["a.yaml"]).scenarios[0].results
    assert (result.status, result.got) == (
        Status.NOT_EVALUATED,
        "the model does not fit, so there is no estimate",
    )


def test_keys_that_nothing_uses_yet_are_named(folder: Path) -> None:
    write(folder, a=HOLDS + "slo: {ttft_p99_ms: 800}\nclient: {streaming: true}\n")
    notes = check_paths(["a.yaml"]).scenarios[0].notes
    assert notes == ("in the file, and in none of these answers: slo.ttft_p99_s, client.streaming",)


# --- cost ---


def test_cost_is_of_the_whole_fleet_at_a_price_of_a_day(folder: Path) -> None:
    lines = "fleet: {gpu: h100, tp: 2, replicas: 3, price: {usd_per_gpu_hour: 2.5}}\n"
    write(folder, a=f"{HEAD}{lines}expect: {{cost.usd_per_month: 10950}}\n")  # 6 × 730 × 2.5
    assert statuses(check_paths(["a.yaml"])) == [Status.HOLDS]


def test_an_unknown_price_is_no_pass(folder: Path) -> None:
    lines = "fleet: {gpu: h100, price: {term: spot, cloud: nosuchcloud}}\n"
    write(folder, a=f"{HEAD}{lines}expect: {{cost.usd_per_month: {{at_most: 1e9}}}}\n")
    report = check_paths(["a.yaml"])
    assert report.exit_status is ExitStatus.INPUT
    assert report.scenarios[0].results[0].place.line == 3


CONTRACT = """capplan: 1
model: meta-llama/Llama-3.1-8B-Instruct
precision: fp8
kv_dtype: auto
engine: {name: vllm, version: "0.24", gpu_memory_utilization: 0.90, max_num_seqs: 256}
fleet: {gpu: h100-sxm, tp: 1, replicas: 2, price: {term: on-demand, region: us}}
workload: {request_per_s: 12, isl: 2048, osl: 256, arrivals: poisson, seed: 7}
slo: {ttft_p99_ms: 800, tpot_p99_ms: 40}
client: {streaming: true, max_tokens: 512, timeout_s: 60}
calibration: shipped
expect:
  vram.fits: true
  latency.ttft_ms: {at_least: 1, confidence: p90}
  cost.usd_per_million_output_token: {between: [0.01, 100]}
"""


def test_every_answer_of_the_contract_s_own_example_is_given(folder: Path) -> None:
    write(folder, a=CONTRACT)
    (scenario,) = check_paths(["a.yaml"]).scenarios
    assert [result.status for result in scenario.results] == [Status.HOLDS] * 3


def test_cost_and_latency_cannot_disagree(folder: Path) -> None:
    """The fleet's tokens are the replica's times the replicas, under the engine's own limits too."""
    text = CONTRACT.replace("request_per_s: 12", "concurrency: 64").replace(", arrivals: poisson", "")
    write(folder, a=text)
    told = answers.Answers(load_scenario("a.yaml"))
    fleet, replica = told.get("cost")["throughput"], told.get("latency")["output_token_per_s"]
    assert fleet["output_token_per_s"] == pytest.approx(2 * replica["estimate"])
    assert fleet["low"] == pytest.approx(2 * replica["low"])


def test_a_fleet_that_cannot_serve_still_has_its_bill(folder: Path) -> None:
    lines = "fleet: {gpu: l4, price: {usd_per_gpu_hour: 1}}\nworkload: {concurrency: 1, isl: 8, osl: 8}\n"
    expected = "expect: {cost.usd_per_month: 730, cost.usd_per_million_output_token: 1}\n"
    write(folder, a=f"capplan: 1\nmodel: 70b\n{lines}{expected}")
    (scenario,) = check_paths(["a.yaml"]).scenarios
    assert [result.status for result in scenario.results] == [Status.HOLDS, Status.NOT_EVALUATED]
    assert "does not fit" in scenario.notes[-1]


# --- baseline ---


def test_a_baseline_is_written_and_compared_with(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = HOLDS.replace("vram.fits: true", "vram.total.bytes: {within: 5% of baseline}")
    write(folder, a=text)
    assert run(["check", "a.yaml", "--baseline", "base.json"]) == ExitStatus.INPUT
    assert "no baseline" in capsys.readouterr().err
    assert run(["check", "a.yaml", "--baseline", "base.json", "--update-baseline"]) == ExitStatus.OK
    first = (folder / "base.json").read_bytes()
    assert run(["check", "a.yaml", "--baseline", "base.json"]) == ExitStatus.OK
    # From another folder it is the same scenario.
    (folder / "sub").mkdir()
    assert run(["check", str(folder / "a.yaml"), "--baseline", str(folder / "base.json")]) == ExitStatus.OK
    # 64 users need 38.4 GiB, 70 need 41.4: 8 % more.
    write(folder, a=text.replace("users: 64", "users: 70"))
    assert run(["check", "a.yaml", "--baseline", "base.json"]) == ExitStatus.EXPECTATION
    assert (folder / "base.json").read_bytes() == first
    write(folder, b=text)
    assert run(["check", "b.yaml", "--baseline", "base.json"]) == ExitStatus.EXPECTATION  # not in it
    assert run(["check", ".", "--baseline", "base.json", "--update-baseline"]) == ExitStatus.OK
    assert set(Baseline(path="base.json").entries()) == {"a.yaml", "b.yaml"}
    (folder / "b.yaml").unlink()
    run(["check", ".", "--baseline", "base.json", "--update-baseline"])
    assert set(Baseline(path="base.json").entries()) == {"a.yaml"}


def test_a_baseline_says_what_its_figures_rest_on(folder: Path) -> None:
    write(folder, a=HOLDS)
    run(["check", "a.yaml", "--baseline", "base.json", "--update-baseline"])
    (entry,) = Baseline(path="base.json").entries().values()
    assert {"scenario", "program", "catalog/models/llama-3.1-8b", "catalog/gpus/l40s-48gb"} <= entry[
        "origins"
    ].keys()
    assert {"catalog/formats/int4", "catalog/formats/bf16"} <= entry["origins"].keys()


def test_a_baseline_is_not_written_of_what_cannot_be_used(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, a=HOLDS, b=BROKEN)
    assert run(["check", ".", "--baseline", "base.json", "--update-baseline"]) == ExitStatus.INPUT
    assert not (folder / "base.json").exists()
    assert "b.yaml:2:1" in capsys.readouterr().err
    (folder / "base.json").write_text("{}")
    assert run(["check", "a.yaml", "--baseline", "base.json"]) == ExitStatus.INPUT
    assert run(["check", "a.yaml", "--update-baseline"]) == ExitStatus.INPUT


# --- formats ---

MIXED = {
    "a": HOLDS,
    "b": FAILS.replace("expect:", "name: 'odd | <name>, 100%: \"x\"'\nexpect:"),
    "c": BROKEN,
}


def test_json_has_figures_places_and_origins(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, **MIXED)
    run(["check", ".", "--format", "json"])
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "capplan.check/1"
    assert data["status"] == 2
    assert data["counts"] == {"holds": 1, "fails": 1, "not evaluated": 0, "unusable": 1}
    (line,) = data["scenarios"][1]["expectations"]
    assert (line["key"], line["status"], line["value"], line["line"]) == ("vram.fits", "fails", False, 7)
    assert data["scenarios"][0]["origins"]["catalog/gpus/l40s-48gb"]


def test_github_annotates_the_line_and_escapes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, **MIXED)
    run(["check", ".", "--format", "github"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("::error file=b.yaml,line=7,col=10,title=capplan%3A odd | <name>%2C 100%25%3A")
    assert "::vram.fits is false, expected true. 326.37 GiB needed" in lines[0]
    assert lines[1].startswith("::error file=c.yaml,line=2,col=1,")


def test_junit_is_well_formed_and_counts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, **MIXED)
    run(["check", ".", "--format", "junit"])
    root = ElementTree.fromstring(capsys.readouterr().out.encode())
    assert root.tag == "testsuites"
    assert {name: root.get(name) for name in ("tests", "failures", "errors")} == {
        "tests": "3", "failures": "1", "errors": "1",
    }  # fmt: skip
    cases = list(root.iter("testcase"))
    assert [case.get("file") for case in cases] == ["a.yaml", "b.yaml", "c.yaml"]
    assert [child.tag for case in cases for child in case] == ["failure", "error"]
    assert "expected true" in str(next(root.iter("failure")).get("message"))


def test_markdown_keeps_its_table_and_is_bounded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, **MIXED)
    run(["check", ".", "--format", "markdown"])
    text = capsys.readouterr().out
    assert text.startswith(check_report.MARKER)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(line.replace("\\|", "").count("|") in (4, 5) for line in rows)
    assert "odd \\| &lt;name&gt;" in text
    assert "<details><summary>1 hold</summary>" in text
    write(folder, m=f"{HEAD}matrix: {{workload.users: [{', '.join(map(str, range(1, 900)))}]}}\n")
    report = check_paths(["m.yaml"])
    assert len(check_report.markdown(report)) < 65_536
    assert "shortened" in check_report.markdown(report)


def test_reports_are_also_written_to_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, a=HOLDS)
    assert run(["check", ".", "--report", "junit=r.xml", "--report", "markdown=r.md"]) == ExitStatus.OK
    assert (folder / "r.xml").read_text().startswith("<?xml")
    assert (folder / "r.md").read_text().startswith(check_report.MARKER)
    capsys.readouterr()
    assert run(["check", ".", "--report", "junt=r.xml"]) == ExitStatus.INPUT
    assert "did you mean junit" in capsys.readouterr().err
    assert run(["check", ".", "--report", "junit=no/such/folder.xml"]) == ExitStatus.INPUT


def test_csv_has_a_row_an_expectation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, **MIXED)
    run(["check", ".", "-o", "csv"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "file,line,scenario,key,status,expected,got,taken,value"
    assert len(lines) == 4


def test_check_loads_no_heavy_library(folder: Path) -> None:
    write(folder, a=HOLDS)
    script = (
        "import sys\nfrom capplan.cli import run\ncode = run(['check', 'a.yaml', '-o', 'json'])\n"
        "print(code, sorted({'numpy', 'pandas', 'torch', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_answers_are_worked_out_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    whole = answers.Answers._vram
    monkeypatch.setattr(answers.Answers, "_vram", lambda self: calls.append(1) or whole(self))
    write(
        folder, a=HOLDS.replace("vram.fits: true", "vram.fits: true, vram.max_users: 77, vram.total.bytes: 1")
    )
    check_paths(["a.yaml"])
    assert len(calls) == 1
