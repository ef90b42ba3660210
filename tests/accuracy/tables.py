"""The accuracy tables of the README: `python -m tests.accuracy.tables` prints them.

Everything is counted anew from the data; what is wrong or left is printed, not dropped.
"""

from collections import Counter
from collections.abc import Iterable

from tests.accuracy import (
    oracles,
    real_runs,
    serving_tables,
    speed_tables,
    test_cases_behaviour,
    test_cases_cost,
    test_cases_device,
    test_cases_engines,
    test_cases_kv,
    test_cases_llamacpp,
    test_cases_vllm,
    test_cases_weights,
    test_cases_windows,
    test_cases_yaml,
)
from tests.accuracy.cases import FieldCase, cases_in
from tests.accuracy.cases_left import LEFT, PARTLY
from tests.accuracy.kv_cache import KvRow, kv_rows
from tests.accuracy.parameters import FIGURES, ORACLE_GAPS, parameter_rows, refused_configs
from tests.accuracy.stored_weights import (
    BytesRow,
    checkpoint_rows,
    format_rows,
    ggml_type_rows,
    gguf_rows,
    rank_rows,
    rejected_splits,
)

BEGIN, END = "<!-- accuracy:begin -->", "<!-- accuracy:end -->"


def covered() -> dict[str, FieldCase]:
    """Every field case with a test."""
    return cases_in(
        test_cases_behaviour,
        test_cases_cost,
        test_cases_device,
        test_cases_engines,
        test_cases_kv,
        test_cases_llamacpp,
        test_cases_vllm,
        test_cases_weights,
        test_cases_windows,
        test_cases_yaml,
    )


def markdown() -> str:
    """All tables, as they stand between the README's markers."""
    sections = (
        _parameters(),
        _kv_cache(),
        _ranks(),
        _checkpoints(),
        speed_tables.kernel_lines(),
        speed_tables.lone_lines(),
        serving_tables.markdown().rstrip().splitlines(),
        list(real_runs.readme_lines()),
        _cases(),
    )
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> list[str]:
    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(str(cell) for cell in cells) + " |"

    return [line(head), line("---" for _ in head), *map(line, rows)]


def _equal(right: int, of: int) -> str:
    return f"{right:,} of {of:,}"


def _parameters() -> list[str]:
    rows = parameter_rows()
    towers = sorted(row.model.replace("--", "/") for row in rows if row.with_tower)
    wrong = sorted((row.model, name, row.got[name], row.want[name]) for row in rows for name in row.differing)
    lines = ["**Parameters** from `config.json`, against transformers' own modules:", ""]
    lines += _table(
        ("figure", "rows equal"),
        [(name, _equal(sum(name not in row.differing for row in rows), len(rows))) for name in FIGURES],
    )
    files, refused = len(list(oracles.HF_CONFIGS.glob("*.json"))), refused_configs()
    lines += ["", f"- {_equal(files - len(refused), files)} published configs are read."]
    lines += [f"- Refused: {name}: {error.message}." for name, error in refused.items()]
    lines += [f"- {len(towers)} rows count the vision tower and equal decoder + tower: {', '.join(towers)}."]
    for model, name, got, want in wrong:
        gap = " (a gap of the oracle, which counts by module name)" if (model, name) in ORACLE_GAPS else ""
        lines.append(f"- Not equal: {model.replace('--', '/')}, {name}: {got:,} against {want:,}{gap}.")
    return lines


def _kv_cache() -> list[str]:
    rows = kv_rows()
    capacity = [row.capacity for row in rows if row.capacity is not None]
    printed = [row for row in capacity if not row.refused]
    refused = [row for row in capacity if row.refused]

    def fits(figure: str) -> str:
        pairs = [getattr(row, figure) for row in printed]
        return _equal(sum(got == want for got, want in pairs), len(pairs))

    parted = sum(row.one_fits_without_null_block is not row.one_fits for row in capacity)
    lines = ["**KV cache**, against what vLLM 0.32.0 itself computes:", ""]
    lines += _table(
        ("figure", "rows equal"),
        [
            ("bytes per token by kind, windows, state", _equal(sum(map(_bytes_equal, rows)), len(rows))),
            ("blocks (one group of full or latent attention)", fits("blocks")),
            ("tokens that fit", fits("tokens")),
            ("maximum concurrency", fits("concurrency")),
            (
                "one request fits or not, with vLLM's null block",
                _equal(sum(row.one_fits is not row.refused for row in capacity), len(capacity)),
            ),
            (
                "longest length where it does not",
                _equal(
                    sum(row.longest is not None and row.longest[0] == row.longest[1] for row in refused),
                    len(refused),
                ),
            ),
        ],
    )
    left = len(rows) - len(capacity)
    lines += [
        "",
        f"- {left:,} rows share the pool between several cache groups or keep windows only: their bytes are "
        "above, their blocks wait for the engine's pool rules.",
        f"- In {parted} rows a request needs every block, and vLLM's null block alone refuses it.",
    ]
    models = Counter(row.model.replace("--", "/") for row in rows if not _bytes_equal(row))
    lines += [f"- Not equal: {name}, {count} rows." for name, count in sorted(models.items())]
    return lines


