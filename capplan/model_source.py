"""A name or a path → Model: catalog, config.json, safetensors and GGUF files, and on request the Hub.

Where weight files are given, `Model.stored` holds what their headers say and the architecture still
comes from the config (GGUF: from its own metadata). Where the two disagree, the file wins and
`Model.assumptions` says so.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from capplan import catalog
from capplan.errors import InputError, did_you_mean, shown
from capplan.readers import hf_config
from capplan.specs import Model, Role, StoredWeights

# What only some sources need (weight files, the Hub) is imported where it is used: a catalog model
# should not pay for it.
if TYPE_CHECKING:
    from capplan.readers.checkpoint import Checkpoint

CONFIG_NAME: Final = "config.json"
# A count that differs by more than this is said; below, it is norms and biases named differently.
TOLERANCE: Final = 0.01
_HUB_ID: Final = r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}"
_SPLIT: Final = r"-\d{5}-of-\d{5}$"
_SUFFIXES: Final = (".json", ".safetensors", ".gguf")


def load(name: str, *, online: bool = False) -> Model:
    """The model a name or path means.

    A catalog name or alias; a config.json; a folder with one, its safetensors files read too; a
    .safetensors file or an index with a config.json beside it; a .gguf file, or the first of a split set.
    `online`: an unknown hub id is asked for on the Hugging Face Hub.
    Errors: InputError naming the file, key or name; see hub.py for what the network adds.
    """
    path = model_path(name)
    if path is not None:
        return load_path(path)
    known = catalog.index("models").get(catalog.normalised(name)) if name.strip() else None
    if known is not None:
        return catalog.load_model(known)
    if not is_hub_id(name):
        return catalog.load_model(catalog.resolve("models", name, "model"))
    if online:
        return _from_hub(name)
    raise InputError(
        f"{shown(name)} is not in the catalog",
        where="--model",
        hint=did_you_mean(name, catalog.known_names("models"), "`capplan list models` shows what is known")
        + "; --online reads its config from the Hugging Face Hub",
    )


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a repository on the Hugging Face Hub: owner/name."""
    return re.fullmatch(_HUB_ID, name, re.ASCII) is not None


def model_path(name: str) -> Path | None:
    """The path `name` means, or None where it is a catalog name or hub id.

    A name is a path when it says so (./ ../ / ~, a known suffix) or when it is no catalog name and exists.
    """
    if "\0" in name or len(name) > 4096:
        raise InputError(f"{shown(name)} is no name or path", where="--model", hint="give a model or a file")
    if name.startswith((".", "/", "~", "\\")) or name.endswith(_SUFFIXES):
        try:
            return Path(name).expanduser()
        except RuntimeError:  # an unknown user after ~
            return Path(name)
    if catalog.normalised(name) in catalog.index("models"):
        return None
    return Path(name) if name.strip() and os.path.exists(name) else None


def load_path(path: Path) -> Model:
    """The model of a file or folder; see `load`."""
    if os.path.isdir(path):  # Path.is_dir raises on names the system refuses
        return _from_folder(path)
    if path.suffix == ".gguf":
        return _from_gguf(path)
    if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
        config = path.parent / CONFIG_NAME
        if not os.path.exists(config):
            return _weights_alone(path)
        return _with_weights(config, path)
    return _from_config(path)


def _from_folder(folder: Path) -> Model:
    config = folder / CONFIG_NAME
    names = _names(folder)
    if CONFIG_NAME not in names:
        ggufs = [name for name in names if name.endswith(".gguf")]
        whole = [name for name in ggufs if not re.search(_SPLIT, name[:-5])]
        firsts = [name for name in ggufs if name.endswith(".gguf") and "-00001-of-" in name]
        if len(whole) + len(firsts) == 1:
            return _from_gguf(folder / (whole + firsts)[0])
        if ggufs:
            raise InputError(
                f"holds {len(ggufs)} .gguf files", where=str(folder), hint="give the one that is meant"
            )
        if any(name.endswith(".safetensors") for name in names):
            return load_path(folder / next(name for name in names if name.endswith(".safetensors")))
    if any(name.endswith(".safetensors") for name in names):
        return _with_weights(config, folder)
    model = _from_config(config)
    if "model.safetensors.index.json" in names:
        return _noted(model, "the index names weight files that are not here: planned from config.json")
    return model


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise InputError(
            f"cannot be listed: {error.strerror}", where=str(folder), hint="check its permissions"
        ) from None


