"""Invariants over every catalog row: what holds for one GPU, model or format must hold for all."""

import datetime
import json
from pathlib import Path

import pytest

from capplan import catalog
from capplan.kv import kv_layout
from capplan.weights import allowed_tp, weight_budget

GPUS = catalog.ids("gpus")
MODELS = catalog.ids("models")
FORMATS = catalog.ids("formats")


def raw(kind: str, identity: str) -> dict[str, object]:
    return dict(catalog.read_yaml(catalog.PROFILES / kind / f"{identity}.yaml"))


def checkpoints() -> list[str]:
    return [
        f"{identity}#{number}"
        for identity in MODELS
        for number in range(len(raw("models", identity).get("checkpoints") or ()))  # type: ignore[arg-type]
    ]


def test_catalog_is_as_large_as_promised() -> None:
    assert len(GPUS) >= 82
    assert len(MODELS) >= 90
    assert len(FORMATS) >= 30


def test_alias_index_is_current() -> None:
    stored = json.loads((catalog.PROFILES / "index.json").read_text())
    assert stored == catalog.build_index(), "run `python -m capplan.catalog`"


@pytest.mark.parametrize("kind", catalog.KINDS)
def test_every_file_has_its_id_a_source_and_a_date(kind: str) -> None:
    for identity in catalog.ids(kind):
        data = raw(kind, identity)
        assert data["id"] == identity
        assert str(data.get("source", "")).strip(), identity
        read_on = datetime.date.fromisoformat(str(data["read_on"]))
        assert read_on <= datetime.date.today() + datetime.timedelta(days=1), identity


@pytest.mark.parametrize("identity", GPUS)
def test_gpu_is_physical(identity: str) -> None:
    gpu = catalog.load_gpu(identity)
    gib = 1 << 30
    assert 3 * gib <= gpu.usable_bytes <= 400 * gib
    # A driver never reports far more than is sold: "GB" are GiB at most.
    assert gpu.usable_bytes <= gpu.memory_bytes * 1.09
    assert 5e10 <= gpu.memory_bandwidth_bytes_per_s <= 1e13
    peaks = gpu.flop_per_s
    assert all(1e11 < value < 2e16 for value in peaks.values())
    for low, high in (("fp8", "fp4"), ("bf16", "fp8"), ("tf32", "bf16")):
        if low in peaks and high in peaks:
            # Dense peaks at most double per halving; a ratio of four is a sparse figure.
            assert peaks[high] <= peaks[low] * 4.1, f"{high} beside {low}"
    if gpu.vendor == "nvidia":
        assert gpu.compute_capability is not None
        assert 6 <= float(gpu.compute_capability) <= 13


@pytest.mark.parametrize("identity", [*MODELS, *checkpoints()])
def test_model_reads_and_is_plausible(identity: str) -> None:
    model = catalog.load_model(identity)
    budget = weight_budget(model, None)
    assert model.parameters == budget.parameters > 1e7
    # From 1-bit formats to 16-bit, embeddings and scales included.
    assert 1 <= budget.bytes * 8 / budget.parameters <= 16.001
    assert model.max_context is None or model.max_context >= 512
    layout = kv_layout(model, kv_bits=16)
    assert layout.bytes_per_token > 0 or layout.state_bytes > 0
    assert kv_layout(model, kv_bits=8).bytes_per_token <= layout.bytes_per_token


@pytest.mark.parametrize("identity", MODELS)
def test_more_ranks_never_hold_less_in_all(identity: str) -> None:
    model = catalog.load_model(identity)
    rank_weights, rank_kv = [], []
    degrees = allowed_tp(model, 8)
    for tp in degrees:
        rank_weights.append(weight_budget(model, None, tp=tp).bytes)
        rank_kv.append(kv_layout(model, kv_bits=16, tp=tp).bytes_per_token)
    for sizes in (rank_weights, rank_kv):
        assert sizes == sorted(sizes, reverse=True), "a rank never holds more with more ranks"
        totals = [size * tp for size, tp in zip(sizes, degrees, strict=True)]
        # Rounding of a share of a state is the only thing that may lower a sum, by a byte a layer.
        assert all(total >= totals[0] - 4096 for total in totals)


@pytest.mark.parametrize("identity", MODELS)
def test_lighter_formats_store_less(identity: str) -> None:
    model = catalog.load_model(identity)
    sizes = {name: weight_budget(model, catalog.load_format(name)).bytes for name in
             ("fp32", "bf16", "fp8", "int8", "awq", "int4")}  # fmt: skip
    assert sizes["fp32"] == 2 * sizes["bf16"]
    assert sizes["bf16"] >= sizes["int8"] > 0
    assert sizes["fp8"] >= sizes["awq"] >= sizes["int4"] > 0


@pytest.mark.parametrize("identity", FORMATS)
def test_format_bits_add_up(identity: str) -> None:
    stored = catalog.load_format(identity)
    if stored.group_shape in ("input", "block"):
        scales = (stored.scale_bits + stored.zero_bits) / stored.group
        assert stored.effective_bits == stored.element_bits + scales
    elif stored.group_shape == "gguf" and stored.block_bytes:
        assert stored.effective_bits == stored.block_bytes * 8 / stored.group
    assert 0 < stored.element_bits <= stored.effective_bits <= 32


def test_every_alias_resolves_to_its_owner() -> None:
    for kind in ("gpus", "models", "formats"):
        for identity in catalog.ids(kind):
            for alias in raw(kind, identity).get("aliases") or ():  # type: ignore[union-attr]
                assert catalog.resolve(kind, str(alias), kind).partition("#")[0] == identity


def test_size_aliases_name_one_model_each() -> None:
    sizes = {
        str(size): identity for identity in MODELS if (size := raw("models", identity).get("size_alias"))
    }
    for size in ("7b", "8b", "13b", "32b", "70b", "405b"):
        assert size in sizes
        assert catalog.resolve("models", size, "model") == sizes[size]


def test_profiles_are_reached_through_the_package() -> None:
    assert (Path(catalog.__file__).parent / "profiles").resolve() == catalog.PROFILES.resolve()
