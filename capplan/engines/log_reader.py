"""Read a start-up log or an out-of-memory trace of any engine: which engine, what it printed, and where.

The file is streamed in blocks of 1 MiB; a block without any phrase of interest is only counted, so that
gigabytes of requests after the start cost little. Prefixes do not matter (time stamps, Docker and
Kubernetes, Ray and vLLM workers, quoted mail): a wording is found wherever it stands in its line, and a
JSON line is unwrapped. Ranks come from the prefixes that name them.
"""

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol, cast

from capplan.engines import logs_llamacpp, logs_sglang, logs_tgi, logs_torch, logs_trtllm, logs_vllm
from capplan.engines.log_merge import merged
from capplan.engines.log_prefix import line_of, messages
from capplan.engines.log_record import EngineLog, Line, Notes, Reading, Refusal
from capplan.engines.log_wording import Wording, apply
from capplan.errors import InputError

__all__ = ["HINTS", "READERS", "EngineLog", "Reading", "Refusal", "read_log"]

DEFAULT_MAX_BYTES = 64 << 30
_BLOCK_BYTES = 1 << 20
_LINE_BYTES = 1 << 16
_ENGINES_HINT = "give the engine's own output from its start on: vLLM, SGLang, TensorRT-LLM, TGI or llama.cpp"

# A line worth a look holds one of these; every wording does (tested), no line of steady traffic should.
_HINTS = """
emory|blocks|buffer|VRAM |KV Cache|KV cache size|KV cache dtype|KV self|SWAKVPool|in paged|in kvCache
ing took |Allocate|llocating |cudaMalloc|CUDA |raph |Initializing a|version|args|Args {|model |Cache is
Maximum |oaded|Using |Use | uses |max_num_batched_tokens|max_num_seqs|max_seq_len|max seq len|weight
max batch total|max len|total_num_tokens|TRTGptModel |axTokensInPaged|tokens per block|Explicitly set
To serve|uto-fit|total consumed|attention block size|Encoder cache|Checkpoint size|Engine version
Engine core|parallel_size=|parallelism|Sharding |using device|device_name|Device |GPU 0|avail mem
state size|failed|draft model|error loading|startup complete|fired up|successfully|server is listening
HTTP server|: Connected|build|file size|file format|print_meta: format|file type|ftype|general.name
size =|: n_ctx|: n_batch|: n_ubatch|: n_seq_max|n_slots|new slot|flash_attn|kv_unified|rojected to
model_id: |num_shard: |dtype|quantize: |max_batch|max_total|fraction: |fraction=|_breakdown_print
out of m|\u2588|File "
"""
HINTS = tuple(hint.encode() for line in _HINTS.strip().split("\n") for hint in line.split("|"))


class _Reader(Protocol):
    """What a module of one engine offers."""

    ENGINE: str
    EVIDENCE: tuple[str, ...]
    WORDINGS: tuple[Wording, ...]

    def finish(self, notes: Notes) -> None: ...


READERS: tuple[_Reader, ...] = cast(
    "tuple[_Reader, ...]", (logs_vllm, logs_sglang, logs_trtllm, logs_tgi, logs_llamacpp)
)


_NO_ENGINE = "torch"


def _phrases() -> dict[str, list[tuple[str, Wording]]]:
    """Every engine's wordings by their literal; PyTorch's count for all engines, and for none."""
    made: dict[str, list[tuple[str, Wording]]] = {}
    for reader in READERS:
        for phrase in (*reader.WORDINGS, *logs_torch.WORDINGS):
            made.setdefault(phrase.literal, []).append((reader.ENGINE, phrase))
    for phrase in logs_torch.WORDINGS:
        made[phrase.literal].append((_NO_ENGINE, phrase))
    return made


_PHRASES = _phrases()
_LITERALS = tuple(_PHRASES)


def read_log(source: str | Path | IO[str] | IO[bytes], *, max_bytes: int = DEFAULT_MAX_BYTES) -> EngineLog:
    """The start-up log at a path or in an open stream.

    Reads at most `max_bytes` and says so in the warnings where that cuts the log short. Raises
    InputError for what cannot be read, is empty, compressed or binary, and for a text in which no
    engine printed anything about memory.
    """
    where = str(source if isinstance(source, (str, Path)) else getattr(source, "name", "the log given"))
    scan = _Scan(where=where)
    if isinstance(source, (str, Path)):
        with _opened(source, where) as stream:
            scan.read(_blocks(stream, max_bytes, where))
    else:
        scan.read(_blocks(source, max_bytes, where))
    return scan.result(max_bytes)


def _opened(path: str | Path, where: str) -> IO[bytes]:
    try:
        return open(path, "rb")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise _unreadable(error, where) from None


def _unreadable(error: Exception, where: str) -> InputError:
    return InputError(
        f"the log cannot be read: {getattr(error, 'strerror', None) or error}",
        where=where,
        hint="give the path of a text file",
    )


