"""Where each line of the two lessons is answered: topic, command, or an issue still to come.

"S" is the lesson on deployment and serving, "F" the one on vLLM and quantized inference with flashcards.
Lines are restated in a few words, never copied. `planned` names a command of the design that no open issue
delivers yet; once the CLI has it, the row must name it under `commands`.
"""

import importlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from capplan.explain import find
from capplan.units import GB, GIB

SEEDS = Path(__file__).resolve().parents[2] / "shared" / "seeds"
FILES = {"S": "000_bae606f840f088be.txt", "F": "003_fd62f585e976881a.txt"}
OPEN_ISSUES = range(3, 10)
PLANNED = {"lint", "emit", "observe", "plan", "quant", "studio"}
UNITS = {
    "B": 1,
    "GB": GB,
    "GiB": GIB,
    "s": 1,
    "ms": 1e-3,
    "min": 60,
    "%": 0.01,
    "x": 1,
    "token/s": 1,
    "1": 1,
    "USD": 1,
    "mixed": 1,
}


@dataclass(frozen=True, slots=True)
class Fig:
    """A figure as the lesson prints it, and the topic's line that must give it to those digits."""

    printed: str
    unit: str
    topic: str
    line: str


@dataclass(frozen=True, slots=True)
class Row:
    """Lines of a lesson and where they are answered; `nothing` says why there is nothing to answer."""

    lesson: str
    lines: str
    says: str
    topics: str = ""
    commands: tuple[str, ...] = ()
    later: tuple[int, ...] = ()
    planned: str = ""
    figures: tuple[Fig, ...] = ()
    nothing: str = ""

    @property
    def numbers(self) -> set[int]:
        """Line numbers, from "7,9-11"."""
        made: set[int] = set()
        for part in self.lines.split(","):
            first, _, last = part.partition("-")
            made.update(range(int(first), int(last or first) + 1))
        return made

    @property
    def label(self) -> str:
        return f"{self.lesson}{self.lines} {self.says[:40]}"


VRAM = ("vram --model --users --context",)
HEADING = "title or navigation"

