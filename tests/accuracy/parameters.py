"""Parameters of every model in params.csv, by role, beside what transformers builds.

Whether a row counts the vision tower is seen, not listed: the total equals the decoder or decoder + towers.
"""

import functools
from collections import Counter
from dataclasses import dataclass

from capplan.errors import InputError
from capplan.specs import Model
from tests.accuracy import oracles

FIGURES = (
    "total", "embedding", "lm_head", "tied", "experts", "router", "active per token", "norms",
    "bf16 bytes", "layers", "hidden", "vocab",
)  # fmt: skip
# The oracle counts norms by "norm" in the module's name; GPT-2's are called ln_1, ln_2 and ln_f.
ORACLE_GAPS = {("openai-community--gpt2", "norms")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRow:
    """One row: what is asked, what capplan says, and whether the vision tower is in it."""

    model: str
    with_tower: bool
    got: dict[str, int]
    want: dict[str, int]

    @property
    def differing(self) -> list[str]:
        """Figures that are not equal."""
        return [name for name in FIGURES if self.got[name] != self.want[name]]


def by_role(model: Model) -> Counter[str]:
    """Parameters of the decoder, by role."""
    made: Counter[str] = Counter()
    for group in model.groups:
        for tensor in group.layer.tensors():
            made[tensor.role] += tensor.parameters * len(group.indices)
    for tensor in model.outside:
        made[tensor.role] += tensor.parameters
    return made


def active(model: Model) -> int:
    """Parameters a token is multiplied with (an embedding counts whole, as the oracle has it)."""
    inside = sum(
        tensor.elements * tensor.active_copies * len(group.indices)
        for group in model.groups
        for tensor in group.layer.tensors()
    )
    return round(inside) + sum(tensor.parameters for tensor in model.outside)


def tower_parameters(model: Model, named: str = "") -> int:
    """Parameters beside the decoder without MTP layers; those with `named` in their name."""
    return sum(
        tensor.parameters
        for tower in model.towers
        if tower.role != "mtp"
        for tensor in tower.tensors
        if named in tensor.name
    )


def positions(model: Model) -> int:
    """Learned position embeddings: the oracle's embedding column has the token embedding only."""
    return sum(t.parameters for t in model.outside if t.name.endswith("embed_positions"))


@functools.cache
def parameter_rows() -> list[ParameterRow]:
    """Every row of params.csv."""
    return [_row(row) for row in oracles.rows("params")]


def _row(row: oracles.Row) -> ParameterRow:
    model = oracles.model_of(row)
    want = {
        "total": int(row["total_params"]),
        "embedding": int(row["embed_params"]),
        "lm_head": int(row["lm_head_params"]),
        "tied": int(row["tied"]),
        "experts": int(row["expert_params"]),
        "router": int(row["router_params"]),
        "active per token": int(float(row["active_params_per_token"])),
        "norms": int(row["norm_params"]),
        "bf16 bytes": int(row["bf16_bytes"]),
        "layers": int(row["layers"]),
        "hidden": int(row["hidden"]),
        "vocab": int(row["vocab"]),
    }
    beside = tower_parameters(model)
    with_tower = beside > 0 and want["total"] == model.parameters + beside
    extra = beside if with_tower else 0
    roles = by_role(model)
    got = {
        "total": model.parameters + extra,
        "embedding": roles["embedding"] - positions(model),
        "lm_head": roles["lm_head"],
        "tied": int(model.tied),
        "experts": roles["experts"],
        "router": roles["router"],
        "active per token": active(model) + extra,
        "norms": roles["norm"] + (tower_parameters(model, "norm") if with_tower else 0),
        "bf16 bytes": 2 * (model.parameters + extra),
        "layers": model.layers,
        "hidden": model.hidden,
        "vocab": model.vocab,
    }
    return ParameterRow(model=row["model"], with_tower=with_tower, got=got, want=want)


@functools.cache
def refused_configs() -> dict[str, InputError]:
    """Published configs that capplan does not read, by file name."""
    made = {}
    for file in sorted(oracles.HF_CONFIGS.glob("*.json")):
        try:
            oracles.model_at(file)
        except InputError as error:
            made[file.name] = error
    return made
