"""Several models on one GPU, in the order in which they start."""

import json
from typing import Any

import pytest

from capplan import estimate
from capplan.cli import run
from capplan.engines.plan import EngineFlags
from capplan.engines.vllm_defaults import calibration
from capplan.engines.vllm_terms import visible_bytes
from capplan.errors import InputError
from capplan.services import Service, read_service
from capplan.units import GIB, MIB

CARD = 24 * GIB
CONTEXT = int(calibration()["process_bytes"])


def started(first: float, *others: str, version: str = "0.24", **fields: Any) -> tuple[Service, ...]:
    flags: dict[str, Any] = {"max_model_len": 4096, "gpu_memory_utilization": first, "version": version}
    found = estimate.vram(
        fields.pop("model", "llama-3.1-8b"),
        users=1,
        gpu_memory_bytes=fields.pop("memory", CARD),
        engine="vllm",
        engine_flags=EngineFlags(**(flags | fields)),
        services=others,
    )
    return found.services


def small(fraction: float) -> str:
    return f"qwen2.5-0.5b:gpu_memory_utilization={fraction},max_model_len=4096"


def test_the_second_finds_what_the_first_has_left() -> None:
    one, two = started(0.8, small(0.15))
    total = visible_bytes(CARD)
    assert one.free_bytes == total
    # Its fraction, and what its process holds beside it.
    assert one.takes_bytes == pytest.approx(int(0.8 * total) + CONTEXT, abs=2)
    assert two.free_bytes == total - one.takes_bytes
    assert (one.starts, two.starts) == (True, True)


def test_fractions_that_sum_to_one_leave_no_room_for_contexts() -> None:
    _, two = started(0.8, small(0.2))
    assert two.starts is False
    assert two.takes_bytes == 0
    assert "is free, less than the budget" in (two.reason or "")
    # What is free less its own context, in hundredths: 0.18 of 23.53 GiB.
    flag = two.advice[0].flag
    assert flag.startswith("--with qwen2.5-0.5b:gpu_memory_utilization=0.1")
    fraction = float(flag.rpartition("=")[2])
    assert started(0.8, small(fraction))[1].starts is True


def test_order_decides_who_is_refused() -> None:
    small_first = estimate.vram(
        "qwen2.5-0.5b",
        users=1,
        gpu_memory_bytes=CARD,
        engine="vllm",
        engine_flags=EngineFlags(max_model_len=4096, gpu_memory_utilization=0.2, version="0.24"),
        services=("llama-3.1-8b:gpu_memory_utilization=0.8,max_model_len=4096",),
    )
    assert [service.starts for service in small_first.services] == [True, False]
    assert small_first.fits is False


def test_one_that_refuses_takes_nothing() -> None:
    _, two, three = started(0.8, small(0.3), small(0.15))
    assert (two.starts, three.starts) == (False, True)
    assert three.free_bytes == two.free_bytes


@pytest.mark.parametrize(
    ("version", "second", "starts"),
    [
        ("0.24", 0.2, True),
        ("0.8.5", 0.2, False),
        ("0.8.5", 0.3, True),
        ("0.7.3", 0.2, True),
        ("0.6.4", 0.2, False),
    ],
    ids=["its own memory", "charged with the other's", "above the other's", "before v1", "0.6.4"],
)
def test_versions_that_charge_the_neighbour(version: str, second: float, starts: bool) -> None:
    # TinyLlama twice on an L40S (44.4 GiB): 0.2 then 0.2 refused, 0.2 then 0.3 worked.
    options = f"tinyllama-1.1b:gpu_memory_utilization={second},max_model_len=1024"
    found = estimate.vram(
        "tinyllama-1.1b",
        users=1,
        context=1024,
        gpus=("l40s",),
        engine="vllm",
        engine_flags=EngineFlags(gpu_memory_utilization=0.2, max_model_len=1024, version=version),
        services=(options,),
    )
    assert found.services[0].starts is True
    assert found.services[1].starts is starts


