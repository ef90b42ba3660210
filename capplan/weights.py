"""Stored bytes of a model's weights: per tensor, per role, per tensor-parallel rank."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from capplan.errors import InputError
from capplan.formulas import memory
from capplan.specs import (
    BESIDE_THE_DECODER,
    Format,
    Model,
    Role,
    StoredWeights,
    Tensor,
    Tower,
)
from capplan.split import Rank, Stage

PLAIN_16 = Format(id="16-bit", name="16-bit", element_bits=16, effective_bits=16)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoleWeights:
    """Parameters and stored bytes of one role."""

    role: Role
    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightBudget:
    """Stored weights of one rank (the whole model at tp 1), by role and in all."""

    roles: tuple[RoleWeights, ...]
    bytes: int
    parameters: int
    formats: tuple[str, ...]


def model_tensors(
    model: Model, *, by_path: bool | None = None, stage: Stage | None = None
) -> Iterator[tuple[str, Tensor, int]]:
    """Every decoder tensor (of a pipeline stage) with its module path and how many layers have it.

    Layers are walked one by one where `by_path` says so; by itself only for a checkpoint whose formats go
    by module path.
    """
    if by_path is None:
        by_path = model.quantization is not None
    for group in model.groups:
        indices = group.indices
        if stage is not None:
            indices = tuple(index for index in indices if index in stage.layers)
        for tensor in group.layer.tensors() if indices else ():
            if by_path:
                for index in indices:
                    yield f"{group.prefix}.{index}.{tensor.name}", tensor, 1
            else:
                yield f"{group.prefix}.N.{tensor.name}", tensor, len(indices)
    for tensor in model.outside:
        if stage is None or stage.holds(tensor, tied=model.tied):
            yield tensor.name, tensor, 1


def placed_tensors(model: Model) -> list[tuple[Tensor, int | None]]:
    """Every decoder tensor with its layer (None: outside them), in the order of gguf_mix.mix_tensors."""
    found: list[tuple[Tensor, int | None]] = [(tensor, None) for tensor in model.outside]
    layers = [(index, group.layer) for group in model.groups for index in group.indices]
    for index, layer in sorted(layers, key=lambda entry: entry[0]):
        found += [(tensor, index) for tensor in layer.tensors()]
    return found


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


def stored_bytes(
    tensor: Tensor, stored: Format | None, *, kept_bits: int, tp: int = 1, copies: int | None = None
) -> int:
    """Bytes of a tensor (all copies, or so many) on one rank, in `stored`, or at `kept_bits` when None."""
    shape = rank_shape(tensor, tp)
    copies = tensor.copies if copies is None else copies
    elements = 1
    for width in shape:
        elements *= width
    bits = tensor.dtype_bits or kept_bits
    if stored is None:
        return elements * bits // 8 * copies
    if len(shape) < 2:
        # GGUF keeps vectors at 32 bits; the plain formats store them like everything else.
        vector_bits = 32 if stored.group_shape == "gguf" else stored.element_bits
        one = elements * vector_bits / 8
        return round(one) * copies
    rows, cols = elements // shape[-1], shape[-1]
    if stored.group_shape == "gguf":
        return rows * -(-cols // stored.group) * stored.block_bytes * copies
    groups = {
        None: 0,
        "input": rows * -(-cols // stored.group),
        "block": -(-rows // stored.block_rows) * -(-cols // stored.block_cols),
        "channel": rows,
        "tensor": 1,
    }[stored.group_shape]
    one = memory.weight_bytes(parameters=elements, bits=stored.element_bits)
    one += memory.group_scales_bytes(groups=groups, scale_bits=stored.scale_bits, zero_bits=stored.zero_bits)
    return (round(one) + stored.extra_bytes_per_tensor) * copies


def weight_budget(
    model: Model, precision: Format | None, *, tp: int = 1, rank: Rank | None = None
) -> WeightBudget:
    """Stored weights of the decoder on one of `tp` ranks, or on `rank`.

    `precision` None keeps the checkpoint's own formats: exact from its files where they were read, else from
    what its config says. Vision towers and MTP layers are not in it.
    Raises InputError for a split the model does not allow.
    """
    rank = Rank(tp=tp, expert_tp=tp) if rank is None else rank
    if not rank.whole:
        check_split(model, rank.tp, expert_tp=rank.expert_tp)
    if precision is None and model.stored is not None:
        return _stored_budget(model, model.stored, rank)
    kept = model.dtype_bits if precision is None else precision.kept_bits
    bytes_by_role: dict[Role, int] = {}
    parameters_by_role: dict[Role, int] = {}
    used: dict[str, None] = {}
    for tensor, stored, layers in _formats(model, precision, rank.stage):
        if stored is not None and (precision is None or stored.quantizes == "linear"):
            used[stored.name] = None
        cut, copies = rank.cut(tensor)
        size = stored_bytes(tensor, stored, kept_bits=kept, tp=cut, copies=copies) * layers
        bytes_by_role[tensor.role] = bytes_by_role.get(tensor.role, 0) + size
        parameters_by_role[tensor.role] = parameters_by_role.get(tensor.role, 0) + tensor.parameters * layers
    return _budget(bytes_by_role, parameters_by_role, tuple(used))


def _formats(
    model: Model, precision: Format | None, stage: Stage | None
) -> Iterator[tuple[Tensor, Format | None, int]]:
    """Every decoder tensor, the format it has (None: kept at 16 bits), and how many layers have it so."""
    if precision is not None and precision.rules:
        from capplan.gguf_mix import mix_tensors  # llama.cpp's mixes only

        # Which type a layer gets depends on its place in the whole stack.
        for (tensor, layer), (_, stored, layers) in zip(
            placed_tensors(model), mix_tensors(model, precision), strict=True
        ):
            if stage is None or (
                stage.holds(tensor, tied=model.tied) if layer is None else layer in stage.layers
            ):
                yield tensor, stored, layers
        return
    quantization = model.quantization if precision is None else None
    matcher = None
    if quantization is not None:
        from capplan.format_matcher import FormatMatcher  # a checkpoint's own formats only

        matcher = FormatMatcher(quantization)
    for path, tensor, layers in model_tensors(model, by_path=matcher is not None, stage=stage):
        if precision is not None:
            yield tensor, _chosen(tensor, precision), layers
        else:
            yield tensor, matcher.find(path) if matcher and tensor.linear else None, layers


def _budget(sizes: Mapping[Role, int], counts: Mapping[Role, int], formats: tuple[str, ...]) -> WeightBudget:
    return WeightBudget(
        roles=tuple(
            RoleWeights(role=role, parameters=counts.get(role, 0), bytes=size) for role, size in sizes.items()
        ),
        bytes=sum(sizes.values()),
        parameters=sum(counts.values()),
        formats=formats,
    )


def _stored_budget(model: Model, stored: StoredWeights, rank: Rank) -> WeightBudget:
    """The files' own bytes; on one of several ranks the share its shapes give each role.

    A role that the architecture does not have (a tensor named otherwise) takes the share of the whole.
    """
    sizes = {role: size for role, size in stored.bytes_by_role.items() if role not in BESIDE_THE_DECODER}
    counts = {
        role: count for role, count in stored.parameters_by_role.items() if role not in BESIDE_THE_DECODER
    }
    if not rank.whole:
        shares = _rank_shares(model, rank)
        average = shares[None]
        sizes = {role: math.ceil(size * shares.get(role, average)) for role, size in sizes.items()}
    return _budget(sizes, counts, tuple(stored.by_dtype))


def _rank_shares(model: Model, rank: Rank) -> dict[Role | None, float]:
    """Which part of each role's elements one rank holds; None: of all."""
    whole: dict[Role | None, int] = {}
    part: dict[Role | None, int] = {}
    for _, tensor, layers in model_tensors(model, by_path=False):
        for key in (tensor.role, None):
            whole[key] = whole.get(key, 0) + tensor.parameters * layers
    for _, tensor, layers in model_tensors(model, by_path=False, stage=rank.stage):
        cut, copies = rank.cut(tensor)
        own = math.prod(rank_shape(tensor, cut)) * copies * layers
        for key in (tensor.role, None):
            part[key] = part.get(key, 0) + own
    return {key: part.get(key, 0) / whole[key] for key in whole if whole[key]} or {None: 1.0}


