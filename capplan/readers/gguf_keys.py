"""What a GGUF says of its model, for reading it as a config: typed keys, and the tensors of its layers."""

import re
from collections.abc import Sequence
from typing import Any, Final

from capplan.errors import InputError, shown
from capplan.readers.checkpoint import Checkpoint
from capplan.readers.config_keys import MAX_LAYERS, MAX_WIDTH, Keys
from capplan.readers.gguf_architectures import HARMLESS, GgufArchitecture

_BLOCK: Final = re.compile(r"blk\.(\d{1,4})\.(.+)", re.ASCII)


class GgufModel:
    """One GGUF's architecture keys (without their prefix) and its layers' tensors by name.

    `blocks` counts MTP layers too, `layers` only the decoder's. `notes` collects what llama.cpp does
    otherwise than the model's own class.
    """

    def __init__(
        self,
        found: dict[str, Any],
        checkpoint: Checkpoint,
        architecture: GgufArchitecture,
    ) -> None:
        self.name = str(found["general.architecture"])
        self.arch = architecture
        self.keys = Keys(found, where=str(checkpoint.path), path=f"{self.name}.")
        self.keys.used.update(("general.architecture", "vocab_length", "has_output_weight"))
        self.notes: list[str] = []
        self._shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors}
        self._layers: dict[int, dict[str, tuple[int, ...]]] = {}
        for name, shape in self._shapes.items():
            match = _BLOCK.fullmatch(name)
            if match:
                self._layers.setdefault(int(match[1]), {})[match[2]] = shape
        self.blocks = self.keys.integer("block_count", high=MAX_LAYERS)
        extra = self.keys.integer("nextn_predict_layers", default=0, low=0, high=self.blocks - 1)
        self.layers = self.blocks - extra

    def per_layer(self, key: str, *, high: int = MAX_WIDTH) -> Sequence[int] | None:
        """One value a decoder layer, of a key that holds one for all or a list; None when absent.

        A list has an entry for every block, or for the decoder's alone.
        """
        if self.keys.present(key) is None:
            return None
        value = self.keys.value(key)
        values: Sequence[object] = value if isinstance(value, list | tuple) else [value] * self.layers
        if not self.layers <= len(values) <= self.blocks + 8:
            raise self.keys.fail(
                key, f"has {len(values)} entries for {self.layers} layers", "one for each layer"
            )
        made: list[int] = []
        for item in values[: self.layers]:
            if not isinstance(item, int) or not 0 <= item <= high:
                raise self.keys.fail(
                    key, f"{shown(item)} is not a whole number from 0 to {high}", "convert again"
                )
            made.append(int(item))
        return made

    def agreed(self, key: str, values: Sequence[int], kinds: Sequence[str], kind: str) -> int:
        """The one value the layers of a kind have; 0 where there is no such layer."""
        found = {value for value, own in zip(values, kinds, strict=True) if own == kind}
        if len(found) > 1:
            raise self.keys.fail(
                key,
                f"{shown(sorted(found))} in layers that attend alike",
                "such a model cannot be planned from its GGUF; give its config.json",
            )
        return found.pop() if found else 0

    @property
    def has_layers(self) -> bool:
        """Whether the file holds the tensors of layers at all."""
        return bool(self._layers)

    def shape(self, name: str, layer: int | None = None) -> tuple[int, ...]:
        """Shape of a tensor of the file or of one layer (".weight" left out); () where it is not there."""
        if layer is None:
            return self._shapes.get(f"{name}.weight", ())
        return self._layers.get(layer, {}).get(f"{name}.weight", ())

    def routes(self, layer: int) -> bool:
        """Whether a layer has routed experts: merged ones, or one by one as before April 2024."""
        return any(
            name in self._layers.get(layer, {})
            for name in ("ffn_up_exps.weight", "ffn_gate_up_exps.weight", "ffn_up.0.weight")
        )

    @property
    def routes_any(self) -> bool:
        """Whether any layer of the decoder has routed experts."""
        return any(self.routes(layer) for layer in range(self.layers))

    def check_unused(self) -> None:
        """Refuse keys that nobody asked for and that could change memory."""
        for key in self.keys.unused():
            if HARMLESS.fullmatch(key) is None and self.keys.data[key] not in (0, False, ""):
                raise InputError(
                    f"{self.name}.{key}: not understood (value {shown(self.keys.data[key], 40)}), and it "
                    "could change memory",
                    where=self.keys.where,
                    hint="give the model's config.json instead",
                )
