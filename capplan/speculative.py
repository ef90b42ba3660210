"""Steps with speculative decoding: a draft guesses a few tokens, the model verifies them in one step.

    step = passes of the draft + the model's step over 1 + drafted tokens of each sequence

Not modelled: trees of drafts, rejection sampling, acceptance that differs between requests.
"""

from dataclasses import replace
from typing import Any

from capplan.draft import OWN_LAYERS, draft_of
from capplan.errors import InputError
from capplan.specs import Format, Model, Parallelism
from capplan.step import Load, OpTime, StepTable
from capplan.tensor_formats import TensorFormats
from capplan.weights import rank_shape
from capplan.work import Gemm, StepWork, kernel_dtype, work_of


class SpeculativeTable:
    """Step times of a model that verifies `drafted` tokens a sequence, `draft`'s passes before it included.

    `target` is built from `work.verifying`. `draft` None: n-grams looked up on the host, whose time is not
    counted. Prompts run through both models.
    """

    def __init__(self, target: StepTable, draft: StepTable | None, drafted: int) -> None:
        self.target, self.draft, self.drafted = target, draft, drafted

    def step_s(
        self,
        *,
        decode_sequences: float,
        kv_tokens: float,
        prompt_tokens: float = 0,
        prompt_pairs: float | None = None,
        prompt_sequences: float | None = None,
    ) -> float:
        """Time of a step, in seconds; arguments as StepTable.step_s."""
        whole: dict[str, Any] = {
            "decode_sequences": decode_sequences,
            "kv_tokens": kv_tokens,
            "prompt_tokens": prompt_tokens,
            "prompt_pairs": prompt_pairs,
            "prompt_sequences": prompt_sequences,
        }
        time = self.target.step_s(**whole)
        if self.draft is None:
            return time
        later = self.draft.step_s(decode_sequences=decode_sequences, kv_tokens=kv_tokens)
        # Prompts join the first pass.
        return time + self.draft.step_s(**whole) + (self.drafted - 1) * later

    def ops(self, load: Load) -> tuple[OpTime, ...]:
        """The step's operations, the draft's own named so."""
        found = self.target.ops(load)
        if self.draft is None:
            return found
        if not load.prompt_tokens:
            return found + tuple(_drafting(op, self.drafted) for op in self.draft.ops(load))
        found += tuple(_drafting(op, 1) for op in self.draft.ops(load))
        if load.decode_sequences and self.drafted > 1:
            later = replace(load, prompt_sequences=0, prompt_tokens=0, prompt_pairs=0)
            found += tuple(_drafting(op, self.drafted - 1) for op in self.draft.ops(later))
        return found


def _drafting(op: OpTime, passes: int) -> OpTime:
    """An operation of the draft, over some passes."""
    return replace(
        op,
        name=f"draft {op.name}",
        count=op.count * passes,
        flop=op.flop * passes,
        bytes=op.bytes * passes,
        bound_s=op.bound_s * passes,
        time_s=op.time_s * passes,
    )


def draft_work(
    asked: str,
    model: Model,
    precision: Format | None,
    *,
    kv_bits: float,
    parallel: Parallelism,
    online: bool = False,
) -> StepWork:
    """One pass of the draft `asked` means, on one rank: as drafted for `model`, whose ranks it shares.

    "mtp": one of the model's own layers, with its joining projection, embedding and head. A draft model keeps
    its own formats.
    Errors: InputError as of `draft_of`, and for a draft whose layers are not known.
    """
    own = asked.lower() == OWN_LAYERS
    drafting = draft_of(asked, model, precision, kv_bits=kv_bits, tp=parallel.tp, online=online).model
    if not drafting.groups:
        raise InputError(
            f"the layers of {drafting.name} are not known",
            where=f"--draft-model {asked}",
            hint="give its config.json, or a catalog name",
        )
    if own:
        # Models with several such layers run one after another, the others the same one again.
        group = drafting.groups[0]
        drafting = replace(drafting, groups=(replace(group, indices=group.indices[:1]),))
    work = work_of(drafting, precision if own else None, kv_bits=kv_bits, parallel=parallel)
    # The embedding's rows are picked, and the model's own step has counted its table.
    small = tuple(replace(entry, resident_bytes=0) for entry in work.elementwise)
    gemms = (*work.gemms, _joining(model, precision, parallel)) if own else work.gemms
    return replace(work, gemms=gemms, elementwise=small)


def _joining(model: Model, precision: Format | None, parallel: Parallelism) -> Gemm:
    """The product that joins a token's embedding with the hidden state before it."""
    tower = next(tower for tower in model.towers if tower.role == "mtp")
    tensor = next(tensor for tensor in tower.tensors if tensor.name.endswith("eh_proj"))
    formats = TensorFormats(model, precision)
    stored = formats.find(f"{model.groups[-1].prefix}.{model.layers}.eh_proj", tensor)
    n, k = rank_shape(tensor, parallel.tp)
    return Gemm(
        name="mtp.eh_proj",
        n=n,
        k=k,
        dtype=kernel_dtype(stored),
        weight_bits=formats.bits(tensor, stored),
        activation_bits=stored.activation_bits if stored else 16,
    )