def tower_bytes(model: Model, precision: Format | None = None) -> dict[str, int]:
    """Stored bytes of each part beside the decoder, by its name.

    From the checkpoint's files where they were read and no format was asked for, else at the model's dtype.
    A part that the files do not have takes none; one that only they have goes by its role.
    """
    planned = {tower.name: _planned_bytes(model, tower) for tower in model.towers}
    if model.stored is None or precision is not None:
        return planned
    made = dict.fromkeys(planned, 0)
    for role in sorted(BESIDE_THE_DECODER):
        size = model.stored.bytes_by_role.get(role, 0)
        names = [tower.name for tower in model.towers if tower.role == role and planned[tower.name]]
        known = sum(planned[name] for name in names)
        if size and not names and role != "mtp":
            made[f"{role} (in the files)"] = size
        for name in names:
            made[name] = size * planned[name] // known
    return made


def tower_share(tower: Tower, tp: int) -> float:
    """Which part of a tower one of `tp` ranks holds: encoder layers are cut, embeddings and projectors whole.

    Example: Qwen2.5-VL's encoder over 4 ranks: 0.26.
    """
    whole = sum(tensor.parameters for tensor in tower.tensors)
    part = sum(math.prod(rank_shape(tensor, tp)) * tensor.copies for tensor in tower.tensors)
    return part / whole if whole else 1.0


