"""What a workload asks of an engine on average, known before anything is simulated."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Means of a workload's requests.

    `request_per_s` is the mean rate of arrivals; None where they come all at once or from `users` who wait.
    Lengths are those of a request: a later turn's prompt counts with all that was said before.
    """

    request_per_s: float | None
    users: int | None = None
    mean_prompt_tokens: float
    mean_output_tokens: float
    max_context_tokens: int | None
    """Prompt and output of the longest request that may come; None where nothing bounds it."""
