"""What a user waits for: the definitions of TTFT, TPOT, end-to-end latency, throughput, percentiles.

Every function is keyword-only; times are seconds.
"""

import math
from collections.abc import Sequence


def ttft_s(*, received_at_s: float, first_token_at_s: float) -> float:
    """Time to first token, in seconds.

        TTFT = T_first_token − T_request_received

    Holds for: queueing, tokenization and prefill included; network too where the client measures.
    Source: serving lesson, "Time to First Token (TTFT)".
    Example: received at 10.0 s, first token at 10.4 s: 0.4 s.
    """
    return first_token_at_s - received_at_s


def tpot_s(*, first_token_at_s: float, last_token_at_s: float, output_tokens: int) -> float | None:
    """Time per output token after the first, in seconds; None for a single token.

        TPOT = (T_last_token − T_first_token) / (N_output − 1)

    Holds for: the mean over one request. Not for: single gaps (those are ITL).
    Source: serving lesson, "Time per Output Token (TPOT)".
    Example: 101 tokens from 10.4 s to 15.4 s: 0.05 s.
    """
    if output_tokens < 2:
        return None
    return (last_token_at_s - first_token_at_s) / (output_tokens - 1)


def e2e_s(*, ttft_s: float, tpot_s: float, output_tokens: int) -> float:
    """End-to-end latency of a request, in seconds.

        T_total = TTFT + (N_output − 1) · TPOT

    Holds for: at least one output token. Source: serving lesson, "End-to-End Latency".
    Example: TTFT 0.4 s, TPOT 0.05 s, 101 tokens: 5.4 s.
    """
    return ttft_s + (output_tokens - 1) * tpot_s


def throughput_token_per_s(*, tokens: float, time_s: float) -> float:
    """Tokens of all users per second.

        Σ N_tokens / Δt

    Holds for: a window with steady load; say whether prompt tokens count.
    Source: serving lesson, "Aggregate Throughput".
    Example: 64 users · 100 tokens in 5 s: 1,280 tokens/s.
    """
    return tokens / time_s


def reading_tpot_s(*, word_per_min: float = 200, tokens_per_word: float = 1.5) -> float:
    """TPOT at which text appears as fast as it is read, in seconds.

        60 / (words per minute · tokens per word)

    Holds for: English prose; a tokenizer that splits a language finer needs a smaller TPOT.
    Source: serving lesson, "Typical human reading speed" (200 words/min, ~5 tokens/s).
    Example: 200 words/min of 1.5 tokens: 0.2 s.
    """
    return 60 / (word_per_min * tokens_per_word)


def percentile(*, values: Sequence[float], percent: float) -> float:
    """Percentile of measured values, between the two nearest ranks.

        sorted values at position (n − 1) · percent / 100

    Holds for: at least one value; NumPy's "linear", which vLLM's and SGLang's benchmarks use.
    Source: serving lesson, "P95 & P99 TTFT".
    Example: 1, 2, 3, 4 at 50 %: 2.5.
    """
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
