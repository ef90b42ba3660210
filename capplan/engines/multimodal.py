"""Images, videos and audio in a request: tokens at their worst, against the context and the encoder's budget.

    worst case     = Σ over kinds of items allowed a prompt × tokens of the largest item
    encoder budget = max(max_num_batched_tokens, tokens of the largest single item)

vLLM profiles the encoder at its worst input before it sizes the KV pool: versions before 0.9 with the worst
case of a whole prompt, later ones with the encoder budget. A worst case beyond max_model_len only warns:
such a prompt can never be served, and was paid for in the profiling run.
Sources: vllm-project/vllm#12604 and #22173; vLLM's multimodal/profiling.py and encoder_cache_manager.py,
read 2026-11-29.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from capplan.errors import InputError

_MOST = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstPrompt:
    """Embedding tokens of a prompt with every item allowed, by kind, against a longest request.

    `most_items` is how many of each kind's largest items fit beside nothing else, `largest_item` the tokens
    an item may have for all that are allowed to fit (0: not even one token each).
    """

    by_kind: Mapping[str, int]
    max_model_len: int
    encoder_budget: int
    most_items: Mapping[str, int]
    largest_item: int

    @property
    def tokens(self) -> int:
        """All kinds together."""
        return sum(self.by_kind.values())

    @property
    def excess(self) -> int:
        """Tokens beyond the longest request; 0 where the worst case fits."""
        return max(0, self.tokens - self.max_model_len)

    def note(self) -> str | None:
        """What to say where the worst case does not fit."""
        if not self.excess:
            return None
        parts = ", ".join(f"{kind} {tokens:,}" for kind, tokens in self.by_kind.items())
        return (
            f"the largest inputs allowed make {self.tokens:,} tokens ({parts}), {self.excess:,} more than "
            f"max_model_len {self.max_model_len:,}: lower --limit-mm-per-prompt, or cap an item at "
            f"{self.largest_item:,} tokens"
        )


def worst_prompt(
    *,
    limits: Mapping[str, int],
    item_tokens: Mapping[str, int],
    max_model_len: int,
    max_num_batched_tokens: int,
) -> WorstPrompt:
    """The worst prompt under --limit-mm-per-prompt `limits`; `item_tokens` are those of the largest item.

    Errors: InputError for a kind without tokens, and for counts that are none.
    Example: 10 images and a video of 16,384 tokens each: 180,224.
    """
    for kind, count in limits.items():
        if kind not in item_tokens:
            raise InputError(
                f"the tokens of one {kind} are not known", where="--limit-mm-per-prompt", hint="give them"
            )
        if not (0 <= count <= _MOST and 1 <= item_tokens[kind] <= _MOST):
            raise InputError(
                f"{count} × {kind} of {item_tokens[kind]} tokens",
                where="--limit-mm-per-prompt",
                hint="counts from 0, items of 1 token or more",
            )
    if max_model_len < 1 or max_num_batched_tokens < 1:
        raise InputError(
            f"{min(max_model_len, max_num_batched_tokens)} tokens",
            where="--max-model-len, --max-num-batched-tokens",
            hint="1 or more",
        )
    allowed = {kind: item_tokens[kind] for kind, count in limits.items() if count}
    items = sum(limits.values())
    return WorstPrompt(
        by_kind={kind: limits[kind] * tokens for kind, tokens in allowed.items()},
        max_model_len=max_model_len,
        encoder_budget=max((max_num_batched_tokens, *allowed.values())) if allowed else 0,
        most_items={kind: max_model_len // tokens for kind, tokens in allowed.items()},
        largest_item=max_model_len // items if items else max_model_len,
    )


def image_tokens(*, pixels: int, patch: int, merge: int = 1) -> int:
    """Tokens of an image of `pixels` in an encoder that keeps its resolution: one a merged patch.

        floor(pixels / (patch · merge)²)

    Holds for: encoders with square patches whose sides are rounded to patch · merge. Not for: fixed sizes,
    tiles.
    Example: Qwen2.5-VL's 12,845,056 pixels, patches of 14 merged 2 × 2: 16,384.
    """
    if min(pixels, patch, merge) < 1:
        raise InputError(f"{pixels} pixels in patches of {patch} × {merge}", where="pixels", hint="1 or more")
    return math.floor(pixels / (patch * merge) ** 2)