SERVING = (
    Row("S", "1,3,5,7,19,21,23,32", "titles; what the lesson teaches", nothing=HEADING),
    Row("S", "9", "promises: prefill against decode", "phases"),
    Row("S", "11", "promises: TTFT, TPOT, throughput", "ttft tpot throughput", later=(5,)),
    Row("S", "13", "promises: VRAM budget", "weights kv-cache total", VRAM),
    Row("S", "15", "promises: INT8, INT4, FP8, GPTQ, AWQ", "fp8 gptq-vs-awq", planned="quant"),
    Row("S", "17", "promises: batching, paging", "continuous-batching paged-attention", later=(9,)),
    Row("S", "25", "many users at once is another matter", "capacity", VRAM),
    Row("S", "27", "simple answers take over 10 s", "latency-throughput pending-queue", later=(5, 9)),
    Row("S", "28", "long conversations end in OOM", "kv-cache max-tokens capacity", VRAM),
    Row("S", "29", "3 to 5 USD/h for 15 tokens/s", "cost-per-token", later=(6,)),
    Row("S", "30", "1,000 tokens beside 5 words, locked together", "static-batching", later=(9,)),
    Row("S", "34,36,38,40", "inference is forward passes, from prompt to text", "autoregressive"),
    Row("S", "41-42,45", "training updates weights, serving only reads them", "training phases"),
    Row(
        "S",
        "43-44",
        "gradients and Adam at 8-16 B a parameter; 16-20 against 1.2-2 times the size",
        "training",
        figures=(
            Fig("112", "GB", "training", "training 7B with Adam"),
            Fig("140", "GB", "training", "at 20 B a parameter"),
        ),
    ),
    Row("S", "46", "serving is bound by bandwidth and cost", "bandwidth-trap cost", later=(5, 6)),
    Row("S", "48,50,52,54,56", "chain rule; token 50 needs token 49", "autoregressive"),
    Row("S", "58,60", "a request has two phases", "phases", later=(5,)),
    Row("S", "62,64,66-68", "prefill: GEMM, compute-bound, sets TTFT", "phases roofline ttft"),
    Row("S", "70,72,74-76", "decode: GEMV, memory-bound, sets TPOT", "phases roofline tpot"),
    Row(
        "S",
        "78,80",
        "70B in FP16 at 2.0 TB/s: 140 GB a token, 14 tokens/s",
        "bandwidth-trap",
        later=(5,),
        figures=(
            Fig("140", "GB", "bandwidth-trap", "weights of 70B"),
            Fig("0.07", "s", "bandwidth-trap", "read once"),
            Fig("70", "ms", "bandwidth-trap", "read once"),
            Fig("14", "token/s", "bandwidth-trap", "ceiling for one user"),
        ),
    ),
    Row("S", "82,84", "one latency is not enough: four metrics", "ttft tpot e2e throughput"),
    Row("S", "86,88,90", "TTFT and what it is made of", "ttft", later=(5,)),
    Row(
        "S",
        "92,94,96",
        "TPOT; 200 words a minute are 5 tokens/s",
        "tpot reading-speed",
        later=(5,),
        figures=(
            Fig("200", "ms", "reading-speed", "200 words a minute"),
            Fig("5", "token/s", "reading-speed", "which is"),
        ),
    ),
    Row("S", "98,100,102", "total duration", "e2e", later=(5,)),
    Row("S", "104,106,108", "throughput over all users", "throughput", later=(5, 9)),
    Row("S", "110", "batch size against TPOT; SLA 500 ms, 50 ms", "latency-throughput slo", later=(5,)),
    Row("S", "112,114,116,118", "M = P · B / 8", "weights", ("vram --params --precision",)),
    Row(
        "S",
        "120-124",
        "table of FP32, FP16, INT8, INT4 at 7B and 70B",
        "weights",
        ("vram --params --precision", "list formats"),
        figures=tuple(
            Fig(printed, unit, "weights", f"{what} in {name}")
            for name, row in {
                "FP32": ("4.0", "28.0", "280.0"),
                "FP16 / BF16": ("2.0", "14.0", "140.0"),
                "INT8 / FP8": ("1.0", "7.0", "70.0"),
                "INT4": ("0.5", "3.5", "35.0"),
            }.items()
            for printed, unit, what in zip(
                row, ("B", "GB", "GB"), ("one parameter", "7B", "70B"), strict=True
            )
        ),
    ),
    Row("S", "126", "15-20 % of overhead", "overhead", ("vram --overhead",), later=(4,)),
    Row("S", "128,130,132,134", "clip(round(x / s)), s = max|x| / q_max", "symmetric-quantization"),
    Row(
        "S",
        "136,138",
        "FP8: E4M3, E5M2, half the memory, twice the GEMM, on Ada and Hopper",
        "fp8",
        ("show h100-sxm",),
        planned="quant",
        figures=(
            Fig("2", "x", "fp8", "memory of fp16"),
            Fig("2", "x", "fp8", "dense peak of an H100"),
            Fig("2", "x", "fp8", "the same on an RTX 4090"),
        ),
    ),
    Row("S", "140,142", "GPTQ: inverse Hessian, layer by layer", "gptq-vs-awq", planned="quant"),
    Row("S", "144,146", "AWQ: the 1 % that matters", "gptq-vs-awq", planned="quant"),
    Row("S", "148,150,152", "softmax(QK / sqrt d) V", "attention"),
    Row("S", "154,156", "token 1,001 without a cache: quadratic", "kv-cache-purpose"),
    Row("S", "158,160,162,164,166,168,170,172,174", "M_KV and its seven factors", "kv-cache", VRAM),
    Row(
        "S",
        "176,178,180,182",
        "Llama-3-8B: half a GB at 4,096, 64 GiB for 64 users at 8,192, over an A100-40GB",
        "kv-cache kv-per-token",
        (*VRAM, "vram --gpu"),
        figures=(
            Fig("0.5", "GB", "kv-cache", "Llama-3-8B, 1 user"),
            Fig("536,870,912", "B", "kv-cache", "Llama-3-8B, 1 user"),
            Fig("68,719,476,736", "B", "kv-cache", "64 users"),
            Fig("64.0", "GiB", "kv-cache", "64 users"),
        ),
    ),
    Row("S", "184,186,188,190,192,194", "20 tokens wait for 600", "static-batching", later=(9,)),
    Row("S", "196", "scheduling by iteration", "continuous-batching", later=(9,)),
    Row("S", "198", "2.5 to 4 times over static", "continuous-batching", later=(9,)),
    Row("S", "200,202", "fragmentation remains", "fragmentation", VRAM),
    Row(
        "S",
        "204",
        "reserving the maximum wastes 60-80 %",
        "fragmentation",
        VRAM,
        later=(9,),
        figures=(
            Fig("60", "%", "fragmentation", "share, 4,096 reserved and 1,638"),
            Fig("80", "%", "fragmentation", "share, 4,096 reserved and 819"),
        ),
    ),
    Row("S", "206,208", "pages of 16 tokens", "paged-attention", ("vram --block-size",)),
    Row("S", "210", "block table to blocks anywhere", "paged-attention", later=(8, 9)),
    Row("S", "211", "a new block only when the last is full", "paged-attention", later=(9,)),
    Row("S", "212", "waste is the tail, below 4 %", "tail-waste", ("vram --block-size",), later=(9,)),
    Row("S", "213", "shared prompts and branches kept once", "prefix-sharing", ("vram --prefix-shared",)),
    Row("S", "215,217,218", "vLLM", later=(4, 9)),
    Row("S", "219", "TensorRT-LLM", later=(4, 9)),
    Row("S", "220", "Hugging Face TGI", later=(4, 9)),
    Row("S", "221", "llama.cpp, GGUF of 2 to 8 bits", "", ("list formats",), later=(3, 4)),
    Row("S", "222", "SGLang, radix tree of prefixes", "prefix-sharing", later=(4, 9)),
    Row("S", "224,226,228,230", "whole copies behind a load balancer", "replication", planned="plan"),
    Row(
        "S",
        "232,233",
        "7B fits in 24 GB; throughput grows with the copies",
        "replication",
        ("vram --gpu-memory",),
        planned="plan",
    ),
    Row("S", "235,237,239", "slices of every matrix; all-reduce a layer", "sharding", ("vram --tp",), (5,)),
    Row("S", "240", "layers over GPUs", "sharding", later=(4,)),
    Row("S", "241", "70B in FP16 takes 4 or 8 A100s", "sharding", ("vram --tp --gpu",)),
    Row("S", "243,245,247", "a vLLM launch command and its flags", "max-tokens", later=(4,), planned="emit"),
    Row("S", "249,251", "a streaming client", "streaming", later=(7,)),
    Row("S", "253,255,257,259", "Cost = G · H · R; idle GPUs", "cost cost-per-token", later=(6,)),
    Row("S", "261,263", "signal: pending queue", "pending-queue", later=(9,), planned="observe"),
    Row("S", "265", "signal: P95 and P99 of TTFT", "percentiles", later=(9,), planned="observe"),
    Row("S", "267", "signal: KV usage over 90 %", "kv-usage", later=(9,), planned="observe"),
    Row("S", "269", "signal: tokens/s near the bandwidth", "token-rate", later=(5,), planned="observe"),
    Row("S", "271,273,274", "mistake 1: no KV budget", "kv-cache capacity", VRAM, planned="lint"),
    Row("S", "275", "mistake 2: raw pipeline, 80 % wasted", "bandwidth-trap", later=(9,), planned="lint"),
    Row("S", "276", "mistake 3: quantized is always faster", "weight-only-prefill", later=(5, 8)),
    Row(
        "S",
        "277",
        "mistake 4: no streaming, 8 s of nothing",
        "streaming",
        planned="lint",
        figures=(Fig("8", "s", "streaming", "301 tokens"),),
    ),
    Row("S", "278", "mistake 5: static batches too large", "static-batching", later=(9,), planned="lint"),
    Row(
        "S",
        "279",
        "mistake 6: the mean hides a P99 of 15 s",
        "percentiles",
        later=(9,),
        planned="lint",
        figures=(Fig("15", "s", "percentiles", "P99"),),
    ),
    Row(
        "S",
        "280",
        "mistake 7: autoscaling on GPU %, cold starts of 2-5 min",
        "cold-start",
        planned="lint",
        figures=(
            Fig("2", "min", "cold-start", "70B in fp16"),
            Fig("5", "min", "cold-start", "from one of 0.5"),
        ),
    ),
    Row("S", "281", "mistake 8: no admission control", "pending-queue", later=(9,), planned="lint"),
    Row("S", "282", "mistake 9: unbounded output", "max-tokens", ("vram --context",), planned="lint"),
    Row("S", "283", "mistake 10: no accuracy audit", "int4-int8-step", planned="quant"),
    Row("S", "285,287", "a studio of sliders", "total", VRAM, planned="studio"),
    Row(
        "S",
        "289,291,293,295,297,299",
        "its inputs: model, precision, users, context, GPU",
        "total capacity",
        ("vram --model --precision --users --context --gpu",),
        planned="studio",
    ),
    Row(
        "S",
        "301,303,305,307,309",
        "its example: 4.0, 8.0, 13.5, +10.5",
        "total",
        ("vram --params --kv-from --overhead --gpu-memory",),
        figures=(
            Fig("4.0", "GB", "total", "weights, 8B"),
            Fig("8.0", "GiB", "total", "KV cache, 16 users"),
            Fig("13.5", "mixed", "total", "demand as the lesson"),
            Fig("+10.5", "mixed", "total", "headroom as the lesson"),
        ),
    ),
    Row("S", "311,313,315", "the next lesson", nothing=HEADING),
)