def _from_config(file: Path) -> Model:
    name = file.parent.name if file.name == CONFIG_NAME else file.stem
    from capplan.readers.json_file import read_json

    return _read(read_json(file), where=str(file), name=name.replace("--", "/") or str(file))


def _read(config: Mapping[str, object], *, where: str, name: str) -> Model:
    from capplan.readers.eagle import as_eagle, decoder_config, eagle_head

    head = eagle_head(config, where)
    if head is not None:
        config = decoder_config(config)
    model_type = hf_config.model_type_of(config)
    model = hf_config.read_model(
        config,
        where=where,
        name=name,
        architecture=catalog.architecture(model_type) if model_type else None,
        source=where,
    )
    return model if head is None else as_eagle(model, head)


def _with_weights(config_file: Path, weights: Path) -> Model:
    from capplan.readers.json_file import read_json
    from capplan.readers.safetensors import read_safetensors

    model = _from_config(config_file)
    quantization = read_json(config_file).get("quantization_config")
    checkpoint = read_safetensors(
        weights, quantization_config=quantization if isinstance(quantization, dict) else None
    )
    return with_checkpoint(model, checkpoint)


def _weights_alone(path: Path) -> Model:
    """Weight files without a config.json: their bytes are known, their layers and KV cache are not."""
    from capplan.readers.safetensors import read_safetensors

    model = Model(
        name=path.stem,
        architecture="unknown",
        hidden=1,
        vocab=1,
        heads=1,
        groups=(),
        outside=(),
        tied=False,
        source=str(path),
        assumptions=(f"no config.json beside {path.name}: its layers are not known; give --kv-from MODEL",),
    )
    return with_checkpoint(model, read_safetensors(path))


def _from_gguf(path: Path) -> Model:
    from capplan.readers.gguf import gguf_architecture, read_gguf
    from capplan.readers.gguf_config import config_of

    checkpoint = read_gguf(path)
    config, notes = config_of(gguf_architecture(checkpoint), checkpoint)
    model = _read(config, where=str(path), name=re.sub(_SPLIT, "", path.stem))
    return with_checkpoint(replace(model, assumptions=(*model.assumptions, *notes)), checkpoint)


def _from_hub(repo: str) -> Model:
    from capplan import hub
    from capplan.readers.json_file import read_json

    config_file = hub.fetch_config(repo)
    config = read_json(config_file)
    model = _read(config, where=str(config_file), name=repo)
    quantization = config.get("quantization_config")
    checkpoint = hub.fetch_checkpoint(repo, quantization if isinstance(quantization, dict) else None)
    if checkpoint is None:
        return _noted(model, f"{repo} has no safetensors files: weights planned from its config.json")
    return with_checkpoint(model, checkpoint)


def with_checkpoint(model: Model, checkpoint: "Checkpoint") -> Model:
    """`model` with what `checkpoint` holds; notes where the two disagree."""
    sizes = dict(checkpoint.bytes_by_role)
    counts = dict(checkpoint.parameters_by_role)
    notes: list[str] = []
    if model.tied and "lm_head" in sizes:
        dropped = sizes.pop("lm_head")
        counts.pop("lm_head", None)
        notes.append(
            f"the files hold an output matrix of {dropped:,} bytes although the embedding is tied: "
            "engines load one of the two"
        )
    stored = StoredWeights(
        format=checkpoint.format,
        files=checkpoint.files,
        bytes_by_role=_sorted(sizes),
        parameters_by_role=counts,
        by_dtype=dict(sorted(checkpoint.bytes_by_dtype.items(), key=lambda item: -item[1])),
    )
    said, held = model.parameters, stored.decoder_parameters
    if model.groups and abs(said - held) > TOLERANCE * held:
        notes.append(
            f"the config describes {said:,} parameters, the files hold {held:,}: the files' count is used"
        )
    return _noted(replace(model, stored=stored), *notes)


def _sorted(sizes: Mapping[Role, int]) -> dict[Role, int]:
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _noted(model: Model, *notes: str) -> Model:
    return replace(model, assumptions=(*model.assumptions, *notes))