def _planned_bytes(model: Model, tower: Tower) -> int:
    """A part's bytes without its files: at the model's dtype; MTP layers in the checkpoint's formats."""
    if tower.role != "mtp" or model.quantization is None:
        return tower.parameters * model.dtype_bits // 8
    from capplan.format_matcher import FormatMatcher

    matcher = FormatMatcher(model.quantization)
    # They follow the decoder's last layer, under the same paths.
    prefix = f"{model.groups[-1].prefix}.{model.layers}"
    return sum(
        stored_bytes(
            tensor,
            matcher.find(f"{prefix}.{tensor.name.removeprefix('mtp.')}") if tensor.linear else None,
            kept_bits=model.dtype_bits,
        )
        for tensor in tower.tensors
    )


def _chosen(tensor: Tensor, precision: Format) -> Format | None:
    """The user's format for this tensor, or None where the format leaves it at 16 bits."""
    if precision.quantizes == "all":
        return precision
    return precision if tensor.linear and tensor.role not in precision.keeps else None


def check_split(model: Model, tp: int, *, expert_tp: int | None = None) -> None:
    """Refuse a tensor-parallel degree that would cut a head or a column group.

    Key/value heads may be fewer than ranks (they are replicated) but must then divide them; the vocabulary is
    cut after padding. Each expert is cut over `expert_tp` ranks (None: like everything else).
    """
    if model.heads % tp:
        raise _refused(model, tp, f"{model.heads} attention heads cannot be split over {tp} GPUs")
    for _, tensor, _ in model_tensors(model, by_path=False):
        if tensor.role == "experts" and expert_tp not in (None, tp):
            if not _divides(tensor, expert_tp or tp):
                raise InputError(
                    f"{tensor.name}: {tensor.split_units} units cannot be split over {expert_tp} GPUs",
                    where=f"--tp {tp}, {model.name}",
                    hint="whole experts on each rank: --ep",
                )
        elif not _divides(tensor, tp):
            if tensor.split_multiple > 1:
                text = (
                    f"a vocabulary of {tensor.shape[0]:,}, padded to a multiple of {tensor.split_multiple},"
                )
            else:
                text = f"{tensor.name}: {tensor.split_units} units"
            raise _refused(model, tp, f"{text} cannot be split over {tp} GPUs")


def _divides(tensor: Tensor, tp: int) -> bool:
    """Whether every rank gets as much of the tensor."""
    if tensor.split_axis is None:
        return True
    if tensor.split_multiple > 1:
        multiple = tensor.split_multiple
        return -(-tensor.shape[tensor.split_axis] // multiple) * multiple % tp == 0
    return tensor.split_units % tp == 0 or tp % tensor.split_units == 0


def _refused(model: Model, tp: int, text: str) -> InputError:
    """What is allowed, and how as many GPUs are used all the same."""
    allowed = allowed_tp(model)
    nearest = max(degree for degree in allowed if tp % degree == 0)
    cut = f"--tp {nearest} " if nearest > 1 else ""
    hint = f"allowed: {', '.join(map(str, allowed))}; {tp} GPUs: {cut}--dp {tp // nearest}"
    if tp // nearest <= model.layers:
        hint += f" or {cut}--pp {tp // nearest}"
    return InputError(text, where=f"--tp {tp}, {model.name}", hint=hint)


def allowed_tp(model: Model, limit: int = 64) -> list[int]:
    """Tensor-parallel degrees up to `limit` that split this model evenly."""
    tensors = [tensor for group in model.groups for tensor in group.layer.tensors()]
    tensors += model.outside
    return [
        tp
        for tp in range(1, limit + 1)
        if model.heads % tp == 0 and all(_divides(tensor, tp) for tensor in tensors)
    ]