def _bytes_equal(row: KvRow) -> bool:
    return row.columns_equal and row.layers_equal


def _errors(rows: list[BytesRow]) -> tuple[object, ...]:
    """Rows, equal to the byte, within 0.1 ‰, 1 ‰ and 1 %, and the worst one."""
    errors = [abs(row.error) for row in rows]
    worst = max(rows, key=lambda row: (abs(row.error), row.name))
    below = [sum(error <= limit for error in errors) for limit in (1e-4, 1e-3, 1e-2)]
    exact = sum(row.got == row.want for row in rows)
    name = worst.name.replace("--", "/")
    return (len(rows), exact, *below, f"{100 * worst.error:+.3f} % ({name})")


def _outliers(rows: list[BytesRow]) -> list[str]:
    """A line that names every row above 0.1 %, the worst first."""
    far = sorted((row for row in rows if abs(row.error) > 1e-3), key=lambda row: -abs(row.error))
    named = [f"{row.name.replace('--', '/')} {100 * row.error:+.3f} %" for row in far]
    return [f"- Above 0.1 %: {'; '.join(named)}."] if named else []


_ERROR_HEAD = ("", "rows", "equal", "≤ 0.01 %", "≤ 0.1 %", "≤ 1 %", "worst")


def _ranks() -> list[str]:
    rows = rank_rows()
    towers = sum(row.with_tower for row in rows)
    splits = rejected_splits()
    lines = ["**Weights of one rank**, from `config.json`, against vLLM 0.32.0's own modules:", ""]
    by_tp = [(tp, [row for row in rows if row.name.endswith(f" tp {tp}")]) for tp in (1, 2, 4, 8)]
    groups = [(f"tp {tp}", of_tp) for tp, of_tp in by_tp if of_tp] + [("all", rows)]
    lines += _table(_ERROR_HEAD, [(name, *_errors(of_group)) for name, of_group in groups])
    refused = sum(split[2] for split in splits)
    lines += [
        "",
        f"- Rows that hold the vision tower too, and are compared with it: {towers}.",
        f"- {_equal(refused, len(splits))} splits that vLLM rejects are refused.",
    ]
    lines += _outliers(rows)
    lines += [f"- Not refused: {model} at tp {tp}: {why}." for model, tp, ok, why in splits if not ok]
    return lines


def _checkpoints() -> list[str]:
    rows = checkpoint_rows()
    compared = [row for row in rows if row.got is not None and not row.exception]
    written = [row for row in gguf_rows() if row.got is not None]
    loaded = [row for row in compared if not row.measured]
    groups = [
        ("safetensors, created by vLLM or published", [row for row in loaded if not _ggml(row)]),
        ("GGUF and GGML, published", [row for row in loaded if _ggml(row)]),
        ("GGUF, written by llama.cpp's quantizer", written),
        ("read off a running GPU", [row for row in compared if row.measured]),
    ]
    formats, types = format_rows(), ggml_type_rows()
    left = Counter(row.left for row in (*rows, *gguf_rows()) if row.got is None)
    lines = ["**Stored bytes of checkpoints**, from `config.json` alone:", ""]
    lines += _table(_ERROR_HEAD, [(name, *_errors(of_group)) for name, of_group in groups if of_group])
    lines += [
        "",
        f"- Effective bits per weight: {_equal(sum(row.equal for row in formats), len(formats))} formats "
        f"and {_equal(sum(row.equal for row in types), len(types))} GGML types equal.",
    ]
    lines += _outliers([*compared, *written])
    lines += [
        f"- Not counted: {row.name.replace('--', '/')}, {100 * row.error:+.1f} %: {row.exception}."
        for row in rows
        if row.exception
    ]
    lines += [f"- Not compared: {count} rows, {why}." for why, count in sorted(left.items())]
    return lines


def _ggml(row: BytesRow) -> bool:
    return " GGUF " in row.name or " GGML " in row.name


def _cases() -> list[str]:
    done = covered()
    figures = sum(len(case.figures) for case in done.values())
    reasons = Counter(what for what, _ in LEFT.values())
    partly = sum(len(names) for names in PARTLY.values())
    lines = ["**Field cases** (public reports by people who size serving):", ""]
    lines += _table(
        ("", "cases", "figures"),
        [("covered", len(done), figures), ("left in covered cases", "", partly)]
        + [(f"left: {what}", count, "") for what, count in sorted(reasons.items())]
        + [("all", len(done) + len(LEFT), "")],
    )
    return lines


def readme_block(text: str) -> str | None:
    """What stands between the markers of a README; None without markers."""
    if BEGIN not in text or END not in text:
        return None
    return text.split(BEGIN, 1)[1].split(END, 1)[0].strip() + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