FLASHCARDS = (
    Row("F", "1,3,7,9,13,22,24", "titles", nothing=HEADING),
    Row("F", "5", "recomputing K and V is quadratic, so they are kept", "kv-cache-purpose kv-cache"),
    Row("F", "11", "less waste, larger batch, up to 24 times hf generate", "capacity tail-waste", later=(9,)),
    Row("F", "15,17,19", "scale of the affine map", "affine-scale int4-int8-step"),
    Row(
        "F",
        "20",
        "zero point, quantize, clip, dequantize; symmetric z = 0",
        "zero-point affine-quantization symmetric-quantization",
    ),
    Row("F", "26,28", "card: two phases", "phases", later=(5,)),
    Row("F", "30,32", "card: why a KV cache", "kv-cache-purpose"),
    Row(
        "F",
        "34,36,38",
        "card: 2 · B · S · L · d · p",
        "kv-cache-mha",
        VRAM,
        figures=(Fig("3,355,443,200", "B", "kv-cache-mha", "Llama-2-13B, 1 user"),),
    ),
    Row("F", "40,42", "card: paging and the page table", "paged-attention"),
    Row("F", "44,46", "card: internal and external fragmentation", "fragmentation", VRAM),
    Row("F", "48,50", "card: continuous batching", "continuous-batching", later=(9,)),
    Row("F", "52,54", "card: scale", "affine-scale"),
    Row("F", "56,58,60", "card: zero point", "zero-point"),
    Row("F", "62,64", "card: W4A16", "w4a16", ("vram --precision",)),
    Row("F", "66,68", "card: INT4 helps decode, not prefill", "weight-only-prefill", later=(5,)),
    Row("F", "70,72", "card: GPTQ against AWQ", "gptq-vs-awq", planned="quant"),
    Row("F", "74,76", "card: at most a block less one token", "tail-waste", ("vram --block-size",)),
    Row(
        "F",
        "78,80,82,84",
        "card: 15 against 255, a step 17 times larger",
        "int4-int8-step",
        figures=(
            Fig("15", "1", "int4-int8-step", "steps of INT4"),
            Fig("255", "1", "int4-int8-step", "steps of INT8"),
            Fig("17", "x", "int4-int8-step", "step of INT4 against"),
        ),
    ),
    Row("F", "86,88", "sticky notes, drawers and boxes", "paged-attention fragmentation w4a16"),
    Row("F", "90,92", "link: attention", "attention"),
    Row("F", "93", "link: bandwidth", "bandwidth-trap"),
    Row("F", "94", "link: quantization", "affine-quantization"),
    Row("F", "95", "link: GPTQ and AWQ", "gptq-vs-awq"),
    Row("F", "96", "link: batching", "static-batching continuous-batching"),
    Row("F", "97", "link: sharding", "sharding", ("vram --tp",)),
    Row("F", "98", "link: throughput against latency", "latency-throughput"),
    Row("F", "100,102,104", "titles", nothing=HEADING),
    Row(
        "F",
        "106",
        "13B at 4,096: about 3 GB a user; 20 users end in OOM",
        "kv-cache-mha",
        VRAM,
        figures=(Fig("3", "GB", "kv-cache-mha", "Llama-2-13B, 1 user"),),
    ),
    Row("F", "108", "60-80 % wasted, blocks of 16, 20 times", "fragmentation tail-waste", later=(9,)),
    Row(
        "F",
        "110",
        "FP16 is 2 B; INT4 reads less, errs 17 times more",
        "w4a16 int4-int8-step weights",
        figures=(
            Fig("2", "B", "weights", "one parameter in FP16"),
            Fig("17", "x", "int4-int8-step", "step of INT4 against"),
        ),
    ),
    Row("F", "112,114,116,118,120,122,124,126,128,130,132,134", "contents again", nothing=HEADING),
)

