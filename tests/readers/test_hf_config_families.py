"""One restated config per architecture family with the parameter count of its model class.

`families.jsonl` holds a line per model: the keys that shape it (lists as runs), and what a model built from
them counts to: total (an encoder included), routed experts, parameters a token uses, towers where exact.
The counts come from the model classes of transformers 5.19.0 built without memory, or, where there is no such
class, from the tensors vLLM 0.32.0 makes; the well-known ones equal the published totals.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from capplan import catalog
from capplan.readers.hf_config import model_type_of, read_model
from capplan.specs import Model


def written_out(mapping: dict[str, Any]) -> Any:
    """The list that runs of [entry, times] stand for; any other mapping as it is."""
    if set(mapping) == {"runs"}:
        return [entry for entry, times in mapping["runs"] for _ in range(times)]
    return mapping


LINES = (Path(__file__).parent / "families.jsonl").read_text().splitlines()
FAMILIES = [json.loads(line, object_hook=written_out) for line in LINES]
# Totals the publishers state, or their checkpoints' headers: an independent check of the fixture itself.
PUBLISHED = {
    "falcon-7b": 6_921_720_704,
    "mamba-2.8b-hf": 2_768_345_600,
    "bloom-176b": 176_247_271_424,
    "opt-350m": 331_196_416,
    "gpt2-xl": 1_557_611_200,
    "starcoder2-15b": 15_957_889_024,
    "whisper-large-v3": 1_543_490_560,
    "qwen-7b": 7_721_324_544,
    "grok-1": 315_684_820_992,
    "t5-large": 737_668_096,
}


def model_of(config: dict[str, Any]) -> Model:
    model_type = model_type_of(config)
    return read_model(
        config,
        where="config.json",
        name="restated",
        architecture=catalog.architecture(model_type) if model_type else None,
    )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family["name"]))
def test_family_counts_to_the_parameters_of_its_class(family: dict[str, Any]) -> None:
    model = model_of(family["config"])
    inside = [(tensor, len(group.indices)) for group in model.groups for tensor in group.layer.tensors()]
    encoder = sum(tower.parameters for tower in model.towers if tower.role == "encoder")
    assert model.parameters + encoder == family["total"]
    experts = sum(t.parameters * times for t, times in inside if t.role == "experts")
    # JetMoE's two expert biases are always added; the class counts a quarter of them as used.
    slack = 24 * 1536 if "jetmoe" in family["name"] else 0
    assert experts == family["experts"]
    active = sum(t.elements * t.active_copies * times for t, times in inside)
    active += sum(tensor.parameters for tensor in model.outside) + encoder
    assert active == pytest.approx(family["active"], abs=slack + 0.5)
    if "towers" in family:
        beside = [tower for tower in model.towers if tower.role not in ("encoder", "mtp")]
        assert sum(tower.parameters for tower in beside) == family["towers"]
        assert all(tower.exact for tower in beside)


@pytest.mark.parametrize(("name", "total"), PUBLISHED.items(), ids=list(PUBLISHED))
def test_well_known_models_have_their_published_size(name: str, total: int) -> None:
    assert next(family["total"] for family in FAMILIES if family["name"] == name) == total


def test_the_fixture_covers_most_architectures() -> None:
    covered = {
        catalog.index("architectures")[catalog.normalised(model_type_of(family["config"]) or "")]
        for family in FAMILIES
    }
    assert len(covered) > 80