class _Scan:
    """One pass over a log: every engine's wordings are tried on the lines that may hold one."""

    def __init__(self, *, where: str) -> None:
        self.where = where
        self.lines = 0
        self.bytes_read = 0
        self.nul_bytes = 0
        self.notes = {engine: Notes() for engine in (*(reader.ENGINE for reader in READERS), _NO_ENGINE)}
        self.unseen = list(dict.fromkeys(word for reader in READERS for word in reader.EVIDENCE))

    def read(self, blocks: Iterator[bytes]) -> None:
        carry = b""
        for block in blocks:
            if not self.bytes_read:
                _refuse_compressed(block, self.where)
            self.bytes_read += len(block)
            self.nul_bytes += block.count(b"\0")
            text = carry + block
            cut = text.rfind(b"\n") + 1
            self._scan(text[:cut])
            # The rest of a longer line than this says nothing an engine prints.
            carry = text[cut:][:_LINE_BYTES]
        if carry:
            self._scan(carry + b"\n")

    def _scan(self, text: bytes) -> None:
        if any(hint in text for hint in HINTS):
            lines = text.split(b"\n")
            for index, raw in enumerate(lines[:-1]):
                if any(hint in raw for hint in HINTS):
                    following = lines[index + 1][:_LINE_BYTES]
                    self._match(self.lines + index + 1, raw[:_LINE_BYTES], following)
        self.lines += text.count(b"\n")

    def _match(self, number: int, raw: bytes, following: bytes) -> None:
        text = raw.decode("utf-8", errors="replace")
        self._gather_evidence(text)
        for message in messages(text):
            present = [literal for literal in _LITERALS if literal in message]
            if not present and "pid=" not in message:
                continue
            line = line_of(number, message, following)
            _follow_process(self.notes[logs_vllm.ENGINE], line)
            for literal in present:
                for engine, phrase in _PHRASES[literal]:
                    apply(phrase, line, self.notes[engine])

    def _gather_evidence(self, text: str) -> None:
        for found in [word for word in self.unseen if word in text]:
            self.unseen.remove(found)
            for reader in READERS:
                if found in reader.EVIDENCE:
                    self.notes[reader.ENGINE].evidence.add(found)

    def result(self, max_bytes: int) -> EngineLog:
        """The engine with most of its own words in the log, and what it printed."""
        reader = max(READERS, key=self._weight)
        notes = self.notes[reader.ENGINE]
        notes.last_that_loaded()
        if not notes.evidence or not notes.loaded:
            self._refuse(reader.ENGINE if notes.evidence else None)
        reader.finish(notes)
        if self.bytes_read >= max_bytes:
            notes.warn(f"only the first {max_bytes} bytes were read, to line {self.lines}")
        return merged(reader.ENGINE, notes, source=self.where, lines=self.lines)

    def _weight(self, reader: _Reader) -> tuple[bool, int]:
        notes = self.notes[reader.ENGINE]
        return notes.loaded or notes.earlier is not None, len(notes.evidence)

    def _refuse(self, engine: str | None) -> None:
        """Why there is nothing to read here."""
        if not self.bytes_read or not self.lines:
            raise InputError("the log is empty", where=self.where, hint=_ENGINES_HINT)
        if self.nul_bytes > self.bytes_read // 100:
            raise InputError("this is binary, not a text log", where=self.where, hint=_ENGINES_HINT)
        if self.notes[_NO_ENGINE].refusals:
            failed = self.notes[_NO_ENGINE].refusals[0]
            raise InputError(
                "an out-of-memory trace, but of which engine it does not say",
                where=f"{self.where}:{failed.line}",
                hint="include the lines of the traceback above it, which name the engine's files",
            )
        if engine is not None:
            raise InputError(
                f"{engine} is named here, but none of its lines about memory is",
                where=self.where,
                hint="log level INFO is needed; " + _ENGINES_HINT,
            )
        raise InputError("no engine known to capplan wrote this log", where=self.where, hint=_ENGINES_HINT)


def _blocks(stream: IO[str] | IO[bytes], max_bytes: int, where: str) -> Iterator[bytes]:
    """UTF-8 bytes of a stream, at most `max_bytes`; UTF-16 (a PowerShell redirect) is converted."""
    decoder: codecs.IncrementalDecoder | None = None
    left, first = max_bytes, True
    while left > 0:
        try:
            read: str | bytes = stream.read(min(_BLOCK_BYTES, left))
        except (OSError, ValueError) as error:  # a directory; a closed or wrongly decoded stream
            raise _unreadable(error, where) from None
        if not read:
            return
        block = read.encode("utf-8", errors="replace") if isinstance(read, str) else bytes(read)
        left -= len(block)
        if first and block[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")
        first = False
        yield block if decoder is None else decoder.decode(block).encode("utf-8", errors="replace")


def _refuse_compressed(block: bytes, where: str) -> None:
    for magic, kind, tool in _COMPRESSED:
        if block.startswith(magic):
            raise InputError(
                f"this is {kind}-compressed", where=where, hint=f"unpack it first, e.g. with {tool}"
            )


_COMPRESSED = (
    (b"\x1f\x8b", "gzip", "gunzip"),
    (b"BZh", "bzip2", "bunzip2"),
    (b"\xfd7zXZ\x00", "xz", "unxz"),
    (b"\x28\xb5\x2f\xfd", "zstd", "unzstd"),
    (b"PK\x03\x04", "zip", "unzip"),
)


def _follow_process(notes: Notes, line: Line) -> None:
    """The engine's core, or a named worker, under another process id is another start in the file."""
    if line.role is None or line.pid is None or not line.role.startswith(("EngineCore", "Worker")):
        return
    key = f"pid of {line.role}"
    if notes.memo.get(key, line.pid) != line.pid:
        notes.new_start()
    if len(notes.memo) < 10_000:
        notes.memo[key] = line.pid
