"""Text Generation Inference's launcher and router log, 1.0 to 3.3.

It prints tokens and blocks, never the size of weights or of the pool. The launcher repeats its arguments,
as one line in 1.x and as a column since ("quantize: Some(" with the value on the next line).
Sources: TGI's public source and issue threads, read 2026-11.
"""

import re

from capplan.engines.log_record import Line, Notes, again
from capplan.engines.log_wording import Wording, count, parse, values_of, wording

ENGINE = "tgi"
EVIDENCE = (
    "text_generation_launcher",
    "text_generation_router",
    "text_generation_server",
    "text_generation_client",
    "text-generation-",
    "--max-batch-prefill-tokens",
    "KV-cache blocks: ",
    "Setting max batch total tokens to ",
)
_ARGUMENTS = {
    **{"model_id": "model", "num_shard": "tp", "quantize": "quantization", "dtype": "dtype"},
    **{"kv_cache_dtype": "kv_cache_dtype", "max_total_tokens": "max_model_len"},
    **{"max_batch_prefill_tokens": "max_num_batched_tokens", "max_batch_size": "max_num_seqs"},
    **{"cuda_memory_fraction": "cuda_memory_fraction"},
}
_VALUE = re.compile(r"(?:Some\()?\s{0,16}\"?(?P<value>[^\",)]{1,200})", re.ASCII)


def _launched(notes: Notes, line: Line, match: re.Match[str]) -> None:
    notes.new_start()
    notes.memo["arguments"] = "1"


def _argument(notes: Notes, line: Line, match: re.Match[str]) -> None:
    """One of the launcher's arguments, once it has begun to list them."""
    if "arguments" not in notes.memo:
        return
    text = line.text[match.end() :].strip()
    if text == "Some(":
        text = " ".join(line.following.split()[-1:])
    found = _VALUE.match(text)
    name = _ARGUMENTS[match.string[: match.end()].rsplit(maxsplit=1)[-1].rstrip(":").lstrip("{")]
    value = None if found is None else parse(name, found["value"])
    if value is not None:
        notes.put(line, name, value, weak=True)


def _blocks(notes: Notes, line: Line, match: re.Match[str]) -> None:
    for name, value in values_of(match):
        notes.put(line, name, value)


def _connected(notes: Notes, line: Line, match: re.Match[str]) -> None:
    if "text_generation_router" in line.text or "router" in line.text:
        notes.started_line = notes.started_line or line.number


def _listed(argument: str) -> Wording:
    return wording(f" {argument}: ", then=_argument)


WORDINGS = (
    wording("Args {", then=_launched),
    *(_listed(argument) for argument in _ARGUMENTS),
    wording("Sharding model on ", count("tp") + " processes"),
    wording("Default `max_batch_prefill_tokens` to ", count("max_num_batched_tokens")),
    wording("Maximum total tokens defaulted to ", count("max_model_len")),
    wording("KV-cache blocks: ", count("kv_blocks") + r", size:" + count("block_size"), then=_blocks),
    wording("Setting max batch total tokens to ", count("kv_tokens")),
    wording("Inferred max batch total tokens: ", count("kv_tokens")),
    wording(
        "Not enough memory to handle ",
        r"(?:"
        + count("total_tokens")
        + r" total tokens with)?"
        + count("prefill_tokens")
        + r" prefill tokens",
        reason="prefill_exceeds_memory",
    ),
    wording(
        "Not enough memory to handle `max_total_tokens=",
        count("max_model_len"),
        reason="context_exceeds_kv_cache",
    ),
    wording(": Connected", r"\s*$", then=_connected),
)


def finish(notes: Notes) -> None:
    """Tokens of the pool where only its blocks are printed."""
    for readings in list(notes.by_rank.values()):
        blocks, block = readings.get("kv_blocks"), readings.get("block_size")
        if blocks is None or block is None:
            continue
        if isinstance(blocks.value, int) and isinstance(block.value, int):
            notes.put(
                again(blocks),
                "kv_tokens",
                blocks.value * block.value,
                weak=True,
                derived="kv_blocks × block_size",
            )
