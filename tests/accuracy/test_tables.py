"""The README's accuracy tables are what the data says today; `-s` prints them."""

import re

import pytest

from tests.accuracy import oracles, tables


@pytest.mark.usefixtures("data")
def test_readme_holds_the_generated_tables() -> None:
    made = tables.markdown()
    print(f"\n{made}")
    readme = oracles.ROOT / "README.md"
    block = tables.readme_block(readme.read_text(encoding="utf-8")) if readme.exists() else None
    if block is None:
        pytest.skip(f"README.md has no {tables.BEGIN} … {tables.END}")
    assert block == made, "run `python -m tests.accuracy.tables` and put its output in README.md"


def test_block_between_the_markers() -> None:
    assert tables.readme_block(f"a\n{tables.BEGIN}\n\n| b |\n\n{tables.END}\nc") == "| b |\n"
    assert tables.readme_block("no markers") is None


def test_tables_are_tables() -> None:
    lines = tables._table(("a", "b"), [(1, 2), (3, "x")])
    assert lines == ["| a | b |", "| --- | --- |", "| 1 | 2 |", "| 3 | x |"]
    assert not re.search(r"nan|inf", "\n".join(lines))
