"""A draft model beside the one that is served: its weights and its own KV cache for every sequence.

Speculative decoding with a draft model, an EAGLE head or the model's own MTP layers runs them over the same
sequences, so each keeps a cache of its own.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

from capplan import model_source
from capplan.errors import InputError, shown
from capplan.kv import KvLayout, kv_layout
from capplan.specs import Format, LayerGroup, Model, Tower
from capplan.weights import tower_bytes, tower_share, weight_budget

OWN_LAYERS: Final = "mtp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a draft adds to one of `tp` ranks (`layout`), and its caches as a whole (`whole_layout`).

    `model` has the layers that keep them.
    """

    name: str
    model: Model
    weights_bytes: int
    layout: KvLayout
    whole_layout: KvLayout
    notes: tuple[str, ...] = ()


def draft_of(
    asked: str,
    model: Model,
    precision: Format | None,
    *,
    kv_bits: float,
    tp: int = 1,
    online: bool = False,
) -> Draft:
    """The draft `asked` means: "mtp" for the model's own layers, else a name or path as of a model.

    `precision` is the format asked for the target; a draft model keeps its own.
    Errors: InputError for a model without MTP layers, a name that is not known, a split it does not allow.
    """
    if asked.lower() == OWN_LAYERS:
        return _own_layers(model, precision, kv_bits=kv_bits, tp=tp)
    try:
        draft = model_source.load(asked, online=online)
    except InputError as error:
        raise InputError(error.message, where=f"--draft-model {shown(asked)}", hint=error.hint) from None
    return Draft(
        name=draft.name,
        model=draft,
        weights_bytes=weight_budget(draft, None, tp=tp).bytes,
        layout=kv_layout(draft, kv_bits=kv_bits, tp=tp),
        whole_layout=kv_layout(draft, kv_bits=kv_bits),
        notes=draft.assumptions,
    )


def _own_layers(model: Model, precision: Format | None, *, kv_bits: float, tp: int) -> Draft:
    towers = [tower for tower in model.towers if tower.role == "mtp"]
    attending = [group for group in model.groups if any(c.kind != "state" for c in group.layer.caches())]
    if not towers or not attending:
        raise InputError(
            f"{model.name} has no MTP layers",
            where="--draft-model mtp",
            hint="give the name or path of a draft model",
        )
    sizes = tower_bytes(model, precision)
    count = sum(_layers(tower) for tower in towers)
    # Published MTP layers are built like the decoder's last layer that attends.
    last = max(attending, key=lambda group: group.indices[-1])
    alike = replace(model, groups=(LayerGroup(layer=last.layer, indices=tuple(range(count)), prefix="mtp"),))
    return Draft(
        name=towers[0].name,
        model=alike,
        weights_bytes=sum(math.ceil(sizes[tower.name] * tower_share(tower, tp)) for tower in towers),
        layout=kv_layout(alike, kv_bits=kv_bits, tp=tp),
        whole_layout=kv_layout(alike, kv_bits=kv_bits),
        notes=(f"{towers[0].name}: caches as of layer {last.indices[-1]}, embedding and head shared",),
    )


def _layers(tower: Tower) -> int:
    """How many MTP layers a tower is: each has one joining projection."""
    return max((tensor.copies for tensor in tower.tensors if tensor.name.endswith("eh_proj")), default=1)


def combined(layout: KvLayout, draft: KvLayout) -> KvLayout:
    """Both caches of a sequence as one layout."""
    return KvLayout(groups=(*layout.groups, *draft.groups))
