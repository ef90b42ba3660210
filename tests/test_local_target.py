"""`--gpu local`: the catalog entry of the GPU here, with what is free on it; tested with fakes."""

import json
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from capplan import local_target
from capplan.device import LocalDevice
from capplan.units import GIB, MIB
from tests.doctor_logs import AS_MEASURED, cli
from tests.fake_nvml import LibraryNotFound, NVMLError


def device(**fields: Any) -> LocalDevice:
    known: dict[str, Any] = {
        "name": "NVIDIA H100 80GB HBM3",
        "index": 0,
        "uuid": "GPU-1",
        "memory": "dedicated",
        "total_bytes": 81559 * MIB,
        "reserved_bytes": 500 * MIB,
        "cuda_total_bytes": 81079 * MIB,
        "used_bytes": 0,
        "free_bytes": 81059 * MIB,
        "processes": 0,
        "processes_bytes": 0,
    }
    return LocalDevice(**known | fields)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """`vram --gpu local` on fake devices: the JSON answer, and what the device module was asked."""

    def ask(*devices: LocalDevice, arguments: tuple[str, ...] = ()) -> dict[str, Any]:
        asked: dict[str, Any] = {}

        def fake(*, visible: str | None = None) -> tuple[LocalDevice, ...]:
            asked["visible"] = visible
            return devices

        monkeypatch.setattr(local_target, "local_devices", fake)
        code, out, err = cli("vram", "--model", "8b", "--gpu", "local", "-o", "json", *arguments)
        return {"code": code, "err": err, **asked, **(json.loads(out) if out else {})}

    return ask


def test_local_gpu_is_the_catalogs_with_what_is_free(here: Callable[..., dict[str, Any]]) -> None:
    held = device(free_bytes=60 * GIB, processes=2, processes_bytes=19 * GIB)
    answer = here(held)
    gpu = answer["gpu"]
    assert answer["code"] == 0
    assert gpu["id"] == "h100-sxm-80gb"
    assert gpu["usable_bytes"] == 60 * GIB
    assert gpu["usable_reading"] == "free here now"
    assert gpu["device"]["cuda_total_bytes"] == 81079 * MIB
    for said in ("79.65 GiB by the driver", "79.18 GiB as CUDA sees it", "2 other processes hold 19.00 GiB"):
        assert said in gpu["note"]
    assert "GPU-1" not in json.dumps(answer)


def test_local_gpu_with_an_engine_takes_its_share_of_the_whole(here: Callable[..., dict[str, Any]]) -> None:
    free = here(device(), arguments=AS_MEASURED)["engine"]
    named = json.loads(cli("vram", "--model", "8b", "--gpu", "h100", "-o", "json", *AS_MEASURED)[1])["engine"]
    assert free["terms"] == named["terms"]
    held = here(device(free_bytes=60 * GIB), arguments=AS_MEASURED)
    assert held["code"] == 4
    assert held["engine"]["starts"] is False
    # 60 / 79.18
    assert held["engine"]["advice"][0]["flag"] == "--gpu-memory-utilization 0.75"
    assert "60.00 GiB is free, less than the budget of 71.26 GiB" in held["engine"]["reason"]


def test_of_equal_local_gpus_the_fullest_binds(here: Callable[..., dict[str, Any]]) -> None:
    answer = here(device(), device(index=1, uuid="GPU-2", free_bytes=30 * GIB), device(index=2, uuid="GPU-3"))
    assert [gpu["usable_bytes"] for gpu in answer["gpus"]] == [30 * GIB]
    assert answer["gpu"]["device"]["count"] == 3
    two = here(
        device(), device(name="Tesla T4", total_bytes=15 * GIB, cuda_total_bytes=None, free_bytes=14 * GIB)
    )
    assert [gpu["id"] for gpu in two["gpus"]] == ["h100-sxm-80gb", "t4-16gb"]


def test_unknown_is_never_zero(here: Callable[..., dict[str, Any]]) -> None:
    unknown = here(device(free_bytes=None, used_bytes=None, processes=None, processes_bytes=None))
    assert unknown["gpu"]["usable_bytes"] == 81079 * MIB
    assert unknown["gpu"]["device"]["free_bytes"] is None
    assert "how much is free is not known" in unknown["gpu"]["note"]
    assert "processes" not in unknown["gpu"]["note"]
    nothing = here(device(total_bytes=None, cuda_total_bytes=None, free_bytes=None))
    assert nothing["code"] == 2
    assert "--gpu-memory" in nothing["err"]


def test_a_slice_and_an_unknown_name_are_no_catalog_gpu(here: Callable[..., dict[str, Any]]) -> None:
    part = device(
        name="NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        mig_profile="3g.40gb",
        total_bytes=40 * GIB,
        cuda_total_bytes=None,
        reserved_bytes=None,
        free_bytes=39 * GIB,
    )
    assert here(part)["gpu"]["id"] is None
    assert here(device(name="NVIDIA Never Sold"))["gpu"]["id"] is None


def test_another_size_of_a_name_is_no_catalog_gpu(here: Callable[..., dict[str, Any]]) -> None:
    """A GH200 of 144 GB under the name of the 96 GB one, a doubled RTX 4090, a share of an A40."""
    for name, gib, expected in (
        ("NVIDIA GH200 480GB", 95.0, "gh200-96gb"),
        ("NVIDIA GH200 480GB", 142.5, None),
        ("NVIDIA GeForce RTX 4090", 23.99, "rtx-4090-24gb"),
        ("NVIDIA GeForce RTX 4090", 47.99, None),
        ("NVIDIA A40", 22.0, None),
    ):
        size = round(gib * GIB)
        answer = here(device(name=name, total_bytes=size, cuda_total_bytes=None, free_bytes=size))
        assert answer["gpu"]["id"] == expected, (name, gib)


def test_the_environment_is_read_by_the_command_line_alone(
    here: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert here(device())["visible"] == "1"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert here(device())["visible"] is None


def test_without_the_library_or_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    code, out, err = cli("vram", "--model", "8b", "--gpu", "local")
    assert (code, out) == (5, "")
    assert "pip install 'capplan[profile]'" in err

    def fail() -> None:
        raise LibraryNotFound("NVML Shared Library Not Found")

    fake = types.SimpleNamespace(NVMLError=NVMLError, nvmlInit=fail)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr("capplan.device.local.cuda_devices", dict)
    code, out, err = cli("vram", "--model", "8b", "--gpu", "local")
    assert (code, out) == (2, "")
    assert "no NVIDIA driver" in err
