"""Stored bytes of a model's weights: per tensor, per role, per tensor-parallel rank."""

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass

from capplan.errors import InputError
from capplan.formulas import memory
from capplan.specs import Format, Model, Quantization, Role, Tensor

PLAIN_16 = Format(id="16-bit", name="16-bit", element_bits=16, effective_bits=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleWeights:
    """Parameters and stored bytes of one role."""

    role: Role
    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBudget:
    """Stored weights of one rank (the whole model at tp 1), by role and in all."""

    roles: tuple[RoleWeights, ...]
    bytes: int
    parameters: int
    formats: tuple[str, ...]


def model_tensors(model: Model) -> Iterator[tuple[str, Tensor, int]]:
    """Every decoder tensor with its module path and how many layers have it.

    Layers are walked one by one only for a checkpoint whose formats go by module path.
    """
    by_path = model.quantization is not None
    for group in model.groups:
        for tensor in group.layer.tensors():
            if by_path:
                for index in group.indices:
                    yield f"{group.prefix}.{index}.{tensor.name}", tensor, 1
            else:
                yield f"{group.prefix}.N.{tensor.name}", tensor, len(group.indices)
    for tensor in model.outside:
        yield tensor.name, tensor, 1


def rank_shape(tensor: Tensor, tp: int) -> tuple[int, ...]:
    """Shape of one rank's part: units are divided, or replicated once there are fewer than ranks."""
    axis = tensor.split_axis
    if axis is None or tp == 1:
        return tensor.shape
    width = tensor.shape[axis]
    if tensor.split_multiple > 1:
        padded = -(-width // tensor.split_multiple) * tensor.split_multiple
        part = -(-padded // tp)
    else:
        part = width * -(-tensor.split_units // tp) // tensor.split_units
    return (*tensor.shape[:axis], part, *tensor.shape[axis + 1 :])


def stored_bytes(tensor: Tensor, stored: Format | None, *, kept_bits: int, tp: int = 1) -> int:
    """Bytes of a tensor (all copies) on one rank, in `stored`, or at `kept_bits` when None."""
    shape = rank_shape(tensor, tp)
    elements = 1
    for width in shape:
        elements *= width
    bits = tensor.dtype_bits or kept_bits
    if stored is None:
        return elements * bits // 8 * tensor.copies
    if len(shape) < 2:
        # GGUF keeps vectors at 32 bits; the plain formats store them like everything else.
        vector_bits = 32 if stored.group_shape == "gguf" else stored.element_bits
        one = elements * vector_bits / 8
        return round(one) * tensor.copies
    rows, cols = elements // shape[-1], shape[-1]
    if stored.group_shape == "gguf":
        return rows * -(-cols // stored.group) * stored.block_bytes * tensor.copies
    groups = {
        None: 0,
        "input": rows * -(-cols // stored.group),
        "block": -(-rows // stored.block_rows) * -(-cols // stored.block_cols),
        "channel": rows,
        "tensor": 1,
    }[stored.group_shape]
    one = memory.weight_bytes(parameters=elements, bits=stored.element_bits)
    one += memory.group_scales_bytes(
        groups=groups, scale_bits=stored.scale_bits, zero_bits=stored.zero_bits
    )
    return (round(one) + stored.extra_bytes_per_tensor) * tensor.copies


def weight_budget(model: Model, precision: Format | None, *, tp: int = 1) -> WeightBudget:
    """Stored weights of the decoder on one of `tp` ranks.

    `precision` None keeps the checkpoint's own formats. Vision towers and MTP layers are not in it.
    Raises InputError for a split the model does not allow.
    """
    if tp > 1:
        check_split(model, tp)
    matcher = None if precision or model.quantization is None else _Matcher(model.quantization)
    bytes_by_role: dict[Role, int] = {}
    parameters_by_role: dict[Role, int] = {}
    used: dict[str, None] = {}
    for path, tensor, layers in model_tensors(model):
        if precision is not None:
            stored = _chosen(tensor, precision)
            kept = precision.kept_bits
        else:
            stored = matcher.find(path) if matcher is not None and tensor.linear else None
            kept = model.dtype_bits
        if stored is not None and (precision is None or stored.quantizes == "linear"):
            used[stored.name] = None
        size = stored_bytes(tensor, stored, kept_bits=kept, tp=tp) * layers
        bytes_by_role[tensor.role] = bytes_by_role.get(tensor.role, 0) + size
        parameters_by_role[tensor.role] = (
            parameters_by_role.get(tensor.role, 0) + tensor.parameters * layers
        )
    return WeightBudget(
        roles=tuple(
            RoleWeights(role=role, parameters=parameters_by_role[role], bytes=size)
            for role, size in bytes_by_role.items()
        ),
        bytes=sum(bytes_by_role.values()),
        parameters=sum(parameters_by_role.values()),
        formats=tuple(used),
    )


def tower_bytes(model: Model) -> dict[str, int]:
    """Stored bytes of each part beside the decoder, at the model's dtype, by its name."""
    return {
        tower.name: tower.parameters * model.dtype_bits // 8 for tower in model.towers
    }


def _chosen(tensor: Tensor, precision: Format) -> Format | None:
    """The user's format for this tensor, or None where the format leaves it at 16 bits."""
    if precision.quantizes == "all":
        return precision
    return precision if tensor.linear and tensor.role not in precision.keeps else None


def check_split(model: Model, tp: int) -> None:
    """Refuse a tensor-parallel degree that would cut a head or a column group.

    Key/value heads may be fewer than ranks (they are replicated) but must then divide them.
    """
    if model.heads % tp:
        raise InputError(
            f"{model.heads} attention heads cannot be split over {tp} GPUs",
            where=f"--tp {tp}, {model.name}",
            hint=f"allowed: {', '.join(map(str, allowed_tp(model)))}",
        )
    for _, tensor, _ in model_tensors(model):
        units = tensor.split_units
        if tensor.split_axis is None or tensor.split_multiple > 1:
            continue
        if units % tp and tp % units:
            raise InputError(
                f"{tensor.name}: {units} units cannot be split over {tp} GPUs",
                where=f"--tp {tp}, {model.name}",
                hint=f"allowed: {', '.join(map(str, allowed_tp(model)))}",
            )


def allowed_tp(model: Model, limit: int = 64) -> list[int]:
    """Tensor-parallel degrees up to `limit` that split this model evenly."""
    cut = [
        tensor.split_units
        for group in model.groups
        for tensor in group.layer.tensors()
        if tensor.split_axis is not None and tensor.split_multiple == 1
    ]
    return [
        tp
        for tp in range(1, limit + 1)
        if model.heads % tp == 0 and all(units % tp == 0 or tp % units == 0 for units in cut)
    ]


_LAYER = re.compile(r"^.*?layers\.")


def _tail(path: str) -> str:
    """A module path from "layers." on: wrappers prefix it differently in config and model."""
    return _LAYER.sub("layers.", path) if "layers." in path else path.rsplit("model.", 1)[-1]


class _Matcher:
    """Which format a module path has, by the checkpoint's keep list and rules."""

    def __init__(self, quantization: Quantization) -> None:
        self.keep = _Patterns(quantization.keep)
        self.rules = [
            (_Patterns(patterns), stored, patterns == ("Linear",))
            for patterns, stored in quantization.rules
        ]

    def find(self, path: str) -> Format | None:
        """The format, or None where the module stays at the model's dtype."""
        # One expert stands for all: no published list treats them apart.
        path = path.replace(".experts.*.", ".experts.0.")
        if self.keep.match(path):
            return None
        for patterns, stored, everything in self.rules:
            if everything or patterns.match(path):
                return stored
        return None


class _Patterns:
    """A list of module patterns (see Quantization), prepared for many paths."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.words = {p for p in patterns if "." not in p and "*" not in p and ":" not in p}
        self.literals = {
            _tail(p) for p in patterns if "." in p and "*" not in p and not p.startswith("re:")
        }
        self.regexes = [re.compile(p[3:]) for p in patterns if p.startswith("re:")]
        globs = [p for p in patterns if "*" in p and not p.startswith("re:")]
        bodies = [f"(?:{fnmatch.translate(_tail(p))})" for p in globs]
        bodies += [f"(?:{fnmatch.translate(_tail(p) + '.*')})" for p in globs]
        self.globs = re.compile("|".join(bodies)) if bodies else None

    def match(self, path: str) -> bool:
        """Whether a pattern names this module or one that contains it."""
        segments = path.split(".")
        if not self.words.isdisjoint(segments):
            return True
        tail = _tail(path)
        if self.literals:
            parts = tail.split(".")
            if any(".".join(parts[:end]) in self.literals for end in range(1, len(parts) + 1)):
                return True
        if self.globs is not None and (self.globs.match(tail) or self.globs.match(path)):
            return True
        return any(regex.match(path) for regex in self.regexes)
