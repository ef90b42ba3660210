"""What is loaded beside the decoder: vision and audio towers, LoRA slots, a draft model."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from capplan.errors import InputError
from capplan.specs import Format, Model
from capplan.split import Stage
from capplan.units import format_bytes
from capplan.weights import tower_bytes, tower_share

# Adapters and drafts are imported where one is asked for: most questions have neither.
if TYPE_CHECKING:
    from capplan.draft import Draft

MAX_SLOTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """Bytes of each part on one rank, by name, the draft model if there is one, and what to say of them."""

    sizes: dict[str, int]
    draft: "Draft | None" = None
    notes: tuple[str, ...] = ()


def parts_of(
    model: Model | None,
    precision: Format | None,
    *,
    kv_bits: float,
    tp: int = 1,
    stage: Stage | None = None,
    lora: tuple[str, ...] = (),
    lora_slots: int | None = None,
    draft_model: str | None = None,
    online: bool = False,
) -> Parts:
    """The parts beside `model` on one of `tp` ranks, or on that of a pipeline stage.

    A draft is on the last stage, where tokens are sampled; towers are on every stage, cut over its ranks.

    `lora` are adapters (paths, or rank=…,targets=…) of which `lora_slots` are served at once (default: all
    given); `draft_model` is a name, a path or "mtp".
    Raises InputError for an adapter or draft that cannot be used, or one without a model.
    """
    if lora_slots is not None and not (lora and 1 <= lora_slots <= MAX_SLOTS):
        raise InputError(
            f"{lora_slots} slots" if lora else "slots without an adapter",
            where="--lora-slots",
            hint=f"1 to {MAX_SLOTS}, with --lora PATH or --lora rank=16,targets=q_proj+v_proj",
        )
    if model is None:
        if lora or draft_model:
            raise InputError(
                "needs the layers of a model",
                where="--lora" if lora else "--draft-model",
                hint="give --model instead of --params",
            )
        return Parts(sizes={})
    sizes, notes = _towers(model, precision, speculates=draft_model is not None, tp=tp)
    if lora:
        slots = lora_slots or len(lora)
        sizes["LoRA slots"], said = _slots(model, lora, slots, tp, stage)
        notes += said
    if draft_model is None or (stage is not None and not stage.last):
        return Parts(sizes=sizes, notes=tuple(notes))
    from capplan.draft import draft_of

    draft = draft_of(draft_model, model, precision, kv_bits=kv_bits, tp=tp, online=online)
    sizes[f"draft: {draft.name}"] = draft.weights_bytes
    notes += draft.notes
    return Parts(sizes=sizes, draft=draft, notes=tuple(notes))


def _towers(
    model: Model, precision: Format | None, *, speculates: bool, tp: int
) -> tuple[dict[str, int], list[str]]:
    """Towers with one rank's bytes; MTP layers load only for speculative decoding."""
    sizes = tower_bytes(model, precision)
    for tower in model.towers if tp > 1 else ():
        sizes[tower.name] = math.ceil(sizes[tower.name] * tower_share(tower, tp))
    notes = []
    for tower in model.towers:
        if tower.role == "mtp":
            del sizes[tower.name]
            if not speculates:
                notes.append(
                    f"{tower.name} not counted: they load only for speculative decoding (--draft-model mtp)"
                )
        elif not sizes[tower.name]:
            del sizes[tower.name]
            notes.append(f"{tower.name} is not in the files: not counted")
        elif not tower.exact and (model.stored is None or precision is not None):
            notes.append(f"{tower.name}: a plain encoder of its widths, no exact count")
    return sizes, notes


def _slots(
    model: Model, lora: tuple[str, ...], slots: int, tp: int, stage: Stage | None
) -> tuple[int, list[str]]:
    from capplan.adapters import adapter_size, slot_rank, slots_bytes
    from capplan.readers.lora import read_adapter

    adapters = [read_adapter(text) for text in lora]
    rank = max(adapter.max_rank for adapter in adapters)
    size = slots_bytes(model, rank=rank, slots=slots, tp=tp, stage=stage)
    notes = [
        f"LoRA slots: vLLM allocates {slots} × rank {slot_rank(rank)} (max_loras × max_lora_rank) beside "
        "every linear layer at start, whatever the adapters target"
    ]
    for text, adapter in zip(lora, adapters, strict=True):
        own = adapter_size(model, adapter)
        note = f"adapter {text[:60]}: {format_bytes(own.bytes)} of its own beside {own.modules:,} layers"
        if own.saved_bytes:
            note += f", {format_bytes(own.saved_bytes)} of it modules saved whole, which a slot does not hold"
        if own.unmatched:
            note += f"; not in this model: {', '.join(own.unmatched)[:80]}"
        notes.append(note)
    return size, notes
