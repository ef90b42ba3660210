"""Slices of a GPU, and which devices CUDA_VISIBLE_DEVICES leaves, through a fake NVML."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from capplan.device import LocalDevice, local_devices
from capplan.errors import InputError
from capplan.units import GIB, MIB
from tests.fake_nvml import (
    Machine,
    NotSupported,
    device,
    machine_of,
    seen_by_cuda,
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Sets up a machine."""
    return machine_of(monkeypatch, tmp_path)


def only(devices: tuple[LocalDevice, ...]) -> LocalDevice:
    assert len(devices) == 1
    return devices[0]


def sliced() -> SimpleNamespace:
    """An A100 40GB cut in two."""
    first = device(
        name="NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        uuid="MIG-11111111-0000-0000-0000-000000000001",
        total=19968 * MIB,
        reserved=0,
        compute=NotSupported("needs permission"),
        graphics=NotSupported("needs permission"),
    )
    second = device(
        name=NotSupported("an older driver names no slices"),
        uuid="MIG-22222222-0000-0000-0000-000000000002",
        total=19968 * MIB,
        reserved=0,
        profile=SimpleNamespace(gpuInstanceSliceCount=3, memorySizeMB=19968),
    )
    return device(
        name="NVIDIA A100-SXM4-40GB",
        uuid="GPU-99999999-0000-0000-0000-000000000009",
        total=40960 * MIB,
        slices=[first, second],
    )


def test_a_mig_slice_has_its_own_memory(machine: Machine) -> None:
    """vllm-project/vllm#41776: the parent's 40 GB were returned for a 20 GB slice."""
    machine(sliced(), meminfo={"MemTotal": 1 << 30, "MemAvailable": 1 << 29})
    got = local_devices()
    assert [slice_.mig_profile for slice_ in got] == ["3g.20gb", "3g.20gb"]
    assert {slice_.name for slice_ in got} == {"NVIDIA A100-SXM4-40GB MIG 3g.20gb"}
    for slice_ in got:
        assert (slice_.total_bytes or 0) / 1e9 == pytest.approx(20, rel=0.05)
        assert 40960 * MIB / (slice_.total_bytes or 1) == pytest.approx(2.0, rel=0.05)
        assert slice_.notes[0] == "a slice of NVIDIA A100-SXM4-40GB: sizes are the slice's"
    chosen = only(local_devices(visible="MIG-22222222-0000-0000-0000-000000000002"))
    assert chosen.uuid == "MIG-22222222-0000-0000-0000-000000000002"
    assert only(local_devices(visible="MIG-1111")).uuid == "MIG-11111111-0000-0000-0000-000000000001"


def test_what_a_slice_cannot_tell_is_not_zero(machine: Machine) -> None:
    """dask/distributed#8739: a flat 0 was drawn where the value does not exist."""
    machine(sliced())
    first, second = local_devices()
    assert (first.processes, first.processes_bytes) == (None, None)
    assert (second.processes, second.processes_bytes) == (0, 0)


def test_a_gpu_in_mig_mode_without_slices_is_none(machine: Machine) -> None:
    machine(device(slices=[]))
    with pytest.raises(InputError, match="sees no GPU it can use; GPU 0 is in MIG mode without a slice"):
        local_devices()


def ids(*places: int) -> list[SimpleNamespace]:
    return [device(uuid=f"GPU-{place:08x}-0000-0000-0000-000000000000") for place in places]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        pytest.param(None, [0, 1, 2], id="all"),
        pytest.param("2,0", [2, 0], id="indices keep their order"),
        pytest.param("GPU-0000000b", [1], id="the start of an id"),
        pytest.param("gpu-0000000C-0000-0000-0000-000000000000, 0", [2, 0], id="an id and an index"),
        pytest.param("1,7,0", [1], id="CUDA stops at the first it does not know"),
    ],
)
def test_visible_devices(machine: Machine, visible: str | None, indices: list[int]) -> None:
    machine(*ids(10, 11, 12))
    assert [entry.index for entry in local_devices(visible=visible)] == indices


@pytest.mark.parametrize("visible", ["", "-1", "none", "9", "MIG-77", "GPU-ffff"])
def test_nothing_visible_is_said(machine: Machine, visible: str) -> None:
    machine(*ids(10, 11))
    with pytest.raises(InputError, match="leaves none of the 2 GPUs"):
        local_devices(visible=visible)


