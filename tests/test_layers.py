"""Who may import whom (DESIGN §4): an ast walk over the package against this table."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "capplan"

# Within a level only left to right: a module may import those before it.
LEVELS: list[list[str]] = [
    ["units", "errors"],
    ["specs"],
    ["formulas", "kernels"],
    [
        "blocks",
        "readers",
        "catalog",
        "prices",
        "price_cache",
        "price_choice",
        "price_import",
        "price_refresh",
        "tco",
        "schedule",
    ],
    [
        "hub",
        "split",
        "format_matcher",
        "gguf_mix",
        "weights",
        "kv",
        "model_source",
        "adapters",
        "draft",
        "device",
        "engines",
        "tensor_formats",
        "work",
        "device_rates",
        "op_costs",
        "op_range",
        "step",
        "local_checks",
        "local_calibration",
        "local_costs",
        "engine_speed",
        "small_batch",
        "small_batch_speed",
        "lone_step",
        "speculative",
        "scenario_yaml",
        "scenario_values",
        "scenario_keys",
        "expectation",
        "scenario",
        "scenario_questions",
    ],
    [
        "vram_json",
        "capacity",
        "memory_calibration",
        "overhead",
        "local_target",
        "targets",
        "parts",
        "lesson",
        "question",
        "ranks",
        "engine_need",
        "offload",
        "engine_answer",
        "side_by_side",
        "services",
        "remedies",
        "log_subject",
        "estimate",
        "slo",
        "bottleneck",
        "latency_question",
        "latency_json",
        "latency_answer",
        "latency_profile",
        "latency_setup",
        "latency_notes",
        "latency_estimate",
        "results",
        "calibrate",
        "cost_question",
        "ownership",
        "cost_speed",
        "cost_json",
        "cost_answer",
        "cost_estimate",
        "sim",
        "simulate_question",
        "simulate_apart",
        "simulate_setup",
        "simulate_load",
        "simulate_run",
        "simulate_json",
        "simulate_replay",
        "simulate_answer",
        "simulate_estimate",
    ],
    [
        "topics",
        "explain",
        "listing",
        "engine_report",
        "report",
        "latency_lines",
        "latency_explain",
        "latency_report",
        "simulate_report",
        "experiment_report",
        "rows_report",
        "vram_report",
        "refusals",
        "log_terms",
        "log_plan",
        "doctor",
        "doctor_view",
        "price_listing",
        "profile_shelf",
        "profile_report",
        "cost_report",
        "answers",
        "origins",
        "snapshot",
        "check",
        "check_report",
        "baseline",
        "diff_sides",
        "diff",
        "diff_report",
        "schema",
        "scenario_template",
    ],
    ["cli"],
]
THIRD_PARTY: dict[str, set[str]] = {
    "catalog": {"yaml"},
    "report": {"rich"},
    "rows_report": {"rich"},
    "vram_report": {"rich"},
    "doctor_view": {"rich"},
    "cost_report": {"rich"},
    "price_refresh": {"gpuhunt"},
    "memory_calibration": {"yaml"},
    "scenario_yaml": {"yaml"},
    "check_report": {"rich"},
    "diff_report": {"rich"},
    "cli": {"typer", "rich"},
    "hub": {"huggingface_hub"},
    "latency_report": {"rich"},
    "simulate_report": {"rich"},
    "experiment_report": {"rich"},
    "simulate_run": {"joblib"},
    "sim": {"numpy", "joblib"},
    "formulas": {"numpy"},
    "op_costs": {"numpy"},
    "work": {"numpy"},
    "step": {"numpy"},
    "calibrate": {"numpy", "yaml", "torch", "triton", "pynvml"},
    "profile_report": {"rich"},
    "device": {"pynvml"},
}
# Imported only for a type, or only inside a function that needs it.
INSIDE_FUNCTIONS = {"torch", "triton", "pynvml", "huggingface_hub", "gpuhunt", "joblib"}
ORDER = {name: (level, place) for level, names in enumerate(LEVELS) for place, name in enumerate(names)}


def modules() -> list[Path]:
    return sorted(
        path
        for path in PACKAGE.rglob("*.py")
        if not {"kernels", "profiles"} & set(path.relative_to(PACKAGE).parts)
    )


def unit_of(path: Path) -> str:
    """The name in LEVELS that a file belongs to; the package's own two files have none."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imports(path: Path) -> list[tuple[str, bool, bool]]:
    """Every imported module: dotted name, whether inside a function, whether only for types."""
    tree = ast.parse(path.read_text())
    found: list[tuple[str, bool, bool]] = []

    def walk(node: ast.AST, inside: bool, typing_only: bool) -> None:
        for child in ast.iter_child_nodes(node):
            function = inside or isinstance(child, ast.FunctionDef)
            types = typing_only or (
                isinstance(child, ast.If)
                and isinstance(child.test, ast.Name)
                and child.test.id == "TYPE_CHECKING"
            )
            if isinstance(child, ast.Import):
                found.extend((alias.name, function, types) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                if child.module == "capplan":
                    found.extend((f"capplan.{alias.name}", function, types) for alias in child.names)
                else:
                    found.append((child.module, function, types))
            walk(child, function, types)

    walk(tree, False, False)
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_imports_only_what_its_level_allows(path: Path) -> None:
    unit = unit_of(path)
    if unit in ("__init__", "__main__"):
        return
    assert unit in ORDER, f"{unit} has no level: add it to LEVELS"
    for name, inside, typing_only in imports(path):
        top = name.split(".")[0]
        if top == "capplan":
            target = name.split(".")[1] if "." in name else "__init__"
            if target == unit or typing_only or name == "capplan.__version__":
                continue
            assert target in ORDER, f"{path.name} imports {name}, which has no level"
            assert ORDER[target] < ORDER[unit], f"{unit} may not import {target}"
        elif top not in sys.stdlib_module_names:
            assert top in THIRD_PARTY.get(unit, set()), f"{unit} may not import {top}"
            if top in INSIDE_FUNCTIONS:
                assert inside or typing_only, f"{path.name}: {top} only inside functions"


def test_only_the_command_line_prints_or_exits() -> None:
    for path in modules():
        if unit_of(path) in ("cli", "__main__"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("print", "exit", "quit"), f"{path.name} prints or exits"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                reads = (node.value.id, node.attr)
                assert reads not in {("sys", "argv"), ("sys", "exit"), ("os", "environ")}, path.name


def test_modules_stay_readable() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in modules()}
    assert {str(path): length for path, length in lengths.items() if length > 500} == {}


def test_vram_loads_no_heavy_library() -> None:
    script = (
        "import sys, io, contextlib\n"
        "from capplan.cli import run\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    code = run(['vram', '--model', '8b', '--gpu', 'all', '-o', 'json'])\n"
        "heavy = {'numpy', 'pandas', 'torch', 'triton'} & set(sys.modules)\n"
        "print(code, sorted(heavy))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1] == "0 []"
