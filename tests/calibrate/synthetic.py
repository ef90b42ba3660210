"""A device whose times follow a law: points of it, and a file made of them."""

from collections.abc import Callable, Iterator
from typing import Any

from capplan import catalog
from capplan.calibrate.clock import Timing
from capplan.calibrate.loop import LoopShape, loop_shape
from capplan.calibrate.points import Point, point
from capplan.calibrate.profile_file import document

MODEL = "llama-3.2-1b"
LAYERS = 2
HARDWARE: dict[str, Any] = {
    "key": "cpu-test-avx2-2t",
    "kind": "cpu",
    "name": "Test CPU (2 threads)",
    "vendor": "AMD",
    "architecture": "CPU",
    "instructions": "avx2",
    "memory_bytes": 64 << 30,
    "bandwidth_bytes_per_s": 40e9,
    "flop_per_s": {"bf16": 5e11, "fp32": 4e11},
    "cache_bytes": 32 << 20,
    "units": 2,
}
# Microseconds: of a product by bits a weight, of attention, of a small kernel.
GRID = ((1, 128), (1, 1024), (2, 512), (4, 128), (4, 768))
HELD_OUT = ((1, 400), (2, 900), (3, 300), (3, 700))
DTYPES = {"bf16": 16, "int8": 8, "int4": 4}
KERNELS = {"bf16": "bf16", "int8": "w8a16", "int4": "w4a16"}


def product_us(bits: float, m: int, n: int, k: int) -> float:
    return 5 + n * k * bits / 8 / 40e3 + m * n * k / 5e5


def attention_us(batch: int, context: int) -> float:
    return 20 + 10 * batch + 0.05 * batch * context


def small_us(size: int) -> float:
    return 3 + size / 1e4


def step_us(shape: LoopShape, precision: str, batch: int, context: int) -> float:
    """A step's operations, 10 % more for what lies between them, and 50 µs a layer."""
    linear = sum(product_us(DTYPES[precision], batch, n, k) for n, k in shape.linears.values())
    small = shape.small_bytes
    layer = linear + sum(
        count * small_us(batch * small[name])
        for name, count in (("norm", 2), ("rope and cache", 1), ("activation", 1))
    )
    rest = product_us(16, batch, shape.vocab, shape.hidden)
    rest += small_us(batch * small["embedding"]) + small_us(batch * small["sampling"])
    return 1.1 * (LAYERS * layer + rest) + LAYERS * (1.1 * attention_us(batch, context) + 50)


def timed(us: float) -> Timing:
    return Timing(samples=(us * 1e-6,), cpu=(us * 1e-6,))


def points(noise: Callable[[float], float] = lambda us: us) -> Iterator[Point]:
    """All points of a run over three formats."""
    shape = loop_shape(catalog.load_model(MODEL), LAYERS)
    for precision, dtype in KERNELS.items():
        for batch, context in GRID:
            for n, k in shape.linears.values():
                us = product_us(DTYPES[precision], batch, n, k)
                yield point("gemm", (dtype, batch, n, k, context, 0), timed(noise(us)))
            head = product_us(16, batch, shape.vocab, shape.hidden)
            yield point("gemm", ("bf16", batch, shape.vocab, shape.hidden, context, 0), timed(noise(head)))
            yield point("attention", ("bf16", batch, context, 0), timed(noise(attention_us(batch, context))))
            for name, size in shape.small_bytes.items():
                key = (name, batch, batch * size, context, 0)
                yield point("small", key, timed(noise(small_us(batch * size))))
        for use, places in (("anchor", GRID), ("held out", HELD_OUT)):
            for batch, context in places:
                key = (precision, dtype, "bf16", batch, context, LAYERS, use, 0)
                yield point("step", key, timed(noise(step_us(shape, precision, batch, context))))
    yield point("prefill", (64, "bf16"), timed(500))


def run(model: str = MODEL) -> dict[str, Any]:
    return {
        "started": "2026-11-29T10:00:00Z", "seconds": 100, "model": model, "formats": KERNELS,
        "clock": "wall", "threads": 2, "seed": 0,
    }  # fmt: skip


def data(**hardware: Any) -> dict[str, Any]:
    """The content of a file; `kind="gpu"` makes it one of an H100."""
    more: dict[str, Any] = {}
    if hardware.get("kind") == "gpu":
        own = {"key": "h100-sxm-80gb", "name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85_028_175_872}
        hardware = own | hardware
        more = {"clock": "cuda-graph-events"}
    about = {"software": {"torch": "2.6"}, "run": run() | more, "state": {}, "ceilings": {}, "checks": {}}
    return document(list(points()), catalog.load_model(MODEL), hardware={**HARDWARE, **hardware}, about=about)
