"""What vLLM's KV cache layout is asked with: the flags and the version it depends on."""

from dataclasses import dataclass
from typing import Final

from capplan.engines.kv_groups import stage_layers
from capplan.engines.kv_rules import NEWEST, CacheMode, KvRules
from capplan.errors import InputError
from capplan.specs import Model

LONGEST: Final = 2**40
"""Lengths are not searched beyond this."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KvQuestion:
    """How vLLM is started, as far as the layout of its KV cache depends on it.

    `kv_bits` is the width of a stored element (8 for fp8), `block_size` the attention backend's (16; 64 for
    MLA in fp8 and sparse MLA on FlashMLA, whose fp8 rows carry scales). `hybrid` False is
    --disable-hybrid-kv-cache-manager, which a KV connector without support for it forces too.
    `steps_in_flight` None: as async scheduling, the default, has them. `mamba_cache_mode` None: the version's
    default; "none" with --no-enable-prefix-caching. `encoder_tokens` is what cross attention keeps a request.
    With `pp` every rank has the same memory and the widest is reported; vLLM's message names the first that
    fails. `stage` reports the rank with these layers instead, as if it limited the blocks.
    `draft` is a draft model's decoder (or MTP layers): its layers join the groups of the last stage, so that
    both hold one number of tokens. `draft_tp` are the ranks it is divided over; None: as the model.
    """

    kv_bits: float = 16
    tp: int = 1
    pp: int = 1
    stage: range | None = None
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    steps_in_flight: int | None = None
    mamba_cache_mode: CacheMode | None = None
    encoder_tokens: int = 0
    hybrid: bool = True
    rules: KvRules = NEWEST
    draft: Model | None = None
    draft_tp: int | None = None

    def check(self, layers: int) -> None:
        """Refuse numbers that cannot be: InputError names the flag."""
        check_positive(
            tp=self.tp,
            pp=self.pp,
            block_size=self.block_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
            kv_bits=self.kv_bits,
            steps_in_flight=self.steps_in_flight,
            draft_tp=self.draft_tp,
        )
        if self.pp > layers:
            raise InputError(
                f"{layers} layers cannot be cut into {self.pp} stages", where="--pp", hint="fewer stages"
            )

    def stages(self, layers: int) -> tuple[range, ...]:
        """The layers of each rank along the pipeline; a draft's come after those of the last stage."""
        drafted = 0 if self.draft is None else self.draft.layers
        cut = stage_layers(layers, self.pp) if self.stage is None else (self.stage,)
        return tuple(range(part.start, part.stop + drafted) if part.stop == layers else part for part in cut)

    @property
    def in_flight(self) -> int:
        """Tokens scheduled that are not settled yet."""
        batches = self.steps_in_flight or (_batches_in_flight(self.pp) if self.rules.all_batches else 1)
        return batches * self.max_num_batched_tokens


def check_positive(**values: float | None) -> None:
    """Refuse a number that is none, or too large to be meant; InputError names the flag."""
    for name, value in values.items():
        if value is not None and not 0 < value < LONGEST:
            raise InputError(
                f"{value} is no positive number", where=f"--{name.replace('_', '-')}", hint="1 or more"
            )


def _batches_in_flight(pp: int) -> int:
    """Steps scheduled before the oldest is settled: one a stage, and one more with async scheduling.

    Holds for: async scheduling, the default since 0.14. Not for: 0.26–0.28 with pp > 1 on the older model
    runner, which has pp.
    """
    return pp + 1