def compute_instances() -> SimpleNamespace:
    """A GPU instance of 40 GB with three compute instances, and one of 10 GB."""

    def slice_of(place: int, instance: int, compute: int, megabytes: int) -> SimpleNamespace:
        return device(
            name=NotSupported("name"),
            uuid=f"MIG-{place:08x}-0000-0000-0000-000000000000",
            total=megabytes * MIB,
            reserved=0,
            instance=instance,
            profile=SimpleNamespace(
                gpuInstanceSliceCount=3 if instance == 1 else 1,
                computeInstanceSliceCount=compute,
                memorySizeMB=megabytes,
            ),
        )

    return device(
        slices=[*(slice_of(place, 1, 1, 40448) for place in range(3)), slice_of(3, 2, 1, 9856)],
        uuid="GPU-99999999-0000-0000-0000-000000000009",
    )


def test_compute_instances_share_the_memory_of_their_slice(machine: Machine) -> None:
    machine(compute_instances())
    *parts, whole = local_devices()
    assert [part.mig_profile for part in parts] == ["1c.3g.40gb"] * 3
    assert {part.total_bytes for part in parts} == {40448 * MIB}
    assert all("3 compute instances share this memory" in part.notes for part in parts)
    assert whole.mig_profile == "1g.10gb"
    assert not any("share" in note for note in whole.notes)


def test_a_slice_whose_memory_query_fails_has_its_profiles_size(machine: Machine) -> None:
    parent = sliced()
    parent.slices[1].memory = NotSupported("memory")
    machine(parent, meminfo={"MemTotal": 1 << 30, "MemAvailable": 1 << 29})
    got = local_devices()[1]
    assert (got.memory, got.total_bytes, got.free_bytes) == ("dedicated", 19968 * MIB, None)


def test_slices_by_the_names_of_older_drivers(machine: Machine) -> None:
    parent = sliced()
    for place, entry in enumerate(parent.slices):
        entry.uuid = f"MIG-GPU-99999999-0000-0000-0000-000000000009/{place + 1}/0"
    machine(parent, cuda=seen_by_cuda(parent.uuid, 40 * GIB))
    got = only(local_devices(visible="MIG-GPU-99999999-0000-0000-0000-000000000009/2/0"))
    assert got.uuid == parent.slices[1].uuid
    assert got.cuda_total_bytes is None  # CUDA's total here is of the whole GPU


def test_the_parent_of_slices_is_not_named_by_its_own_id(machine: Machine) -> None:
    machine(sliced())
    with pytest.raises(InputError, match="leaves none of the 2 GPUs"):
        local_devices(visible="GPU-99999999-0000-0000-0000-000000000009")
    assert only(local_devices(visible="0")).uuid == "MIG-11111111-0000-0000-0000-000000000001"


def test_cuda_may_number_otherwise_than_the_driver(machine: Machine) -> None:
    """Unlike GPUs go by speed; CUDA, asked under the same variable, sees the one it means."""
    slow, fast = ids(10, 11)
    slow.name = "Tesla T4"
    cuda = seen_by_cuda(fast.uuid, 79 * GIB)
    machine(slow, fast, cuda=cuda)
    assert only(local_devices(visible="0")).uuid == fast.uuid
    machine(slow, fast)
    got = only(local_devices(visible="0"))
    assert got.uuid == slow.uuid
    assert any("CUDA_DEVICE_ORDER" in note for note in got.notes)
    machine(slow, fast, cuda=cuda | seen_by_cuda(slow.uuid, 14 * GIB, index=1))
    assert [entry.uuid for entry in local_devices(visible="0,1")] == [fast.uuid, slow.uuid]
    assert only(local_devices(visible=slow.uuid)).uuid == slow.uuid


@pytest.mark.parametrize("visible", ["GPU-", "²", "9" * 5000, "0x0", "all", "void", "-1,0", ",0"])
def test_what_names_no_device_leaves_none(machine: Machine, visible: str) -> None:
    machine(*ids(10, 11))
    with pytest.raises(InputError, match="leaves none") as caught:
        local_devices(visible=visible)
    assert len(str(caught.value)) < 300


def test_a_device_named_twice_is_one(machine: Machine) -> None:
    machine(*ids(10, 11))
    assert [entry.index for entry in local_devices(visible="1,1,0,GPU-0000000b")] == [1, 0]
