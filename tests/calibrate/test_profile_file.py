"""Files of local profiles: whole, private, merged only with their like, refused when they are wrong."""

import errno
import getpass
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import synthetic

from capplan import local_calibration
from capplan.calibrate import profile_file
from capplan.errors import InputError


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return synthetic.data()


@pytest.fixture
def path(data: dict[str, Any], tmp_path: Path) -> Path:
    profile_file.save(data, tmp_path / "p.yaml")
    return tmp_path / "p.yaml"


def test_file_comes_back_as_it_was_written(data: dict[str, Any], path: Path) -> None:
    found = local_calibration.read(path)
    assert found.fit == data["fit"]
    assert found.gpu.id == "cpu-test-avx2-2t"
    assert found.gpu.memory_bytes == 64 << 30
    assert found.host_inside


def test_verify_predicts_anew_what_was_held_out(path: Path, data: dict[str, Any]) -> None:
    rows = profile_file.verify(path)
    assert len(rows) == 3 * len(synthetic.HELD_OUT)
    worst = {
        dtype: sorted(abs(row["error_pct"]) for row in rows if synthetic.KERNELS[row["precision"]] == dtype)
        for dtype in data["error"]["step"]
    }
    for dtype, errors in worst.items():
        middle = (errors[1] + errors[2]) / 2
        assert middle == pytest.approx(data["error"]["step"][dtype]["median_pct"], abs=0.02)


def test_file_names_neither_machine_nor_user_nor_path(path: Path) -> None:
    text = path.read_text().lower()
    secrets = [socket.gethostname(), getpass.getuser(), str(Path.home()), str(Path.cwd()), os.sep + "home"]
    for secret in secrets:
        assert len(secret) < 4 or secret.lower() not in text, secret


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda d: d.update(schema="capplan.calibration/9"), "schema", id="another schema"),
        pytest.param(lambda d: d.update(origin="public"), "origin", id="not local"),
        pytest.param(lambda d: d.pop("validity"), "no validity", id="a part is missing"),
        pytest.param(lambda d: d.update(hostname="x"), "unknown key", id="a key too many"),
        pytest.param(
            lambda d: d["fit"]["gemm"]["bf16"]["local"]["affine"]["fixed_us"].__setitem__(0, 1e9),
            "hash differs",
            id="a number was changed",
        ),
        pytest.param(lambda d: d["hardware"].pop("units"), "hardware.units", id="no unit count"),
        pytest.param(lambda d: d["hardware"].update(memory_bytes=-1), "memory_bytes", id="negative memory"),
        pytest.param(lambda d: d["hardware"].update(flop_per_s={}), "flop_per_s", id="no rate"),
        pytest.param(lambda d: d["hardware"].update(kind="tpu"), "kind", id="another kind"),
        pytest.param(lambda d: d.update(fit=[]), "fit is no mapping", id="fit is a list"),
        pytest.param(lambda d: d.update(error=None), "error is no mapping", id="error is null"),
    ],
)
def test_broken_files_are_refused(data: dict[str, Any], change: Any, message: str) -> None:
    import copy

    broken = copy.deepcopy(data)
    change(broken)
    with pytest.raises(InputError, match=message):
        local_calibration.checked(broken, "p.yaml")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        pytest.param([float("nan")], "nan", id="not a number"),
        pytest.param([2.0, 1.0], "falls|values", id="falls"),
        pytest.param(["x"], "is 'x'", id="text in a table"),
    ],
)
def test_wrong_numbers_are_refused_though_the_hash_is_right(
    data: dict[str, Any], value: list[Any], message: str
) -> None:
    import copy

    broken = copy.deepcopy(data)
    table = broken["fit"]["gemm"]["bf16"]["local"]["affine"]
    count = len(table["m"])
    table["fixed_us"] = (value * count)[:count]
    broken["hash"] = local_calibration.fit_hash(broken["fit"])
    with pytest.raises(InputError, match=message):
        local_calibration.checked(broken, "p.yaml")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        pytest.param(("gemm", "bf16", "local", "affine"), "affine", id="no affine form"),
        pytest.param(("gemm", "bf16", "local"), "fit.gemm.bf16", id="no own numbers"),
        pytest.param(("decode_attention", "bf16", "local", "table", "batch"), "table.batch", id="no axis"),
        pytest.param(("elementwise", "bf16", "local", "general", "memory"), "memory", id="no bandwidth"),
        pytest.param(("anchors", "bf16", "layer_us"), "layer_us", id="an anchor's part"),
    ],
)
def test_fits_with_a_part_missing_are_refused(
    data: dict[str, Any], place: tuple[str, ...], message: str
) -> None:
    import copy

    broken = copy.deepcopy(data)
    at = broken["fit"]
    for name in place[:-1]:
        at = at[name]
    del at[place[-1]]
    broken["hash"] = local_calibration.fit_hash(broken["fit"])
    with pytest.raises(InputError, match=message):
        local_calibration.checked(broken, "p.yaml")


@pytest.mark.parametrize("text", ["", "- 1\n", "schema: [", "\x00\x01"])
def test_what_is_no_calibration_at_all(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(InputError):
        local_calibration.read(tmp_path / "p.yaml")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        local_calibration.read(tmp_path / "none.yaml")


def test_merging_doubles_the_points(path: Path, tmp_path: Path) -> None:
    profile_file.save(profile_file.merge([path, path]), tmp_path / "both.yaml")
    one, both = (
        len(local_calibration.read(each).data["points"]["gemm"]["rows"])
        for each in (path, tmp_path / "both.yaml")
    )
    assert both == 2 * one


def test_another_device_is_not_merged(path: Path, tmp_path: Path) -> None:
    profile_file.save(synthetic.data(key="cpu-other-2t"), tmp_path / "other.yaml")
    with pytest.raises(InputError, match="hardware is cpu-other-2t"):
        profile_file.merge([path, tmp_path / "other.yaml"])


def test_disk_full_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_text()

    def full(self: Path, *_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InputError, match="No space left"):
        profile_file.save({"a": 1}, path)
    assert path.read_text() == before


def test_a_gpu_of_the_catalog_keeps_its_datasheet() -> None:
    block = synthetic.data(kind="gpu")["hardware"]
    assert local_calibration.device(block, "x").memory_bandwidth_bytes_per_s > 3e12


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param({"key": "h200-sxm-141gb"}, "is no h200-sxm-141gb", id="another SKU's name"),
        pytest.param({"name": "NVIDIA H200"}, "measured on NVIDIA H200", id="a name of another SKU"),
        pytest.param({"memory_bytes": 94 << 30}, "is no h100-sxm-80gb", id="another size"),
        pytest.param({"kind": "cpu"}, "of a CPU", id="a GPU's times as a CPU's"),
        pytest.param({"name": "\x1b[31mH100"}, "no plain text", id="what a terminal obeys"),
        pytest.param({"key": "../../h100"}, "no id", id="a path as an id"),
    ],
)
def test_device_that_is_not_what_it_says(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        local_calibration.device(synthetic.data(kind="gpu")["hardware"] | changed, "x")
