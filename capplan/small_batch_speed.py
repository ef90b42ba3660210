"""Speed of one sequence alone on an engine's backend, by profiles/calibrations/small-batch.yaml.

A backend is an engine on a platform (llama.cpp-cuda, ollama-metal). The fractions are of the device's own
datasheet rates, so that a card nobody measured is answered too; the band is what cards held out whole showed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import log2
from typing import Any, Final

from capplan import catalog
from capplan.errors import InputError, did_you_mean, shown
from capplan.formulas import small_batch as formulas
from capplan.small_batch import Family, ModelReads, Platform, matrix_flop_per_s, vector_flop_per_s
from capplan.specs import Gpu

FILE: Final = catalog.PROFILES / "calibrations" / "small-batch.yaml"
CHUNK: Final = 512
"""Prompt tokens llama.cpp works on at once by default (--ubatch-size)."""

_MICRO: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Fractions:
    """What a family of formats reaches on a backend, as fractions of the device's rates.

    `runs` are the measured runs behind it; 0: borrowed from the engine, the platform and the family apart.
    """

    bandwidth: float
    compute: float
    prompt: float
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Backend:
    """An engine on a platform. `tensor_parallel`: whether its GPUs share each layer, or hold whole ones."""

    engine: str
    platform: Platform
    launch_s: float
    kv_fraction: float
    prompt_attention_fraction: float
    collective_s: float
    hop_s: float
    board_launch: float
    tensor_parallel: bool
    families: Mapping[Family, Fractions]

    def fractions(self, family: Family) -> Fractions:
        """The fractions of a family; InputError where the engine was never measured with it."""
        found = self.families.get(family)
        if found is None:
            raise InputError(
                f"{self.engine} on {self.platform} was not measured with {family} weights",
                where="--precision",
                hint=f"measured: {', '.join(sorted(self.families))}",
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where a sequence runs: GPUs of one kind, and whether a single-board computer launches their kernels."""

    gpu: Gpu
    gpus: int = 1
    board: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Tokens per second, with the 10th and 90th percentile of what cards held out measured.

    `borrowed`: no run of this backend and family was measured.
    """

    token_per_s: float
    low: float
    high: float
    borrowed: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """The backends of a file, and measured over predicted on cards held out, by backend and family."""

    backends: Mapping[str, Backend]
    error: Mapping[str, Any] = field(default_factory=dict)

    def backend(self, engine: str, platform: Platform) -> Backend:
        """The backend; InputError where no run of it was measured."""
        found = self.backends.get(f"{engine}-{platform}")
        if found is None:
            raise InputError(
                f"no measured speed of {shown(engine)} on {platform} for one sequence alone",
                where="--engine",
                hint=did_you_mean(f"{engine}-{platform}", self.backends, "a backend of small-batch.yaml"),
            )
        return found

    def decode(
        self, *, backend: Backend, family: Family, reads: ModelReads, context: float, host: Host
    ) -> Speed:
        """Tokens a second of one sequence at `context` tokens of its own past."""
        step_s = decode_s(backend=backend, family=family, reads=reads, context=context, host=host)
        return self._speed("decode", backend, family, 1 / step_s)

    def prompt(
        self,
        *,
        backend: Backend,
        family: Family,
        reads: ModelReads,
        tokens: int,
        host: Host,
        past: int = 0,
        chunk: int = CHUNK,
    ) -> Speed:
        """Tokens a second of a prompt of `tokens` after `past` others, in chunks of `chunk`."""
        time_s = prompt_time_s(
            backend=backend, family=family, reads=reads, tokens=tokens, host=host, past=past, chunk=chunk
        )
        return self._speed("prompt", backend, family, tokens / time_s)

    def _speed(self, what: str, backend: Backend, family: Family, token_per_s: float) -> Speed:
        bands = self.error[what]
        key = f"{backend.engine}-{backend.platform}"
        band = bands["backends"].get(f"{key} {family}") or bands["backends"].get(key) or bands["others"]
        return Speed(
            token_per_s=token_per_s,
            low=token_per_s * min(1.0, band["p10"]),
            high=token_per_s * max(1.0, band["p90"]),
            borrowed=backend.fractions(family).runs == 0,
        )


def decode_s(*, backend: Backend, family: Family, reads: ModelReads, context: float, host: Host) -> float:
    """Time of one token, in seconds; InputError where the GPU's rates are not known."""
    fractions = backend.fractions(family)
    ranks = host.gpus if backend.tensor_parallel else 1
    return formulas.decode_step_s(
        weight_bytes=reads.token_bytes,
        flop=reads.flop,
        kv_bytes=reads.kv_bytes(context),
        kernels=reads.kernels,
        bytes_per_s=host.gpu.memory_bandwidth_bytes_per_s,
        flop_per_s=vector_rate(host.gpu),
        bandwidth_fraction=fractions.bandwidth,
        compute_fraction=fractions.compute,
        kv_fraction=backend.kv_fraction,
        launch_s=backend.launch_s * (backend.board_launch if host.board else 1),
        ranks=ranks,
        collectives=collectives(reads.layers, ranks),
        collective_s=backend.collective_s,
        hops=host.gpus - ranks,
        hop_s=backend.hop_s,
    )


