"""Points on the disk: through a kill, a full disk, and a run with other options."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from capplan.calibrate.bench import Conditions
from capplan.calibrate.clock import Timing
from capplan.calibrate.points import Journal, Point, from_tables, point, tables
from capplan.errors import InputError

HEADER = {"hardware": "cpu-x-2t", "model": "m", "clock": "wall"}
THROTTLED = Conditions(void="thermal slowdown", sm_mhz=1500.0, power_w=512.0)
STEP = ("bf16", "bf16", "bf16", 1, 128, 2, "anchor", 0)


def gemm(m: int, us: float, void: str | None = None) -> Point:
    return point("gemm", ("bf16", m, 64, 32, 128, 0), Timing(samples=(us * 1e-6,)), Conditions(void=void))


def test_point_in_microseconds() -> None:
    made = gemm(2, 12.34)
    assert (made.us_p50, made.m, made.n, made.k) == (12.3, 2, 64, 32)
    assert made.seconds == pytest.approx(12.3e-6)


def test_a_killed_run_loses_at_most_the_point_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journal = Journal(path, HEADER)
    journal.add(gemm(1, 10))
    journal.add(gemm(2, 20))
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[-1][:25])  # killed while writing the third
    found = Journal(path, HEADER, resume=True)
    assert sorted(each.m for each in found.points.values()) == [1, 2]
    found.add(gemm(4, 40))
    again = Journal(path, HEADER, resume=True)
    assert [each.us_p50 for each in again.of("gemm")] == [10, 20, 40]


def test_a_kill_while_a_run_is_taken_up_again_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    journal = Journal(path, HEADER)
    for m in (1, 2, 4):
        journal.add(gemm(m, 10 * m))

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            Journal(path, HEADER, resume=True)
    assert len(Journal(path, HEADER, resume=True).points) == 3


def test_without_resume_a_run_starts_anew(tmp_path: Path) -> None:
    Journal(tmp_path / "run", HEADER).add(gemm(1, 10))
    assert not Journal(tmp_path / "run", HEADER).points


@pytest.mark.parametrize("name", sorted(HEADER))
def test_resume_refuses_points_of_another_run(tmp_path: Path, name: str) -> None:
    Journal(tmp_path / "run", HEADER).add(gemm(1, 10))
    with pytest.raises(InputError, match=name):
        Journal(tmp_path / "run", HEADER | {name: "other"}, resume=True)


def test_void_points_are_kept_but_do_not_count(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run", HEADER)
    journal.add(gemm(1, 10, "canary moved 12%"))
    assert journal.of("gemm") == []
    journal.add(gemm(1, 11))
    journal.add(gemm(1, 99, "canary moved 30%"))
    assert [each.us_p50 for each in journal.of("gemm")] == [11]


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "run", HEADER)

    def full(text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    class File:
        write = staticmethod(full)

    monkeypatch.setattr(journal, "file", File())
    with pytest.raises(InputError, match="No space left on device") as caught:
        journal.add(gemm(1, 10))
    assert "--out" in caught.value.hint


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        Journal(tmp_path / "file" / "run", HEADER)


def test_tables_go_there_and_back() -> None:
    step = point("step", STEP, Timing(samples=(0.1, 0.2), cpu=(0.1, 0.1)), THROTTLED)
    made: Any = json.loads(json.dumps(tables(iter([gemm(1, 10), step]))))
    assert from_tables(made, "x") == [gemm(1, 10), step]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda t: t["gemm"]["cols"].pop(), id="a column less"),
        pytest.param(lambda t: t["gemm"]["rows"][0].pop(), id="a short row"),
        pytest.param(lambda t: t.update(gem=t.pop("gemm")), id="another kind"),
    ],
)
def test_tables_of_another_form_are_refused(change: Any) -> None:
    made = tables(iter([gemm(1, 10)]))
    change(made)
    with pytest.raises(InputError):
        from_tables(made, "x")