ROWS = SERVING + FLASHCARDS


def each_row() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", ROWS, ids=lambda row: row.label)


def cli_app() -> Any:
    """The typer application, or None while there is none."""
    try:
        return importlib.import_module("capplan.cli").application()
    except ImportError:
        return None


def help_of(command: str) -> tuple[int, str]:
    """Exit code and text of a command's help, unfolded."""
    from typer.testing import CliRunner

    wide = {"COLUMNS": "300", "TERMINAL_WIDTH": "300", "NO_COLOR": "1", "TERM": "dumb"}
    result = CliRunner().invoke(cli_app(), [command, "--help"], env=wide)
    return result.exit_code, result.output


@each_row()
def test_a_row_leads_somewhere(row: Row) -> None:
    assert bool(row.topics or row.commands or row.later or row.planned) != bool(row.nothing)
    assert set(row.later) <= set(OPEN_ISSUES)
    assert not row.planned or row.planned in PLANNED
    for name in row.topics.split():
        lines = find(name).compute()
        assert lines
        assert all(math.isfinite(line.value) for line in lines)


FIGURES = [(row, figure) for row in ROWS for figure in row.figures]


@pytest.mark.parametrize(
    ("row", "figure"), FIGURES, ids=[f"{row.label}: {fig.printed} {fig.unit}" for row, fig in FIGURES]
)
def test_a_headline_figure_comes_out_to_the_printed_digits(row: Row, figure: Fig) -> None:
    assert figure.topic in row.topics.split()
    found = [line for line in find(figure.topic).compute() if line.text.startswith(figure.line)]
    assert len(found) == 1, f"{len(found)} lines start with {figure.line!r}"
    digits = len(figure.printed.partition(".")[2])
    sign = "+" if figure.printed.startswith("+") else ""
    assert f"{found[0].value / UNITS[figure.unit]:{sign},.{digits}f}" == figure.printed


