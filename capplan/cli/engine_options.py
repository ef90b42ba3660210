"""The options of `--engine`: they go with it only."""

from typing import TYPE_CHECKING, Any

from capplan.errors import InputError

if TYPE_CHECKING:
    from capplan.engines.plan import EngineFlags


def engine_flags(engine: str | None, *, overhead: str | None, **asked: Any) -> "EngineFlags | None":
    """The flags of the engine asked for; InputError for flags without an engine, or one with --overhead."""
    if engine is None:
        for name, value in asked.items():
            if value not in (None, False):
                option = "engine-version" if name == "version" else name.replace("_", "-")
                raise InputError(
                    f"--{option} without an engine", where=f"--{option}", hint="add --engine vllm"
                )
        return None
    if overhead is not None:
        raise InputError(
            "an engine has its own overhead", where="--overhead, --engine", hint="give one of them"
        )
    from capplan.engines.plan import EngineFlags

    return EngineFlags(**asked)
