"""Scenario files → scenarios: keys, units, extends, matrix, and where errors point."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import capplan
from capplan.errors import InputError
from capplan.scenario import Scenario, load_scenario, load_scenarios

HEAD = "capplan: 1\nmodel: 8b\n"


def load(folder: Path, text: str, name: str = "s.yaml") -> Scenario:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return load_scenario(path)


def refused(folder: Path, text: str) -> tuple[str, str, str]:
    """Message, line:column, and hint."""
    with pytest.raises(InputError) as caught:
        load(folder, text)
    where = caught.value.where.removeprefix(f"{folder}/")
    return caught.value.message, where, caught.value.hint


def test_the_contract_of_the_design_is_read(tmp_path: Path) -> None:
    made = load(
        tmp_path,
        """capplan: 1
model: meta-llama/Llama-3.1-8B-Instruct
precision: fp8
kv_dtype: auto
engine: {name: vllm, version: "0.24", gpu_memory_utilization: 0.90, max_num_seqs: 256}
fleet: {gpu: h100-sxm, tp: 1, replicas: 2, price: {term: on-demand, region: us}}
workload: {request_per_s: 12, isl: 2048, osl: 256, arrivals: poisson, seed: 7}
slo: {ttft_p99_ms: 800, tpot_p99_ms: 40}
client: {streaming: true, max_tokens: 512, timeout_s: 60}
calibration: shipped            # or a path relative to this file
expect:
  vram.fits: true
  latency.ttft_ms: {at_most: 800, confidence: p90}
  cost.usd_per_million_output_token: {at_most: 0.60}
