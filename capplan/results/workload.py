"""What a run's client sent: lengths equal or varied, and how many requests a user, where the run says it."""

import math
from dataclasses import dataclass
from typing import Final

from capplan.engine_speed import older
from capplan.formulas.serving import Traffic
from capplan.results.measured import MeasuredRun
from capplan.results.subject import Subject

# Prompts of one length are a round number of tokens, and those a chat template adds.
_ROUND: Final = 1000
_TEMPLATE: Final = 0.0125
CONVERSATIONS: Final = 1.0
"""Standard deviation over mean of the answers of conversations: about that of an exponential law."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A published benchmark client: lengths uniform between `shortest` and 1 of the nominal ones."""

    shortest: float
    requests_per_user: float

    @property
    def mean(self) -> float:
        """Mean length over the nominal one."""
        return (1 + self.shortest) / 2

    @property
    def variation(self) -> float:
        """Standard deviation over mean: (1 − s) / √12 / mean."""
        return (1 - self.shortest) / math.sqrt(12) / self.mean


# Whose runs a table has → how they were sent, read 2026-11-30 in
# SemiAnalysisAI/InferenceX, .github/workflows/benchmark-tmpl.yml and benchmarks/: RANDOM_RANGE_RATIO 0.8,
# num-prompts 10 · CONC;
# ai-dynamo/aiconfigurator, src/aiconfigurator/generator/config/backend_templates/benchmark/bench_run.sh.j2:
# no deviation of lengths, BENCH_MULTI_ROUND 20.
CLIENTS: Final = {
    "InferenceX/InferenceMAX dump": Client(shortest=0.8, requests_per_user=10),
    "in-house collection by NVIDIA": Client(shortest=1.0, requests_per_user=20),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What a published launch script sets: an FP8 KV cache, steps between looks for few and many users."""

    fp8_cache: bool = False
    poll_steps: tuple[int, int] = (1, 1)


# Of the same client, by engine and model architecture, on Blackwell: benchmarks/single_node/fixed_seq_len/,
# --kv-cache-dtype and --scheduler-recv-interval.
_MANY_USERS: Final = 16
_BLACKWELL: Final = ("Blackwell", "Blackwell Ultra")
SERVERS: Final = {
    ("InferenceX/InferenceMAX dump", "sglang", "deepseek_v3"): Server(fp8_cache=True, poll_steps=(10, 30)),
    ("InferenceX/InferenceMAX dump", "sglang", "glm_moe_dsa"): Server(fp8_cache=True),
    ("InferenceX/InferenceMAX dump", "sglang", "qwen3_5_moe_text"): Server(poll_steps=(10, 30)),
}


def _server(run: MeasuredRun, subject: Subject) -> Server:
    if subject.gpu.architecture not in _BLACKWELL:
        return Server()
    return SERVERS.get((run.notes.origin or "", run.engine, subject.model.architecture), Server())


def fp8_cache(run: MeasuredRun, subject: Subject) -> bool:
    """Whether the run's launch script is known to set an FP8 KV cache."""
    return _server(run, subject).fp8_cache


def poll_steps(run: MeasuredRun, subject: Subject) -> int:
    """Steps between looks for new requests, as the run's launch script is known to set it."""
    few, many = _server(run, subject).poll_steps
    return many if (run.concurrency or 0) >= _MANY_USERS else few


# Requests of an offline run by (isl, osl), and all of one length: NVIDIA/TensorRT-LLM, perf-overview.md,
# "Preparing a Dataset", versions 0.17 to 1.1, read 2026-11-30.
_PERF_OVERVIEW: Final = {
    (128, 128): 30000, (128, 2048): 3000, (128, 4096): 1500, (500, 2000): 3000, (1000, 1000): 3000,
    (1000, 2000): 1500, (1024, 1024): 3000, (1024, 8192): 1500, (1024, 32768): 1000, (2048, 128): 3000,
    (2048, 2048): 1500, (5000, 500): 1500, (8192, 1024): 1500, (20000, 2000): 1000, (32768, 1024): 1000,
}  # fmt: skip
DATASETS: Final = {
    "github:NVIDIA/TensorRT-LLM/docs/source/performance/perf-overview.md": _PERF_OVERVIEW,
    "github:NVIDIA/TensorRT-LLM/docs/source/developer-guide/perf-overview.md": _PERF_OVERVIEW,
}


def attention_dp(run: MeasuredRun) -> bool:
    """Whether a run of a model with experts had one attention rank a GPU, as it says or its document does.

    perf-overview.md, "Running the Benchmark", from 1.0 on: `enable_attention_dp: true` for MoE models.
    """
    if run.notes.attention_dp is not None:
        return run.notes.attention_dp
    version = run.engine_version or ""
    return _document(run) in DATASETS and not older(version, "1.0") and older(version, "999.0")


def _document(run: MeasuredRun) -> str:
    return run.source.partition("@")[0]


def requests_of(run: MeasuredRun) -> int | None:
    """How many requests the run had: as it says, else as the document it comes from does."""
    if run.notes.requests is not None or run.isl is None or run.osl is None:
        return run.notes.requests
    return DATASETS.get(_document(run), {}).get((round(run.isl), round(run.osl)))


def traffic_of(run: MeasuredRun, isl: float, osl: float) -> Traffic:
    """The run's requests: as its client is known to send them, else as its columns and notes say.

    Lengths that are means of varied ones are conversations' unless the prompts are a round number of tokens.
    """
    client = CLIENTS.get(run.notes.origin or "")
    if client is not None:
        return Traffic(
            isl=isl * client.mean,
            osl=max(1.0, osl * client.mean),
            equal=client.shortest == 1,
            variation=client.variation,
            requests_per_user=client.requests_per_user,
        )
    if run.notes.varied and not _round(isl):
        return Traffic(isl=isl, osl=osl, variation=CONVERSATIONS)
    return Traffic(isl=isl, osl=osl, equal=True)


def _round(tokens: float) -> bool:
    """Whether a length is near a power of two or whole thousands."""
    near = {2 ** round(math.log2(tokens)), _ROUND * round(tokens / _ROUND)} - {0}
    return any(abs(tokens / value - 1) <= _TEMPLATE for value in near)
