"""`import capplan`: light, every public name there, and still callable after its module was imported."""

import subprocess
import sys

import pytest

import capplan


def test_import_is_light() -> None:
    script = (
        "import sys, capplan\n"
        "print(sorted({'numpy', 'pandas', 'torch', 'yaml', 'typer', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", capplan.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    assert getattr(capplan, name).__doc__


def test_answers_are_frozen_with_json_and_a_notebook_view() -> None:
    import capplan.check  # imports every module that could shadow a name

    answers = [
        capplan.vram("8b", gpus=("h100",)),
        capplan.latency("8b", gpu="h100", concurrency=4),
        capplan.cost("h100", price_usd_per_gpu_hour=2.0),
    ]
    for answer, schema in zip(answers, ("vram", "latency", "cost"), strict=True):
        assert answer.to_dict()["schema"] == f"capplan.{schema}/1"
        assert "<table" in answer._repr_html_()
        with pytest.raises(AttributeError):
            answer.question = None  # type: ignore[misc]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'vramm'"):
        capplan.vramm  # noqa: B018
