"""Speculative decoding: how many tokens a step makes when a draft guesses and the model verifies."""


def tokens_per_step(*, drafted: int, acceptance_rate: float) -> float:
    """Tokens that one verified step adds to a sequence, on average: the accepted prefix and one more.

        tokens_per_step = Σ_{i = 0…N} pⁱ = (1 − p^(N + 1)) / (1 − p)

    p is the chance that a drafted token is accepted, given that those before it were; the step always adds
    one token of the model itself. Engines log this figure as the mean acceptance length, and (it − 1) / N as
    the draft acceptance rate, which is less than p.

    Holds for: one chain of N drafted tokens, each accepted by the same chance. Not for: trees of drafts.
    Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", equation 1.
    Example: 3 drafted, 0.7: 1 + 0.7 + 0.49 + 0.343 = 2.533 tokens a step.
    """
    return sum(acceptance_rate**place for place in range(drafted + 1))
