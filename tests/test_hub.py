"""--online: one config.json and the headers through huggingface_hub, here a module that only pretends."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from capplan import model_source
from capplan.cli import run
from capplan.errors import ExtraMissingError, InputError, NetworkError
from capplan.weights import weight_budget

REPO = "someone/small-llama"
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
SHAPES = {
    "model.embed_tokens.weight": (512, 64), "model.norm.weight": (64,),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.self_attn.k_proj.weight": (32, 64),
    "model.layers.0.self_attn.v_proj.weight": (32, 64),
    "model.layers.0.self_attn.o_proj.weight": (64, 64),
    "model.layers.0.mlp.gate_proj.weight": (128, 64), "model.layers.0.mlp.up_proj.weight": (128, 64),
    "model.layers.0.mlp.down_proj.weight": (64, 128),
    "model.layers.0.input_layernorm.weight": (64,),
    "model.layers.0.post_attention_layernorm.weight": (64,),
}  # fmt: skip
PARAMETERS = 512 * 64 + 64 + 36_864 + 128


class _Response:
    def __init__(self, status: int) -> None:
        self.status_code = status


class HfHubHTTPError(OSError):
    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.response = _Response(status)


class RepositoryNotFoundError(HfHubHTTPError):
    pass


class GatedRepoError(RepositoryNotFoundError):
    pass


class EntryNotFoundError(Exception):
    pass


class LocalEntryNotFoundError(EntryNotFoundError, FileNotFoundError, ValueError):
    pass


class OfflineModeIsEnabled(ConnectionError):  # noqa: N818  # the package's own name
    pass


class NotASafetensorsRepoError(Exception):
    pass


class SafetensorsParsingError(Exception):
    pass


class HFValidationError(ValueError):
    pass


class Info:
    """One header entry, as the package gives it."""

    def __init__(self, dtype: str, shape: Any, begin: int, end: int) -> None:
        self.dtype, self.shape, self.data_offsets = dtype, shape, (begin, end)


class Hub:
    """What the fake package answers; an exception is raised instead."""

    def __init__(self, config: Path) -> None:
        self.config: Any = config
        self.entries: Any = self.headers()
        self.asked: list[str] = []

    @staticmethod
    def headers() -> dict[str, dict[str, Info]]:
        entries: dict[str, Info] = {}
        end = 0
        for name, shape in SHAPES.items():
            size = 2
            for width in shape:
                size *= width
            entries[name] = Info("BF16", list(shape), end, end + size)
            end += size
        return {"model.safetensors": entries}

    def hf_hub_download(self, *, repo_id: str, filename: str) -> str:
        self.asked.append(f"{repo_id}/{filename}")
        if isinstance(self.config, Exception):
            raise self.config
        return str(self.config)

    def get_safetensors_metadata(self, repo_id: str) -> Any:
        self.asked.append(f"{repo_id}: headers")
        if isinstance(self.entries, Exception):
            raise self.entries
        files = {name: types.SimpleNamespace(tensors=tensors) for name, tensors in self.entries.items()}
        return types.SimpleNamespace(files_metadata=files)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    made = Hub(config)
    module: Any = types.ModuleType("huggingface_hub")
    module.hf_hub_download = made.hf_hub_download
    module.get_safetensors_metadata = made.get_safetensors_metadata
    module.errors = types.SimpleNamespace(
        **{
            error.__name__: error
            for error in (
                HfHubHTTPError, RepositoryNotFoundError, GatedRepoError, EntryNotFoundError,
                LocalEntryNotFoundError, OfflineModeIsEnabled, NotASafetensorsRepoError,
                SafetensorsParsingError, HFValidationError,
            )
        }
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return made


def test_config_and_headers_of_an_unknown_repository(hub: Hub) -> None:
    model = model_source.load(REPO, online=True)
    assert hub.asked == [f"{REPO}/config.json", f"{REPO}: headers"]
    assert model.name == REPO
    budget = weight_budget(model, None)
    assert (budget.bytes, budget.parameters) == (2 * PARAMETERS, PARAMETERS)
    assert model.assumptions == ()


def test_the_catalog_is_asked_first(hub: Hub) -> None:
    assert model_source.load("meta-llama/Llama-3.1-8B", online=True).hidden == 4096
    assert hub.asked == []


def test_without_online_nothing_is_fetched(hub: Hub) -> None:
    with pytest.raises(InputError, match="not in the catalog"):
        model_source.load(REPO)
    assert hub.asked == []


def test_a_repository_without_safetensors_is_planned_from_its_config(hub: Hub) -> None:
    hub.entries = NotASafetensorsRepoError("only .bin here")
    model = model_source.load(REPO, online=True)
    assert model.stored is None
    assert "no safetensors files" in model.assumptions[0]
    assert weight_budget(model, None).bytes == 2 * PARAMETERS


@pytest.mark.parametrize(
    ("raised", "kind", "said", "status"),
    [
        (GatedRepoError("403", 403), InputError, "is gated", 2),
        (RepositoryNotFoundError("404", 404), InputError, "no repository", 2),
        (HFValidationError("bad id"), InputError, "no repository", 2),
        (EntryNotFoundError("404"), InputError, "has no such file", 2),
        (HfHubHTTPError("denied", 403), InputError, "HTTP 403", 2),
        (HfHubHTTPError("down", 503), NetworkError, "cannot be reached", 6),
        (OfflineModeIsEnabled("HF_HUB_OFFLINE"), NetworkError, "HF_HUB_OFFLINE", 6),
        (LocalEntryNotFoundError("not cached"), NetworkError, "not in the local cache", 6),
        (ConnectionError("no route"), NetworkError, "no route", 6),
        (TimeoutError("slow"), NetworkError, "slow", 6),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value)[:20],
)
def test_what_the_hub_refuses_is_explained(
    hub: Hub, raised: Exception, kind: type[Exception], said: str, status: int,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    hub.config = raised
    with pytest.raises(kind) as caught:
        model_source.load(REPO, online=True)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3
    for command in (["vram", "--model", REPO, "--online"], ["show", REPO, "--online"]):
        assert run(command) == status
        assert said in capsys.readouterr().err


def test_an_error_of_the_http_library_is_the_networks(hub: Hub) -> None:
    error = type("ConnectError", (Exception,), {"__module__": "httpx._exceptions"})("refused")
    hub.config = error
    with pytest.raises(NetworkError, match="refused"):
        model_source.load(REPO, online=True)


def test_without_the_package_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ExtraMissingError) as raised:
        model_source.load(REPO, online=True)
    assert "capplan[hub]" in raised.value.hint
    assert run(["vram", "--model", REPO, "--online"]) == 5
    assert "pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (Info("BF16", [2, 3], 0, 11), "does not take 11 bytes"),
        (Info("BF17", [2, 3], 0, 12), "BF17"),
        (Info("BF16", [-2, 3], 0, 12), "dimension -2"),
        (Info("BF16", [2.0, 3], 0, 12), "dimension 2.0"),
    ],
)
def test_headers_that_lie_are_refused(hub: Hub, entry: Info, said: str) -> None:
    hub.entries = {"model.safetensors": {"x": entry}}
    with pytest.raises(InputError) as raised:
        model_source.load(REPO, online=True)
    assert said in str(raised.value)


def test_a_tensor_in_two_files_is_refused(hub: Hub) -> None:
    one = next(iter(hub.headers().values()))
    hub.entries = {"a.safetensors": one, "b.safetensors": one}
    with pytest.raises(InputError, match="in two files"):
        model_source.load(REPO, online=True)


def test_an_unprintable_tensor_name_is_refused(hub: Hub) -> None:
    hub.entries = {"a.safetensors": {"x\n": Info("BF16", [1], 0, 2)}}
    with pytest.raises(InputError, match="unprintable"):
        model_source.load(REPO, online=True)