def test_what_is_held_outside_the_budget() -> None:
    one, _ = started(0.4, small(0.4), model="qwen2.5-0.5b", memory=8188 * MIB, version="0.9.0")
    # 303 MiB were seen beside the budget, the CUDA context and graphs.
    assert one.takes_bytes - one.plan.terms["budget"] == pytest.approx(303 * MIB, abs=2)


def test_a_version_that_charges_takes_the_sum_as_its_fraction() -> None:
    # 0.45 and then 0.9, which counts both, was the way to run two on one GPU.
    _, two = started(0.45, small(0.9), model="qwen2.5-0.5b", version="0.8.5")
    assert two.starts is True
    assert two.plan.terms["others"] == pytest.approx(0.45 * visible_bytes(CARD) + CONTEXT, abs=2)
    assert started(0.45, small(0.9), model="qwen2.5-0.5b")[1].starts is False


def test_users_of_a_service_must_be_in_its_pool() -> None:
    _, two = started(0.7, small(0.15) + ",users=2000,context=4096")
    assert two.starts is True
    assert two.fits is False
    assert two.reason == "its pool does not hold the users asked for"


def test_other_engines_see_what_is_free() -> None:
    found = estimate.vram(
        "llama-3.2-1b",
        users=1,
        gpu_memory_bytes=CARD,
        engine="llama.cpp",
        engine_flags=EngineFlags(max_model_len=8192),
        services=("llama-3-8b:precision=q4_k_m,max_model_len=8192", "70b:precision=q4_k_m,gpu_layers=81"),
    )
    assert [service.starts for service in found.services] == [True, True, False]
    first, second, _ = found.services
    assert second.free_bytes == first.free_bytes - first.takes_bytes


@pytest.mark.parametrize(
    ("text", "model", "options"),
    [
        ("8b", "8b", {}),
        ("C:/models/a", "C:/models/a", {}),
        ("a:max-model-len=4096,enforce_eager=true", "a", {"max_model_len": 4096, "enforce_eager": True}),
        ("a:b:gpu_memory_utilization=0.3", "a:b", {"gpu_memory_utilization": 0.3}),
    ],
)
def test_services_are_read(text: str, model: str, options: dict[str, Any]) -> None:
    assert read_service(text) == (model, options)


@pytest.mark.parametrize(
    "text",
    [
        "a:max_model=4096",
        "a:max_model_len=many",
        "a:max_model_len=-1",
        "a:max_model_len=1,max_model_len=2",
        "a:enforce_eager=maybe",
        "a:gpu_memory_utilization=nan",
        "a:precision=",
        ":users=1",
    ],
)
def test_services_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InputError):
        read_service(text)


@pytest.mark.parametrize(
    "options",
    [
        "--gpu l4 --with 8b",
        "--engine vllm --with 8b",
        "--engine all --gpu l4 --with 8b",
        "--engine vllm --gpu l4 --gpu h100 --with 8b",
        "--engine vllm --gpu l4 --tp 2 --with 8b",
        "--engine vllm --gpu h100 --with nosuchmodel",
        "--engine vllm --gpu h100 --with 8b:gpu_memory_utilization=1.5",
    ],
)
def test_contradictions(options: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["vram", "--model", "qwen2.5-0.5b", *options.split()]) == 2
    assert capfd.readouterr().err.count("\n") == 3


def test_command_line(capfd: pytest.CaptureFixture[str]) -> None:
    base = "vram --model 8b --gpu-memory 24GiB --engine vllm --max-model-len 4096 --users 1"
    base += " --gpu-memory-utilization 0.8"
    assert run([*base.split(), "--with", small(0.15)]) == 0
    assert "2. Qwen2.5-0.5B" in capfd.readouterr().out
    assert run([*base.split(), "--with", small(0.3), "-o", "json"]) == 4
    found = json.loads(capfd.readouterr().out)
    assert [service["starts"] for service in found["services"]] == [True, False]
    assert found["fits"] is False
    assert run([*base.split(), "--with", small(0.3), "-o", "csv"]) == 4
    assert len(capfd.readouterr().out.splitlines()) == 3
