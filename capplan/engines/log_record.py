"""What an engine's start-up log says: readings with the line each came from, and how to note them.

The readers of each engine (`logs_vllm`, `logs_sglang`, `logs_trtllm`, `logs_tgi`, `logs_llamacpp`) are
tables of wordings over these types; `log_reader` runs them over a file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Unit = Literal["bytes", "int", "float", "str", "bool"]
Value = int | float | str | bool


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


STR_FIELDS = _names(
    "version generation model model_name dtype quantization gpu_name kv_cache_dtype flash_attention"
)
FLOAT_FIELDS = _names(
    "gpu_memory_utilization mem_fraction_static least_mem_fraction_static free_gpu_memory_fraction"
    " cuda_memory_fraction max_concurrency kv_bytes_per_token"
)
BOOL_FIELDS = _names("enforce_eager cuda_graph_in_budget kv_unified")
INT_FIELDS = _names(
    "tp pp dp ep max_model_len max_num_batched_tokens max_num_seqs micro_batch_tokens context_tokens"
    " block_size kv_blocks kv_tokens window_kv_tokens draft_kv_tokens max_concurrency_tokens state_slots"
    " encoder_cache_tokens gpu_layers layers oom_device"
)
BYTES_FIELDS = _names(
    "gpu_total_bytes gpu_free_bytes budget_bytes checkpoint_bytes weights_bytes activation_bytes"
    " non_torch_bytes cuda_graph_bytes cuda_graph_estimate_bytes kv_pool_bytes kv_suggested_bytes"
    " consumed_bytes peak_torch_bytes state_bytes compute_bytes runtime_buffer_bytes decoder_bytes"
    " output_bytes kv_total_bytes host_weights_bytes host_kv_bytes host_compute_bytes projected_bytes"
    " host_projected_bytes draft_weights_bytes draft_kv_pool_bytes draft_cuda_graph_bytes"
    " free_after_weights_bytes free_after_pool_bytes free_after_start_bytes outside_torch_after_load_bytes"
    " oom_tried_bytes oom_free_bytes oom_total_bytes oom_process_bytes oom_other_process_bytes"
    " oom_torch_bytes oom_unallocated_bytes oom_graph_pool_bytes"
)
FIELDS = STR_FIELDS | FLOAT_FIELDS | BOOL_FIELDS | INT_FIELDS | BYTES_FIELDS
"""Every name a log's `fields` may hold; `_bytes` are bytes on one rank (or one device)."""

MEMORY = BYTES_FIELDS | _names(
    "kv_blocks kv_tokens window_kv_tokens draft_kv_tokens max_concurrency max_concurrency_tokens state_slots"
    " kv_bytes_per_token oom_device"
)
"""The fields that measure; the others are settings."""

# A rank's own answer is the smaller one: the engine gives every rank the least any rank can hold.
SMALLEST = _names("kv_blocks kv_tokens max_concurrency window_kv_tokens gpu_free_bytes gpu_total_bytes")
# Any of these shows that memory was laid out: the start got past its banner and its arguments.
LAID_OUT = _names(
    "weights_bytes kv_pool_bytes kv_blocks kv_tokens activation_bytes non_torch_bytes compute_bytes"
    " consumed_bytes peak_torch_bytes cuda_graph_bytes state_bytes kv_total_bytes"
    " outside_torch_after_load_bytes"
)
# Printed negative where the budget ends before the weights do, or where memory was given back.
SIGNED = _names("kv_pool_bytes non_torch_bytes cuda_graph_bytes draft_cuda_graph_bytes kv_suggested_bytes")

SHOWN_CHARS = 240
_MAX_RANKS = 4096
_MAX_WARNINGS = 40
_MAX_REFUSALS = 16
_LARGEST_BYTES = 1 << 50
_LARGEST_INT = 1 << 53


