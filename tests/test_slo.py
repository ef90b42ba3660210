"""Service levels by name and by numbers."""

import pytest

from capplan.errors import InputError
from capplan.slo import parse_slo, parse_time_s


def test_names_have_the_lessons_limits() -> None:
    chat, reading = parse_slo("chat"), parse_slo("Reading")
    assert (chat.ttft_s, chat.tpot_s) == (0.5, 0.05)
    assert (reading.ttft_s, reading.tpot_s) == (None, pytest.approx(0.2))


def test_numbers_in_any_order_and_unit() -> None:
    both = parse_slo("tpot=50ms, ttft=1.5s")
    assert (both.ttft_s, both.tpot_s) == (1.5, pytest.approx(0.05))
    assert parse_slo("ttft=800us").ttft_s == pytest.approx(0.0008)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("2s", 2.0), ("7us", 7e-6), ("5", None), ("-1s", None), ("1e3ms", None)],
)
def test_times(text: str, seconds: float | None) -> None:
    assert parse_time_s(text) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    "text", ["chatt", "", "ttft", "ttft=", "ttft=500", "ttft=0ms", "itl=5ms", "ttft=1s,ttft=2s", "ttft=1s,"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_slo(text)
