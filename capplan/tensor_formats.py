"""Which format each linear layer of a model is stored in: the one asked for, or the checkpoint's own."""

from capplan.specs import Format, Model, Tensor
from capplan.weights import stored_bytes


class TensorFormats:
    """Formats by module path. `by_layer`: whether they go by a layer's position."""

    def __init__(self, model: Model, precision: Format | None) -> None:
        self.model, self.precision = model, precision
        self.matcher = None
        if precision is None and model.quantization is not None:
            from capplan.format_matcher import FormatMatcher  # a checkpoint's own formats only

            self.matcher = FormatMatcher(model.quantization)
        self.by_layer = self.matcher is not None
        self.file = _file_format(model) if precision is None else None
        self.kept_bits = model.dtype_bits if precision is None else precision.kept_bits

    def find(self, path: str, tensor: Tensor) -> Format | None:
        """The format of one module; None where it stays at 16 (or 32) bits."""
        if self.file is not None:
            return self.file
        if self.precision is None:
            return self.matcher.find(path) if self.matcher is not None and tensor.linear else None
        if self.precision.quantizes == "all":
            return self.precision
        kept = not tensor.linear or tensor.role in self.precision.keeps
        return None if kept else self.precision

    def bits(self, tensor: Tensor, stored: Format | None) -> float:
        """Stored bits of one of the tensor's elements, scales included; a mix of types at its average."""
        if stored is not None and (stored.rules or stored is self.file):
            return stored.effective_bits
        return stored_bytes(tensor, stored, kept_bits=self.kept_bits) * 8 / tensor.parameters


def _file_format(model: Model) -> Format | None:
    """A GGUF's types at their average: its tensor table is by type, not by module."""
    held = model.stored
    if held is None or held.format != "gguf":
        return None
    average = held.bytes * 8 / max(1, sum(held.parameters_by_role.values()))
    return Format(id="gguf", name="GGUF", element_bits=average, effective_bits=average, group_shape="gguf")