def collectives(layers: int, ranks: int) -> float:
    """All-reduces of a token, each counted once for every doubling of the ranks: two a layer."""
    return 2 * layers * log2(ranks)


def prompt_time_s(
    *, backend: Backend, family: Family, reads: ModelReads, tokens: int, host: Host, past: int, chunk: int
) -> float:
    """Time of a prompt, in seconds; InputError where the GPU's rates are not known."""
    fractions = backend.fractions(family)
    ranks = host.gpus if backend.tensor_parallel else 1
    return formulas.prompt_s(
        flop=tokens * reads.flop / ranks,
        attention_flop=reads.attention_flop(tokens=tokens, past=past) / ranks,
        weight_bytes=reads.prompt_bytes / ranks,
        kernels=reads.kernels,
        chunks=-(-tokens // chunk),
        bytes_per_s=host.gpu.memory_bandwidth_bytes_per_s,
        flop_per_s=_rate(matrix_flop_per_s(host.gpu), host.gpu),
        bandwidth_fraction=fractions.bandwidth,
        compute_fraction=fractions.prompt,
        attention_fraction=backend.prompt_attention_fraction,
        launch_s=backend.launch_s * (backend.board_launch if host.board else 1),
        stages=1 if backend.tensor_parallel else host.gpus,
    )


def vector_rate(gpu: Gpu) -> float:
    """Rate of plain arithmetic, in FLOP/s; InputError where no source gives it."""
    return _rate(vector_flop_per_s(gpu), gpu)


def _rate(found: float | None, gpu: Gpu) -> float:
    if found is None:
        raise InputError(
            f"no source gives the arithmetic rate of {gpu.name}", where="--gpu", hint="choose another GPU"
        )
    return found


@cache
def shipped() -> Calibration:
    """The calibration that comes with the package."""
    return from_dict(catalog.read_yaml(FILE))


def from_dict(data: Mapping[str, Any]) -> Calibration:
    """A calibration file's content."""
    fit = data["fit"]
    backends: dict[str, Backend] = {}
    for name, numbers in fit["backends"].items():
        families: dict[Family, Fractions] = {
            family: Fractions(**fractions) for family, fractions in numbers["families"].items()
        }
        backends[name] = Backend(
            engine=numbers["engine"],
            platform=numbers["platform"],
            launch_s=numbers["launch_us"] * _MICRO,
            kv_fraction=numbers["kv"],
            prompt_attention_fraction=numbers["prompt_attention"],
            collective_s=numbers.get("collective_us", 0.0) * _MICRO,
            hop_s=fit["hop_us"] * _MICRO,
            board_launch=fit["board_launch"]["cuda" if numbers["platform"] == "cuda" else "other"],
            tensor_parallel=numbers["split"] == "tensor",
            families=families,
        )
    return Calibration(backends=backends, error=data["error"])
