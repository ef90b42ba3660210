"""Times of a step's operations on one GPU: fitted (a calibration), or bound by its datasheet alone.

A calibration's `fit` goes by operation, dtype and the engine whose kernels were measured. What a GPU's own
file lacks is borrowed from the most like GPU that has it: fractions of the datasheet's rates and fixed times
carry over, the rates do not.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from capplan import catalog
from capplan.device_rates import Rates as Rates
from capplan.errors import InputError
from capplan.formulas import op_cost, roofline
from capplan.specs import Gpu
from capplan.work import Collective, Elementwise, Experts, Gemm, Mix

SCHEMA: Final = "capplan.calibration/1"
FOLDER: Final = catalog.PROFILES / "calibrations"

# Whose kernels stand for an engine's where its own were not measured.
KERNELS: Final = {
    "vllm": ("vllm", "trtllm", "sglang"),
    "sglang": ("sglang", "vllm", "trtllm"),
    "tensorrt-llm": ("trtllm", "vllm", "sglang"),
    "tgi": ("vllm", "trtllm", "sglang"),
    "llama.cpp": ("llama.cpp", "vllm", "trtllm"),
}
# An engine's experts that were measured in another: on compute capability 10 vLLM runs TensorRT-LLM's own
# (trtllm-gen, through FlashInfer), which that takes for whole experts; in groups (EP) it runs CUTLASS.
MEASURED_IN: Final = {("tensorrt-llm", "10"): "vllm"}
# Which kernels stand in for a dtype that nobody measured or the GPU cannot multiply, the nearest first.
STAND_INS: Final = {
    "bf16": ("bf16",),
    "fp8": ("fp8", "fp8_block", "int8", "w8a16", "bf16"),
    "fp8_block": ("fp8_block", "fp8", "int8", "w8a16", "bf16"),
    "int8": ("int8", "fp8", "w8a16", "bf16"),
    "w8a16": ("w8a16", "bf16"),
    "w4a16": ("w4a16", "w4a16_mxfp4", "w8a16", "bf16"),
    "nvfp4": ("nvfp4", "w4a8_mxfp4_mxfp8", "fp8", "bf16"),
    "w4a16_mxfp4": ("w4a16_mxfp4", "w4a8_mxfp4_mxfp8", "w4a16", "bf16"),
    "w4a8_mxfp4_mxfp8": ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4", "nvfp4", "bf16"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """One calibration file: what was fitted for which GPU, and how wrong it was on rows held out."""

    id: str
    gpu_id: str
    origin: str
    fit: Mapping[str, Any]
    error: Mapping[str, Any]
    validity: Mapping[str, Any]
    sources: tuple[Mapping[str, Any], ...]


def load_calibration(path: Any) -> Calibration:
    """A calibration file; InputError for another schema or missing parts."""
    data = catalog.read_yaml(path)
    if data.get("schema") != SCHEMA:
        raise InputError(
            f"schema {data.get('schema')!r} is not {SCHEMA}", where=str(path), hint="give a calibration file"
        )
    missing = [name for name in ("id", "hardware", "origin", "fit", "error") if name not in data]
    if missing:
        raise InputError(f"no {', '.join(missing)}", where=str(path), hint="the file is not complete")
    return Calibration(
        id=str(data["id"]),
        gpu_id=str(data["hardware"]["key"]),
        origin=str(data["origin"]),
        fit=data["fit"],
        error=data["error"],
        validity=data.get("validity", {}),
        sources=tuple(data.get("sources", ())),
    )


@cache
def shipped() -> tuple[Calibration, ...]:
    """The calibrations of whole GPUs that ship with capplan."""
    known = set(catalog.ids("gpus"))
    return tuple(load_calibration(path) for path in sorted(FOLDER.glob("*.yaml")) if path.stem in known)


def _likeness(gpu: Gpu, other: Gpu) -> tuple[bool, bool, bool, float, str]:
    """Sort key of a GPU to borrow from: same part, same vendor and architecture, same kind of memory."""

    def generation(entry: Gpu) -> float:
        text = entry.compute_capability or ""
        return float(text) if text.replace(".", "").isdigit() else 0.0

    stacked = ("HBM" in (gpu.memory_type or "")) == ("HBM" in (other.memory_type or ""))
    return (
        gpu.id != other.id,
        (gpu.vendor, gpu.architecture) != (other.vendor, other.architecture),
        not stacked,
        abs(generation(gpu) - generation(other)),
        other.id,
    )


@cache
def _measured_gpu(identity: str) -> Gpu:
    return catalog.load_gpu(identity)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """The fitted numbers of one (operation, dtype): from which GPU, engine and dtype they are.

    `ranges`: the least and most of every size that was measured.
    """

    fit: Mapping[str, float]
    error: Mapping[str, float]
    ranges: Mapping[str, Any]
    gpu_id: str
    engine: str
    dtype: str


class Bounds:
    """Physics only: bytes over bandwidth or FLOP over peak, whichever is longer; no launch, no waiting.

    `skew`: how unevenly tokens are routed over experts (op_cost.experts_s).
    """

    provenance = "bound"

    def __init__(self, gpu: Gpu, skew: float = 0.0) -> None:
        self.rates, self.skew = Rates(gpu), skew

    def _time(self, flop: float, moved: float, dtype: str) -> float:
        return roofline.bound_s(
            flop=flop,
            bytes_moved=moved,
            flop_per_s=self.rates.flop_per_s(dtype),
            bytes_per_s=self.rates.bytes_per_s,
        )

    def ranges(self, operation: str, dtype: str) -> Mapping[str, Any]:
        """Least and most of every size that an operation was fitted on; physics holds everywhere."""
        return {}

    def floor(self) -> "Bounds | None":
        """Physics that a step by these costs is held to; None where it is what it is."""
        return None

    def gemm(self, shape: Gemm, m: float) -> float:
        """One product of m rows."""
        return self._time(*shape.load(m), self.rates.runs(shape.dtype))

    def decode(self, mix: Mix, batch: float, kept: float) -> float:
        """One mixing of `batch` decoding sequences over `kept` entries in all."""
        return self._time(*mix.decode_load(batch, kept), "bf16")

    def decode_array(self, mix: Mix, batch: float, kept: Any) -> Any:
        """The same for many `kept` at once (a numpy array)."""
        flop, moved = mix.decode_load(batch, kept)
        import numpy as np

        return np.maximum(flop / self.rates.half_flop_per_s, moved / self.rates.bytes_per_s)

    def prefill(self, mix: Mix, sequences: float, tokens: float, pairs: float) -> float:
        """One mixing of prompt chunks."""
        return self._time(*mix.prefill_load(sequences, tokens, pairs), "bf16")

    def experts(self, shape: Experts, tokens: float) -> float:
        """The routed experts of one layer; uneven routing may read no more of them than one token does."""
        flop, moved = shape.load(tokens)
        if self.skew:
            moved = min(moved, shape.load(1.0)[1])
        return self._time(flop, moved, self.rates.runs(shape.dtype))

    def collective(self, shape: Collective, count: float) -> float:
        """One collective over `count` tokens or sequences."""
        return shape.wire_bytes(count) / self.rates.link_bytes_per_s

    def elementwise(self, shape: Elementwise, count: float) -> float:
        """One kernel over `count` tokens or sequences."""
        return (shape.bytes_each * count + shape.resident_bytes) / self.rates.bytes_per_s


class OpCosts(Bounds):
    """Fitted times of one GPU under one engine's kernels."""

    def __init__(
        self, gpu: Gpu, engine: str, calibrations: tuple[Calibration, ...] | None = None, skew: float = 0.0
    ) -> None:
        super().__init__(gpu, skew)
        self.engine = engine
        known = shipped() if calibrations is None else calibrations
        self.order = sorted(known, key=lambda entry: _likeness(gpu, _measured_gpu(entry.gpu_id)))
        self.chosen: dict[tuple[str, str], Choice] = {}
        self.spans: dict[tuple[str, str], Mapping[str, Any]] = {}
        self.alternatives: dict[str, tuple[Choice, ...]] = {}
        # Whose multiprocessors waves of tiles are counted on: the lender's, where the GPU's are not known.
        self.sms_gpu = gpu if gpu.sm_count or not self.order else _measured_gpu(self.order[0].gpu_id)

    @property
    def provenance(self) -> str:  # type: ignore[override]
        """ "calibrated" on a profile of this very device, else "estimate"."""
        own = self.order and self.order[0].gpu_id == self.rates.gpu.id and self.order[0].origin == "local"
        return "calibrated" if own else "estimate"

    def floor(self) -> Bounds | None:
        """Fits and an engine's fusion, on a GPU unlike those measured, must not beat its datasheet."""
        return Bounds(self.rates.gpu, self.skew)

    def choice(self, operation: str, dtype: str) -> Choice:
        """The numbers for an operation: this GPU's before a like one's, the engine's before another's."""
        key = (operation, dtype)
        if key not in self.chosen:
            found = next(self._candidates(operation, dtype), None)
            if found is None:
                raise InputError(
                    f"no calibration has {operation} in {dtype}",
                    where=f"--gpu {self.rates.gpu.id}",
                    hint="--bounds answers without one",
                )
            self.chosen[key] = found
        return self.chosen[key]

    def _candidates(self, operation: str, dtype: str) -> Iterator[Choice]:
        """Own GPU and dtype first; a like GPU's same dtype before another dtype of the own."""
        for stand_in in STAND_INS.get(dtype, (dtype, "bf16")):
            for entry in self.order:
                by_engine = entry.fit.get(operation, {}).get(stand_in, {})
                errors = entry.error.get(operation, {}).get(stand_in, {})
                for engine in KERNELS[self.engine]:
                    if engine in by_engine:
                        yield Choice(
                            fit=by_engine[engine],
                            error=errors.get(engine, {}),
                            ranges=entry.validity.get(operation, {}).get(stand_in, {}).get(engine, {}),
                            gpu_id=entry.gpu_id,
                            engine=engine,
                            dtype=stand_in,
                        )

    def ranges(self, operation: str, dtype: str) -> Mapping[str, Any]:
        """The sizes that an operation's numbers were fitted on; of a collective by its ranks."""
        found = self.chosen.get((operation, dtype))
        return self.spans.get((operation, dtype), {}) if found is None else found.ranges

    def _common(self, choice: Choice, dtype: str) -> dict[str, Any]:
        return {
            "flop_per_s": self.rates.flop_per_s(dtype),
            "bytes_per_s": self.rates.bytes_per_s,
            "sms": self.sms_gpu.sm_count or self.rates.sms,
            "fit": choice.fit,
        }

    def gemm(self, shape: Gemm, m: float) -> float:
        """One product of m rows."""
        dtype = self.rates.runs(shape.dtype)
        found = self.choice("gemm", dtype)
        return float(
            op_cost.gemm_s(
                m=m,
                n=shape.n,
                k=shape.k,
                weight_bits=shape.weight_bits,
                activation_bits=shape.activation_bits,
                **self._common(found, dtype),
            )
        )

    def decode(self, mix: Mix, batch: float, kept: float) -> float:
        """One mixing of `batch` decoding sequences over `kept` entries in all."""
        return float(self.decode_array(mix, batch, kept))

    def decode_array(self, mix: Mix, batch: float, kept: Any) -> Any:
        """The same for many `kept` at once (a numpy array)."""
        own, bits, dtype = mix.mixing, mix.kv_bits, mix.kernel_dtype
        if own.form == "attention":
            return op_cost.decode_attention_s(
                batch=batch,
                kv_tokens=kept,
                heads=own.heads,
                kv_heads=own.kv_heads,
                k_width=own.k_width,
                v_width=own.v_width,
                kv_bits=bits,
                queries=mix.queries,
                **self._common(self.choice("decode_attention", dtype), "bf16"),
            )
        if own.form == "latent":
            return op_cost.mla_decode_s(
                batch=batch,
                kv_tokens=kept,
                heads=own.heads * mix.queries,
                latent_width=own.k_width,
                v_width=own.v_width,
                kv_bits=bits,
                **self._common(self.choice("mla_decode", dtype), "bf16"),
            )
        flop, moved = mix.decode_load(batch, kept)
        return self._moved(moved) + flop / self._scan_flop_per_s()

    def _scan_flop_per_s(self) -> float:
        """Rate of scans and states, which nobody measured apart: prefill attention's."""
        return float(self.choice("prefill_attention", "bf16").fit["compute"]) * self.rates.half_flop_per_s

    def _moved(self, moved: Any, cache_bytes: float = 0.0) -> Any:
        """A kernel that only moves data, of which the last kernel left `cache_bytes` in the cache."""
        return op_cost.elementwise_s(
            bytes_moved=moved,
            bytes_per_s=self.rates.bytes_per_s,
            fit=self.choice("elementwise", "bf16").fit,
            cache_bytes=cache_bytes,
        )

    def prefill(self, mix: Mix, sequences: float, tokens: float, pairs: float) -> float:
        """One mixing of prompt chunks."""
        own, bits, dtype = mix.mixing, mix.kv_bits, mix.kernel_dtype
        shared: dict[str, Any] = {
            "sequences": sequences,
            "tokens": tokens,
            "pairs": pairs,
            "heads": own.heads,
            # What the kernels before have written is still in the cache.
            "cache_bytes": self.rates.gpu.l2_bytes or 0,
        }
        if own.form == "attention":
            return float(
                op_cost.prefill_attention_s(
                    **shared,
                    kv_heads=own.kv_heads,
                    k_width=own.k_width,
                    v_width=own.v_width,
                    kv_bits=bits,
                    **self._common(self.choice("prefill_attention", dtype), "bf16"),
                )
            )
        if own.form == "latent":
            return float(
                op_cost.mla_prefill_s(
                    **shared,
                    k_width=own.prompt_k_width,
                    v_width=own.prompt_v_width,
                    **self._common(self.choice("mla_prefill", dtype), "bf16"),
                )
            )
        flop, moved = mix.prefill_load(sequences, tokens, pairs)
        return float(self._moved(moved) + flop / self._scan_flop_per_s())

    def experts(self, shape: Experts, tokens: float) -> float:
        """The routed experts of one layer."""
        dtype = self.rates.runs(shape.dtype)
        return min(
            float(
                op_cost.experts_s(
                    tokens=tokens,
                    hidden=shape.hidden,
                    inter=shape.inter,
                    top_k=shape.top_k,
                    experts=shape.experts,
                    ep=shape.ep,
                    tp=shape.tp,
                    weight_bits=shape.weight_bits,
                    activation_bits=shape.activation_bits,
                    gated=shape.gated,
                    skew=self.skew,
                    **self._common(found, dtype),
                )
            )
            for found in self._experts(dtype)[: 1 if shape.ep > 1 else None]
        )

    def _experts(self, dtype: str) -> tuple[Choice, ...]:
        """The experts' kernels an engine chooses from, on one GPU and in one dtype."""
        made = self.alternatives.get(dtype)
        if made is None:
            own = self.choice("experts", dtype)
            generation = (self.rates.gpu.compute_capability or "").partition(".")[0]
            other = MEASURED_IN.get((self.engine, generation))
            made = self.alternatives[dtype] = (
                own,
                *(
                    found
                    for found in self._candidates("experts", dtype)
                    if (found.engine, found.gpu_id, found.dtype) == (other, own.gpu_id, own.dtype)
                ),
            )
        return made

    def collective(self, shape: Collective, count: float) -> float:
        """One collective over `count` tokens or sequences."""
        return float(
            op_cost.collective_s(
                bytes_moved=shape.buffer_bytes(count),
                ranks=shape.ranks,
                link_bytes_per_s=self.rates.link_bytes_per_s,
                fit=self._ranks(shape.op, shape.ranks),
            )
        )

    def _ranks(self, operation: str, ranks: int) -> Mapping[str, float]:
        """The fit of a collective for this many ranks; between and beyond those measured, the next.

        A message stands as the all-gather of two, in which each rank sends one, where none was measured.
        """
        own = KERNELS[self.engine] if operation == "all_reduce" else ()
        libraries = (*own, "nccl")
        linked = bool(self.rates.gpu.nvlink_bytes_per_s)
        order = sorted(
            self.order, key=lambda entry: bool(_measured_gpu(entry.gpu_id).nvlink_bytes_per_s) != linked
        )
        for name in (operation, *(("all_gather",) if operation == "send" else ())):
            for entry in order:
                for library in libraries:
                    by_ranks = entry.fit.get(name, {}).get(library)
                    if by_ranks:
                        counts = sorted(int(count) for count in by_ranks)
                        nearest = next((count for count in counts if count >= ranks), counts[-1])
                        fit: Mapping[str, float] = by_ranks.get(nearest) or by_ranks[str(nearest)]
                        ranges = entry.validity.get(name, {}).get(library, {})
                        self.spans[operation, str(ranks)] = ranges.get(nearest, {})
                        return fit
        raise InputError(
            f"no calibration has {operation} over {ranks} GPUs",
            where=f"--gpu {self.rates.gpu.id}",
            hint="--bounds answers without one",
        )

    def elementwise(self, shape: Elementwise, count: float) -> float:
        """One kernel over `count` tokens or sequences."""
        # Activations: the kernel before has just written them.
        return float(self._moved(shape.bytes_each * count, float(self.rates.gpu.l2_bytes or 0)))

    def borrowed(self) -> tuple[str, ...]:
        """GPUs whose numbers were used in place of this one's own, small kernels not counted.

        Those were measured on two GPUs only; they are a few percent of a step.
        """
        used = {found.gpu_id for (operation, _), found in self.chosen.items() if operation != "elementwise"}
        return tuple(sorted(used - {self.rates.gpu.id}))
