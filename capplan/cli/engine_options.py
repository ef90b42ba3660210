"""The options of `--engine`: they go with it only."""

from typing import TYPE_CHECKING, Any, Final

from capplan.errors import InputError, shown

ALL_LAYERS: Final = 1 << 30
"""More layers than any model has."""

if TYPE_CHECKING:
    from capplan.engines.plan import EngineFlags


def engine_flags(engine: str | None, *, overhead: str | None, **asked: Any) -> "EngineFlags | None":
    """The flags of the engine asked for; InputError for flags without an engine, or one with --overhead."""
    if engine is None:
        for name, value in asked.items():
            if value not in (None, False):
                option = "engine-version" if name == "version" else name.replace("_", "-")
                raise InputError(
                    f"--{option} without an engine",
                    where=f"--{option}",
                    hint=f"add --engine {'llama.cpp' if name == 'gpu_layers' else 'vllm'}",
                )
        return None
    if overhead is not None:
        raise InputError(
            "an engine has its own overhead", where="--overhead, --engine", hint="give one of them"
        )
    from capplan.engines.plan import EngineFlags

    return EngineFlags(**asked)


def layer_count(text: str | None) -> int | None:
    """The layers of --gpu-layers: a number, or all; InputError otherwise."""
    if text is None:
        return None
    if text.strip().lower() == "all":
        return ALL_LAYERS
    if not (text.strip().isascii() and text.strip().isdigit()) or int(text) > ALL_LAYERS:
        raise InputError(f"{shown(text)} is no number of layers", where="--gpu-layers", hint="0, 20, or all")
    return int(text)


def stage_layers(text: str | None) -> tuple[int, ...]:
    """The layers of --pp-layers: whole numbers with commas between; InputError otherwise."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 1 << 20 for part in parts):
        raise InputError(f"{shown(text)} are no stages", where="--pp-layers", hint="layers of each, as 16,32")
    return tuple(int(part) for part in parts)
