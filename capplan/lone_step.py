"""Steps of llama.cpp: by fractions of a card's rates (small_batch_speed.py) instead of by operation.

Measured with one sequence alone. With more, the weights are still read once a step and the arithmetic grows;
nobody measured that, and the answer says so.
"""

from collections.abc import Mapping
from typing import Final

from capplan import small_batch, small_batch_speed
from capplan.device_rates import Rates
from capplan.engine_speed import Band
from capplan.formulas import small_batch as formulas
from capplan.formulas.queueing import prompt_pairs as pairs_of
from capplan.small_batch_speed import CHUNK, Calibration, Host
from capplan.specs import Format, Gpu, Model
from capplan.step import Load, OpTime

ENGINES: Final = ("llama.cpp",)
"""Engines whose steps go by this table."""


class LoneTable:
    """Step times of one model on one GPU (or on several that hold whole layers) under llama.cpp."""

    def __init__(
        self,
        model: Model,
        gpu: Gpu,
        *,
        precision: Format | None,
        kv_bits: float,
        gpus: int = 1,
        engine: str = "llama.cpp",
        calibration: Calibration | None = None,
    ) -> None:
        self.calibration = calibration or small_batch_speed.shipped()
        self.reads = small_batch.model_reads(model, precision, kv_bits=kv_bits)
        self.family = small_batch.family_of(precision, model)
        self.backend = self.calibration.backend(engine, small_batch.platform_of(gpu))
        self.host = Host(gpu=gpu, gpus=gpus)
        self.rates = Rates(gpu)
        self.fractions = self.backend.fractions(self.family)

    @property
    def borrowed(self) -> bool:
        """Whether no run of this backend with this family of formats was measured."""
        return self.fractions.runs == 0

    def step_s(
        self,
        *,
        decode_sequences: float,
        kv_tokens: float,
        prompt_tokens: float = 0,
        prompt_pairs: float | None = None,
        prompt_sequences: float | None = None,
    ) -> float:
        """Time of a step, in seconds; arguments as StepTable.step_s."""
        load = Load(
            decode_sequences=decode_sequences,
            kv_tokens=kv_tokens,
            prompt_sequences=prompt_sequences or (1.0 if prompt_tokens else 0.0),
            prompt_tokens=prompt_tokens,
            prompt_pairs=pairs_of(new_tokens=prompt_tokens) if prompt_pairs is None else prompt_pairs,
        )
        return sum(op.time_s for op in self.ops(load))

    def ops(self, load: Load) -> tuple[OpTime, ...]:
        """The step's parts: weights with their arithmetic, cache, launches, prompts."""
        found: list[OpTime] = []
        if load.decode_sequences:
            found += self._decode(load.decode_sequences, load.kv_tokens)
        if load.prompt_tokens:
            found.append(self._prompt(load))
        return tuple(found)

    def _decode(self, batch: float, kv_tokens: float) -> list[OpTime]:
        gpu, reads, fractions = self.host.gpu, self.reads, self.fractions
        vector = small_batch_speed.vector_rate(gpu)
        # Each sequence picks experts of its own, until all are read.
        moved = min(reads.prompt_bytes, batch * reads.token_bytes)
        weights_s = formulas.hand_over_s(
            memory_s=moved / (fractions.bandwidth * gpu.memory_bandwidth_bytes_per_s),
            compute_s=batch * reads.flop / (fractions.compute * vector),
        )
        kv_bytes = batch * reads.kv_bytes(kv_tokens / batch)
        kv_s = kv_bytes / (self.backend.kv_fraction * gpu.memory_bandwidth_bytes_per_s)
        launches_s = reads.kernels * self.backend.launch_s + (self.host.gpus - 1) * self.backend.hop_s
        return [
            self._part("gemm", "weights", weights_s, moved=moved, flop=batch * reads.flop),
            self._part("decode attention", "cache", kv_s, moved=kv_bytes),
            self._part("host", "launches", launches_s),
        ]

    def _prompt(self, load: Load) -> OpTime:
        tokens = max(1, round(load.prompt_tokens))
        past = max(0, round(load.prompt_pairs / tokens - (tokens + 1) / 2))
        time_s = small_batch_speed.prompt_time_s(
            backend=self.backend,
            family=self.family,
            reads=self.reads,
            tokens=tokens,
            host=self.host,
            past=past,
            chunk=CHUNK,
        )
        flop = tokens * self.reads.flop + self.reads.attention_flop(tokens=tokens, past=past)
        moved = self.reads.prompt_bytes * -(-tokens // CHUNK)
        return self._part("gemm", "prompt", time_s, moved=moved, flop=flop)

    def _part(self, kind: str, name: str, time_s: float, *, moved: float = 0, flop: float = 0) -> OpTime:
        bound = max(moved / self.rates.bytes_per_s, flop / self.rates.half_flop_per_s)
        return OpTime(
            kind=kind,
            name=name,
            dtype=self.family if name != "cache" else "",
            count=1,
            flop=flop,
            bytes=moved,
            bound_s=bound,
            time_s=time_s,
        )

    def bands(self) -> Mapping[str, Band]:
        """Bands of TTFT, TPOT, E2E and throughput: speeds of cards held out, turned into times."""
        errors = self.calibration.error
        key = f"{self.backend.engine}-{self.backend.platform}"

        def band(what: str) -> Band:
            bands = errors[what]
            found = (
                bands["backends"].get(f"{key} {self.family}") or bands["backends"].get(key) or bands["others"]
            )
            return Band(low=found["p10"], middle=found["p50"], high=found["p90"], runs=found["rows"])

        def inverse(speed: Band) -> Band:
            return Band(low=1 / speed.high, middle=1 / speed.middle, high=1 / speed.low, runs=speed.runs)

        decode, prompt = band("decode"), band("prompt")
        return {
            "ttft": inverse(prompt),
            "tpot": inverse(decode),
            "e2e": inverse(decode),
            "throughput": decode,
        }