""",
    )
    assert made.values["slo.ttft_p99_s"] == pytest.approx(0.8)
    assert made.values["client.timeout_s"] == 60
    assert made.values["fleet.price.term"] == "on-demand"
    assert [entry.key for entry in made.expectations] == [
        "vram.fits",
        "latency.ttft_ms",
        "cost.usd_per_million_output_token",
    ]
    assert made.expectations[1].checks[0].values == (0.8,)
    assert str(made.expectations[1].mark).endswith("s.yaml:13:3")


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("workload: {context: 8k}", "workload.context", 8000),
        ("workload: {context: 8K}", "workload.context", 8192),
        ("workload: {context: 1.5k}", "workload.context", 1500),
        ("workload: {context: 1.001k}", "workload.context", 1001),
        ("workload: {context: 1Mi}", "workload.context", 1 << 20),
        ("fleet: {gpu_memory: 24GiB}", "fleet.gpu_memory_bytes", 24 << 30),
        ("fleet: {gpu_memory: 24 GB}", "fleet.gpu_memory_bytes", 24 * 10**9),
        ("fleet: {gpu_memory_gib: 24}", "fleet.gpu_memory_bytes", 24 << 30),
        ("client: {timeout: 500ms}", "client.timeout_s", 0.5),
        ("client: {timeout: 2min}", "client.timeout_s", 120.0),
        ("client: {timeout_ms: 1500}", "client.timeout_s", 1.5),
        ("engine: {gpu_layers: all}", "engine.gpu_layers", "all"),
        ("engine: {gpu_layers: 0}", "engine.gpu_layers", 0),
        ('name: "no"', "name", "no"),
    ],
)
def test_units_become_si(tmp_path: Path, line: str, name: str, value: object) -> None:
    got = load(tmp_path, HEAD + line + "\n").values[name]
    assert got == pytest.approx(value) if isinstance(value, float) else got == value
    assert type(got) is type(value)


def test_params_stand_for_a_model(tmp_path: Path) -> None:
    assert load(tmp_path, "capplan: 1\nparams: 70.5b\n").values == {"params": 70_500_000_000}


@pytest.mark.parametrize(
    ("lines", "message", "where", "hint"),
    [
        ("modell: x", "unknown key 'modell'", "s.yaml:3:1", "did you mean model"),
        ("fleet: {tpp: 2}", "unknown key 'tpp' in fleet", "s.yaml:3:9", "did you mean tp"),
        ("users: 3", "unknown key 'users'", "s.yaml:3:1", "it goes in workload:"),
        ("workload:\n  max_num_seqs: 3", "unknown key", "s.yaml:4:3", "it goes in engine:"),
        ("workload: 3", "workload is a mapping", "s.yaml:3:11", "workload: {users"),
        ("workload: {}", "workload is empty", "s.yaml:3:11", "leave"),
        ("precision:", "precision has no value", "s.yaml:3:11", "leave the key out"),
        ("precision: [fp8]", "precision is a list", "s.yaml:3:12", "text"),
        ("engine: {version: 0.24}", "is a number to YAML", "s.yaml:3:19", '"0.24"'),
        ("workload: {users: many}", "'many' is not understood", "s.yaml:3:19", "8k (8,000)"),
        ("workload: {users: 8kk}", "'8kk' is not understood", "s.yaml:3:19", "8k"),
        ("workload: {users: 0}", "out of range", "s.yaml:3:19", "from 1"),
        ("workload: {users: 1.5}", "not a whole number", "s.yaml:3:19", "whole number"),
        ("workload: {users: 1_000}", "underscores", "s.yaml:3:19", "write 1000"),
        ("workload: {users: 0x10}", "another base", "s.yaml:3:19", ""),
        ("workload: {request_per_s: 1:30}", "base 60", "s.yaml:3:27", ""),
        ("workload: {request_per_s: .inf}", "no finite number", "s.yaml:3:27", ""),
        ("workload: {request_per_s: 1e999}", "out of range", "s.yaml:3:27", "above 0"),
        ("client: {timeout: 60}", "60 has no unit", "s.yaml:3:19", "500ms"),
        ("client: {timeout_ms: 60s}", "not a number", "s.yaml:3:22", "a number"),
        ("client: {timeout_ms: 1, timeout: 2s}", "given twice", "s.yaml:3:25", "line 3"),
        ("fleet: {gpu_memory: 24gib}", "not understood", "s.yaml:3:21", "GiB"),
        ("fleet: {gpu: local}", "not allowed", "s.yaml:3:14", "same on every machine"),
        ("fleet: {price: {term: spott}}", "not known", "s.yaml:3:23", "did you mean spot"),
        ("fleet: {price: {as_of: 2026-01-31}}", "not understood", "s.yaml:3:24", '"2026-01-31"'),
        ("lora: x", "lora is no list", "s.yaml:3:7", "[ … ]"),
        ("matrix: {users: [1]}", "unknown key 'users' in matrix", "s.yaml:3:10", "workload.users"),
        ("matrix: {workload.users: 3}", "no list of values", "s.yaml:3:26", "[a, b]"),
        ("matrix: {workload.users: [1, x]}", "not understood", "s.yaml:3:30", ""),
        ("extends: base.yaml", "No such file", "s.yaml:3:1", "relative to this file"),
        ("expect: {vran.fits: true}", "names no figure", "s.yaml:3:10", "did you mean vram"),
        ("expect: {vram: true}", "names no figure", "s.yaml:3:10", "ANSWER.figure"),
        ("expect: {vram.fits: no}", "boolean", "s.yaml:3:21", ""),
        ("expect: {vram.max_users: {atmost: 3}}", "unknown key 'atmost'", "s.yaml:3:27", "at_most"),
        ("expect: {vram.max_users: {confidence: p90}}", "expects nothing", "s.yaml:3:26", "at_most"),
        ("expect: {vram.max_users: {at_least: 3, confidence: p99}}", "not known", "s.yaml:3:52", "p90"),
        ("expect: {vram.max_users: {at_most: 3GiB}}", "not a number", "s.yaml:3:36", "number"),
        ("expect: {latency.ttft_ms: {at_most: 3GiB}}", "not understood", "s.yaml:3:37", "500ms"),
        ("expect: {vram.max_users: {between: [3, 1]}}", "smallest and the largest", "s.yaml:3:36", "["),
        ("expect: {vram.max_users: {within: 5%}}", "not understood", "s.yaml:3:35", "5% of baseline"),
    ],
    ids=lambda value: value if isinstance(value, str) and ":" in value and "s.yaml" not in value else None,
)
def test_refused_with_line_column_and_hint(
    tmp_path: Path, lines: str, message: str, where: str, hint: str
) -> None:
    got = refused(tmp_path, f"{HEAD}{lines}\n")
    assert message in got[0]
    assert got[1] == where
    assert hint in got[2]
    assert got[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: 8b\n", "no version"),
        ("capplan: 2\nmodel: 8b\n", "version 2 of scenario files"),
        ("capplan: 1\n", "no model"),
    ],
)
def test_version_and_model_are_needed(tmp_path: Path, text: str, message: str) -> None:
    assert refused(tmp_path, text)[0] == message


def test_extends_takes_keys_and_expectations_and_own_ones_win(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "_base.yaml").write_text(
        "capplan: 1\nmodel: ./config.json\nclient: {timeout_s: 5, max_tokens: 7}\n"
        "expect:\n  vram.fits: true\n  vram.max_users: {at_least: 1}\n"
    )
    made = load(
        tmp_path,
        "capplan: 1\nextends: sub/_base.yaml\nclient: {timeout_ms: 100}\nexpect: {vram.fits: false}\n",
    )
    # Relative to the file that names it, and the quantity in whatever unit is one quantity.
    assert made.values["model"] == f"{tmp_path}/sub/config.json"
    assert made.asked["model"] == "./config.json"
    assert made.values["client.timeout_s"] == pytest.approx(0.1)
    assert made.values["client.max_tokens"] == 7
    assert made.marks["client.max_tokens"].file == f"{tmp_path}/sub/_base.yaml"
    fits, users = made.expectations
    assert fits.checks[0].values == (False,)
    assert fits.mark.file == f"{tmp_path}/s.yaml"
    assert users.mark.file == f"{tmp_path}/sub/_base.yaml"


def test_a_circle_of_extends_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text("capplan: 1\nextends: s.yaml\n")
    message, where, _ = refused(tmp_path, "capplan: 1\nextends: b.yaml\n")
    assert "goes round" in message
    assert where == "b.yaml:2:1"


def test_an_error_in_a_base_file_points_there_even_if_overridden(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text("capplan: 1\nmodel: 8b\nblock_size: 0\n")
    assert refused(tmp_path, "capplan: 1\nextends: b.yaml\nblock_size: 16\n")[1] == "b.yaml:3:13"


def test_matrix_makes_every_combination_the_last_key_fastest(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(
        "capplan: 1\nmodel: 8b\nfleet: {gpu: h100, tp: 8}\n"
        "matrix:\n  fleet.gpu: [h100, l40s]\n  workload.users: [1k, 2000]\n"
    )
    made = load_scenarios(path)
    assert [scenario.title for scenario in made] == [
        "m[gpu=h100, users=1k]",
        "m[gpu=h100, users=2000]",
        "m[gpu=l40s, users=1k]",
        "m[gpu=l40s, users=2000]",
    ]
    assert [scenario.values["workload.users"] for scenario in made] == [1000, 2000, 1000, 2000]
    assert all(scenario.values["fleet.tp"] == 8 for scenario in made)
    assert str(made[2].marks["fleet.gpu"]).endswith("m.yaml:5:21")
    with pytest.raises(InputError, match="the matrix makes 4 scenarios"):
        load_scenario(path)


def test_a_matrix_is_bounded(tmp_path: Path) -> None:
    numbers = ", ".join(map(str, range(1, 101)))
    lines = f"matrix: {{workload.users: [{numbers}], workload.isl: [{numbers}], fleet.tp: [1, 2]}}\n"
    assert "20,000 combinations" in refused(tmp_path, HEAD + lines)[0]


def test_names_stay_names_and_paths_are_told_by_their_looks(tmp_path: Path) -> None:
    made = load(
        tmp_path, "capplan: 1\nmodel: meta-llama/Llama-3.1-8B\nlora: [./a, 'rank=16,targets=q_proj']\n"
    )
    assert made.values["model"] == "meta-llama/Llama-3.1-8B"
    assert made.values["lora"] == (f"{tmp_path}/a", "rank=16,targets=q_proj")
    made = load(tmp_path, "capplan: 1\nmodel: C:\\models\\x\n")
    assert made.values["model"] == "C:\\models\\x"


def test_content_hash_is_of_what_is_asked(tmp_path: Path) -> None:
    one = load(tmp_path, "capplan: 1\nmodel: 8b\nworkload: {context: 8K, users: 3}\n")
    two = load(tmp_path, "# a comment\ncapplan: 1\nworkload:\n  users: 3\n  context: 8192\nmodel: '8b'\n")
    other = load(tmp_path, "capplan: 1\nmodel: 8b\nworkload: {context: 8k, users: 3}\n")
    assert one.content_hash == two.content_hash != other.content_hash


PIECES = [
    "capplan: 1", "model", "8b", ":", " ", "\n", "  ", "expect", "{", "}", "[", "]", ",", "1e3", "no",
    "'", '"', "|", ">", "-", "matrix", "extends", "fleet.gpu", "vram.fits", "&a", "*a", "!!int", "<<",
    "#", "\t", "\x00", "é", "at_most", "within", "5% of baseline", "1:30", "~", "\ud7ff", "\u2028", "?",
    "%",
]  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(PIECES), max_size=25).map("".join)
    | st.binary(max_size=60)
    | st.text(max_size=60)
)
def test_whatever_a_file_holds_it_is_read_or_refused_with_its_place(
    tmp_path: Path, text: str | bytes
) -> None:
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    for head in (b"", b"capplan: 1\nmodel: 8b\n"):
        path = tmp_path / "fuzz.yaml"
        path.write_bytes(head + raw)
        try:
            load_scenarios(path)
        except InputError as error:
            assert error.where.startswith(str(tmp_path))
            assert error.hint
            assert "\n" not in error.message


def test_the_public_name_gives_a_scenario_with_json_and_notebook_view(tmp_path: Path) -> None:
    path = tmp_path / "chat.yaml"
    path.write_text(HEAD + "fleet: {gpu: h100, price: {as_of: '2026-01-31'}}\nexpect: {vram.fits: true}\n")
    made = capplan.load_scenario(path)
    assert made.to_dict() == {
        "schema": "capplan.scenario/1",
        "file": str(path),
        "name": "chat",
        "model": "8b",
        "fleet": {"gpu": "h100", "price": {"as_of": "2026-01-31"}},
        "expect": ["vram.fits"],
    }
    assert "h100" in made._repr_html_()
    assert repr(made) == "Scenario('chat', model='8b', expects=1)"