def unit_of(name: str) -> Unit:
    """The unit of a field; names outside `FIELDS` (numbers of a refusal) go by their suffix."""
    if name.endswith("_bytes"):
        return "bytes"
    if name in STR_FIELDS:
        return "str"
    if name in BOOL_FIELDS:
        return "bool"
    if name in FLOAT_FIELDS:
        return "float"
    return "int"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One figure of a log.

    `line` counts from 1 and `text` is that line, shortened. `rank` names the process or device that
    printed it; None is the engine as a whole, or a log that names no ranks. `derived` says how a figure
    that the engine did not print itself follows from those it did.
    """

    value: Value
    unit: Unit
    line: int
    text: str
    rank: str | None = None
    derived: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why the engine did not start: a reason's id, its numbers (sizes in bytes), the line that says so."""

    reason: str
    line: int
    text: str
    numbers: Mapping[str, Value]
    rank: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLog:
    """A start-up log or a trace of one that failed.

    `fields` is one consistent answer: memory terms of the rank with the smallest KV pool, the rest from
    the engine as a whole; `ranks` has every rank's own. Where the log holds several starts the last is
    read and `starts` counts them. `refusal` is set only for a start that failed for want of memory; `oom`
    also for an allocation that failed later. `started_line` is where the engine said it serves.
    """

    engine: str
    source: str
    fields: Mapping[str, Reading]
    ranks: Mapping[str, Mapping[str, Reading]]
    refusal: Refusal | None
    oom: bool
    started_line: int | None
    starts: int
    lines: int
    warnings: tuple[str, ...]

    def number(self, name: str) -> float | None:
        """The value of a numeric field, None where the log does not say."""
        reading = self.fields.get(name)
        if reading is None or isinstance(reading.value, (str, bool)):
            return None
        return reading.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line to match: no colours, no carriage returns, at most 64 KiB; `following` is the next one."""

    number: int
    text: str
    rank: str | None
    role: str | None = None
    pid: str | None = None
    following: str = ""


def again(reading: Reading) -> Line:
    """The line of a reading, to note what follows from it."""
    return Line(number=reading.line, text=reading.text, rank=reading.rank)


@dataclass(slots=True)
class Notes:
    """What one engine's wordings found in a log; bounded, whatever the log."""

    by_rank: dict[str | None, dict[str, Reading]] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    warnings: dict[str, None] = field(default_factory=dict)
    evidence: set[str] = field(default_factory=set)
    memo: dict[str, str] = field(default_factory=dict)
    oom: bool = False
    loaded: bool = False
    started_line: int | None = None
    starts: int = 1
    earlier: "Notes | None" = None

    def new_start(self) -> None:
        """Put aside what an earlier start in the same log printed, if it came as far as memory."""
        if not self.loaded:
            return
        self.earlier = Notes(
            by_rank=self.by_rank,
            refusals=self.refusals,
            memo=self.memo,
            oom=self.oom,
            loaded=True,
            started_line=self.started_line,
        )
        self.by_rank, self.refusals, self.memo = {}, [], {}
        self.oom = self.loaded = False
        self.started_line = None
        self.starts += 1

    def last_that_loaded(self) -> None:
        """Go back to the start before where the last one, cut off, printed nothing about memory."""
        if self.loaded or self.earlier is None:
            return
        before = self.earlier
        self.by_rank, self.refusals, self.memo = before.by_rank, before.refusals, before.memo
        self.oom, self.loaded, self.started_line = before.oom, True, before.started_line
        self.warn("the last start in this log printed nothing about memory; the one before it is read")

    def get(self, name: str, rank: str | None) -> Reading | None:
        """What this rank printed for a field in this start."""
        return self.by_rank.get(rank, {}).get(name)

    def put(
        self,
        line: Line,
        name: str,
        value: Value,
        *,
        weak: bool = False,
        add: bool = False,
        least: bool = False,
        derived: str | None = None,
    ) -> None:
        """Note a field of the line's rank: the last printed counts.

        Not so where `weak` (the first), `add` (repeats are summed) or `least` (the smallest).
        """
        key = line.rank
        if key not in self.by_rank and len(self.by_rank) >= _MAX_RANKS:
            return
        readings = self.by_rank.setdefault(key, {})
        old = readings.get(name)
        if weak and old is not None:
            return
        if least and old is not None and _below(old.value, value):
            return
        if add and old is not None and not isinstance(old.value, str) and not isinstance(value, str):
            value = old.value + value
            derived = f"sum of lines {old.line} to {line.number}"
        if not _believable(name, value):
            self.warn(f"line {line.number}: {name} of {value} is impossible and was left out")
            return
        if name in LAID_OUT:
            self.loaded = True
        readings[name] = Reading(
            value=value,
            unit=unit_of(name),
            line=line.number,
            text=shortened(line.text),
            rank=key,
            derived=derived,
        )

    def refuse(self, line: Line, reason: str, numbers: Mapping[str, Value] | None = None) -> None:
        """Note why the engine did not start."""
        self.loaded = True
        if len(self.refusals) < _MAX_REFUSALS:
            self.refusals.append(
                Refusal(
                    reason=reason,
                    line=line.number,
                    text=shortened(line.text),
                    numbers=dict(numbers or {}),
                    rank=line.rank,
                )
            )

    def warn(self, text: str) -> None:
        """Note something the reader of the log should know, once."""
        if len(self.warnings) < _MAX_WARNINGS:
            self.warnings[text] = None


def _below(old: Value, new: Value) -> bool:
    return not isinstance(old, str) and not isinstance(new, str) and old < new


def _believable(name: str, value: Value) -> bool:
    """False for sizes no machine has and for negative figures where none can be."""
    if isinstance(value, (str, bool)):
        return True
    largest = _LARGEST_BYTES if name.endswith("_bytes") else _LARGEST_INT
    return abs(value) <= largest and (value >= 0 or name in SIGNED)


def shortened(text: str) -> str:
    """A line fit to be shown: stripped, at most 240 characters."""
    text = text.strip()
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."