@pytest.mark.parametrize("command", sorted({text for row in ROWS for text in row.commands}))
def test_a_command_named_is_in_the_help(command: str) -> None:
    if cli_app() is None:
        pytest.skip("capplan.cli has no application yet")
    name, *words = command.split()
    code, text = help_of(name)
    assert code == 0
    for flag in words:
        assert not flag.startswith("--") or flag in text


def test_what_was_planned_is_moved_once_the_cli_has_it() -> None:
    if cli_app() is None:
        pytest.skip("capplan.cli has no application yet")
    there = [name for name in sorted(PLANNED) if help_of(name)[0] == 0]
    assert not there, f"name {there} under commands"


def test_rows_still_to_come_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    waiting = {issue: sum(issue in row.later for row in ROWS) for issue in OPEN_ISSUES}
    planned = {name: sum(row.planned == name for row in ROWS) for name in sorted(PLANNED)}
    answered = sum(bool(row.topics or row.commands) for row in ROWS)
    with capsys.disabled():
        print(
            f"\nlessons: {len(ROWS)} rows, {answered} answered, {len(FIGURES)} figures reproduced;"
            f" rows that also wait for an issue: {waiting}; for a planned command: {planned}"
        )
    only_later = [row.label for row in ROWS if not (row.topics or row.commands or row.nothing)]
    assert all("vLLM" in label or "TensorRT" in label or "TGI" in label for label in only_later)


@pytest.mark.parametrize("lesson", FILES)
def test_every_line_of_a_lesson_has_one_row(lesson: str) -> None:
    path = SEEDS / FILES[lesson]
    if not path.exists():
        if os.environ.get("CI"):
            pytest.fail(f"{path.name} is missing")
        pytest.skip("the lessons lie beside the repository and are not here")
    text = path.read_text(encoding="utf-8").splitlines()
    written = {number for number, line in enumerate(text, 1) if line.strip()}
    numbers = [number for row in ROWS if row.lesson == lesson for number in sorted(row.numbers)]
    assert sorted(numbers) == sorted(written)
