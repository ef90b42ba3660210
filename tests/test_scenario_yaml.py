"""The strict YAML reader: positions, and what it refuses."""

import pytest

from capplan.errors import InputError
from capplan.scenario_yaml import MAX_BYTES, Mapping, Scalar, Sequence, read_tree


def refused(text: bytes) -> InputError:
    with pytest.raises(InputError) as caught:
        read_tree(text, "f.yaml")
    assert caught.value.hint
    return caught.value


def test_positions_and_spelling_are_kept() -> None:
    tree = read_tree(b"a: no\nb:\n  - 'no'\n  - 1e3\nc: {d: \"x\"}\n", "f.yaml")
    a, b, c = tree.items["a"], tree.items["b"], tree.items["c"]
    assert isinstance(a, Scalar)
    assert isinstance(b, Sequence)
    assert isinstance(c, Mapping)
    assert (a.text, a.plain, str(a.mark)) == ("no", True, "f.yaml:1:4")
    assert [(item.text, item.plain) for item in b.items if isinstance(item, Scalar)] == [
        ("no", False),
        ("1e3", True),
    ]
    assert str(b.items[1].mark) == "f.yaml:4:5"
    assert str(c.keys["d"]) == "f.yaml:5:5"


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        (b"a: 1\na: 2\n", "f.yaml:2:1", "given twice"),
        (b"a:\n  b: 1\n  c: 2\n  b: 3\n", "f.yaml:4:3", "given twice"),
        (b"a: &x 1\n", "f.yaml:1:4", "anchor &x"),
        (b"b: *x\n", "f.yaml:1:4", "alias"),
        (b"a: 1\n<<: {b: 2}\n", "f.yaml:2:1", "merge key"),
        (b"a: !!python/object:os.system x\n", "f.yaml:1:4", "tag"),
        (b"a:\n\tb: 1\n", "f.yaml:2:1", "tab"),
        (b"a:\n  b: 1\n\tc: 2\n", "f.yaml:3:1", "tab"),
        (b"a: 1\n---\nb: 2\n", "f.yaml:2:1", "second document"),
        (b"", "f.yaml:1:1", "empty"),
        (b"# nothing\n", "f.yaml:1:1", "empty"),
        (b"- 1\n", "f.yaml:1:1", "not a mapping"),
        (b"just text\n", "f.yaml:1:1", "not a mapping"),
        (b"? [a]\n: 1\n", "f.yaml:1:3", "key that is no text"),
        (b"a: [1,\n", "f.yaml:2:1", "broken YAML"),
        (b"a: b: c\n", "f.yaml:1:5", "broken YAML"),
        (b"a: 1\nb: \x07\n", "f.yaml:2:4", "character"),
        (b"a: 1\nb: \xff\n", "f.yaml:2:1", "UTF-8"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value,
)
def test_refused_with_its_place(text: bytes, where: str, says: str) -> None:
    error = refused(text)
    assert error.where == where
    assert says in error.message


def test_a_bomb_of_aliases_is_refused_at_its_first_anchor() -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [
        f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]"
        for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    ]
    error = refused("\n".join(lines).encode())
    assert error.where == "f.yaml:1:4"


def test_size_depth_and_count_are_bounded() -> None:
    assert "bytes" in refused(b"a: " + b"x" * MAX_BYTES).message
    assert "depth" in refused(b"[" * 100_000).message
    assert refused(b"[" * 40).message == "too large"
    assert refused(b"a: [" + b"1," * 30_000 + b"1]").message == "too large"


def test_windows_line_ends_and_byte_order_marks_are_read() -> None:
    tree = read_tree(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n", "f.yaml")
    assert list(tree.items) == ["a", "b"]
    assert str(tree.keys["b"]) == "f.yaml:2:1"
