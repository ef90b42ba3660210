"""Fetching prices: one provider hangs, one fails, the others are written; and a mirror on disk."""

import datetime
import hashlib
import threading
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capplan import catalog, price_cache, price_refresh
from capplan.cli import run
from capplan.errors import ExitStatus, ExtraMissingError, InputError
from tests.test_price_import import GPUHUNT

TODAY = datetime.date(2026, 11, 30)


def item(price: float, **fields: Any) -> SimpleNamespace:
    """An item as gpuhunt gives it."""
    values = {
        "instance_name": "1x",
        "location": "us",
        "price": price,
        "gpu_count": 1,
        "gpu_name": "H100",
        "gpu_memory": 80.0,
        "spot": False,
    }
    return SimpleNamespace(**(values | fields))


def test_one_that_hangs_and_one_that_fails_leave_the_others_alone(tmp_path: Path) -> None:
    released = threading.Event()

    def fetch(provider: str) -> tuple[str | None, Iterable[Any]]:
        if provider == "hangs":
            released.wait(20)
        if provider == "fails":
            raise ConnectionError("refused")
        return "2026-11-29", [item(2.0), item(0.1, gpu_count=0, gpu_name=None), item(1.0, gpu_name="K80")]

    started = time.monotonic()
    done = price_refresh.refresh(
        tmp_path,
        book=price_cache.load(),
        fetch=fetch,
        providers=["hangs", "fails", "lambdalabs"],
        today=TODAY,
        limit_s=0.3,
    )
    assert time.monotonic() - started < 5
    released.set()
    hangs, fails, works = done
    assert hangs.error == "no answer within 0.3 s"
    assert fails.error == "ConnectionError: refused"
    assert (works.cloud, works.rows, works.gpus, works.unknown_gpus) == ("lambda", 1, 1, ("K80",))
    assert [path.name for path in tmp_path.iterdir()] == ["lambda.gpuhunt.json"]
    (found,) = price_cache.read_rows(tmp_path)
    assert (found.usd_per_hour, found.read_on, found.source) == (2.0, "2026-11-29", "gpuhunt")


def test_a_provider_without_prices_keeps_the_ones_before(tmp_path: Path) -> None:
    options: dict[str, Any] = {"book": price_cache.load(), "providers": ["x"], "today": TODAY}
    price_refresh.refresh(tmp_path, fetch=lambda _: (None, [item(2.0)]), **options)
    (done,) = price_refresh.refresh(tmp_path, fetch=lambda _: (None, []), **options)
    assert done.error == "no usable price"
    assert [row.read_on for row in price_cache.read_rows(tmp_path)] == ["2026-11-30"]


@pytest.mark.parametrize(
    ("version", "day"), [("20261101-1234", "2026-11-01"), ("20261101", "2026-11-01"), ("v3", None)]
)
def test_day_of_a_published_catalog(version: str, day: str | None) -> None:
    assert price_refresh._version_day(version) == day


def test_unknown_provider() -> None:
    assert price_refresh.check_providers([], ["aws"]) == ["aws"]
    with pytest.raises(InputError, match="no provider 'awz'"):
        price_refresh.check_providers(["awz"], ["aws", "gcp"])


def test_without_gpuhunt_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gpuhunt", None)
    with pytest.raises(ExtraMissingError) as caught:
        price_refresh.gpuhunt_fetch()
    assert caught.value.exit_status is ExitStatus.EXTRA_MISSING
    assert "capplan[prices]" in caught.value.hint


@pytest.fixture
def mirror(tmp_path: Path) -> str:
    """A copy of the published catalogs with one whole provider and one that is broken."""
    pytest.importorskip("gpuhunt", reason="the extra [prices] is not installed")
    for provider in ("aws", "gcp"):
        folder = tmp_path / "mirror" / provider / "20261101-1"
        folder.mkdir(parents=True)
        (folder.parent / "version").write_text("20261101-1\n")
        if provider == "aws":
            with zipfile.ZipFile(folder / "catalog.zip", "w") as file:
                file.writestr("aws.csv", GPUHUNT)
        else:
            (folder / "catalog.zip").write_text("no zip")
    return (tmp_path / "mirror").as_uri()


def shipped_digest() -> str:
    whole = hashlib.sha256()
    for path in sorted((catalog.PROFILES / "prices").glob("*.yaml")):
        whole.update(path.read_bytes())
    return whole.hexdigest()


def test_refresh_from_a_mirror_on_disk(
    mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = shipped_digest()
    command = ["prices", "refresh", "--mirror", mirror, "--limit", "30"]
    assert run([*command, "--provider", "aws"]) == 0
    out, err = capsys.readouterr()
    assert "2026-11-01" in out
    assert "written to" in err
    # Asked for by name and broken: exit 6, and the one that works is written all the same.
    assert run([*command, "--provider", "gcp,aws"]) == ExitStatus.NETWORK
    assert "no new prices of gcp" in capsys.readouterr().err
    files = {path.name for path in (tmp_path / "cache" / "capplan" / "prices").iterdir()}
    assert files == {"aws.gpuhunt.json"}
    assert shipped_digest() == before
    assert run(["cost", "--gpu", "h100", "--cloud", "aws", "--term", "spot", "-o", "json"]) == 0
    assert '"usd_per_gpu_hour": 2.5' in capsys.readouterr().out  # 20 USD for 8
    assert run(["prices", "show", "h100", "--cloud", "aws", "--no-user-data", "-o", "json"]) == 0
    assert "gpuhunt" not in capsys.readouterr().out


def test_refresh_where_nothing_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gpuhunt", reason="the extra [prices] is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    absent = (tmp_path / "none").as_uri()
    assert run(["prices", "refresh", "--provider", "aws,gcp", "--mirror", absent, "--limit", "20"]) == 6
    assert "capplan prices refresh" in capsys.readouterr().err
    assert not (tmp_path / "capplan").exists()
