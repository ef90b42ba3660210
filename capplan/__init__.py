"""GPU capacity planning and cost of LLM serving, on numbers that say where they come from."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capplan.estimate import VramEstimate, vram

__all__ = ["VramEstimate", "__version__", "vram"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Lazily, so that `import capplan.cli` stays light.
    if name in ("vram", "VramEstimate"):
        from capplan import estimate

        return getattr(estimate, name)
    raise AttributeError(f"module 'capplan' has no attribute {name!r}")
