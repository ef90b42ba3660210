"""Topics on quantization: scales, errors, formats, and where lower precision speeds up."""

from typing import Final

from capplan import catalog
from capplan.formulas import memory, quantization, roofline
from capplan.topics.topic import Line, Topic, topic

# The lesson's A100: 2.0 TB/s, 312 TFLOP/s dense in fp16; the matrix is a 70B model's up projection.
A100_BYTES_PER_S: Final = 2.0e12
A100_FLOP_PER_S: Final = 312e12
WIDE: Final = {"n": 28672, "k": 8192}


def _zero_point() -> tuple[Line, ...]:
    scale = quantization.affine_scale(r_min=-1, r_max=2, bits=4)
    zero = quantization.affine_zero_point(r_min=-1, scale=scale)
    back = quantization.dequantize(code=zero, scale=scale, zero_point=zero)
    return (
        Line("−1 to 2 in 4 bits", zero, "code"),
        Line("the value that code stands for", back, "1"),
    )


def _affine() -> tuple[Line, ...]:
    scale = quantization.affine_scale(r_min=-1, r_max=2, bits=4)
    zero = quantization.affine_zero_point(r_min=-1, scale=scale)

    def code(value: float) -> int:
        return quantization.affine_quantize(value=value, scale=scale, zero_point=zero, bits=4)

    return (
        Line("0.73 in a range of −1 to 2, 4 bits", code(0.73), "code"),
        Line("read back", quantization.dequantize(code=code(0.73), scale=scale, zero_point=zero), "1"),
        Line(
            "largest error inside the range: half a step", quantization.max_rounding_error(scale=scale), "1"
        ),
        Line("an outlier of 9 saturates", code(9), "code"),
    )


def _symmetric() -> tuple[Line, ...]:
    scale = quantization.symmetric_scale(max_abs=3.5, bits=4)
    code = quantization.symmetric_quantize(value=-1.3, scale=scale, bits=4)
    return (
        Line("largest code of 4 bits", quantization.symmetric_max(bits=4), "code"),
        Line("largest code of 8 bits", quantization.symmetric_max(bits=8), "code"),
        Line("scale of weights up to 3.5 in 4 bits", scale, "1"),
        Line("−1.3", code, "code"),
        Line("read back", quantization.dequantize(code=code, scale=scale), "1"),
    )


def _step() -> tuple[Line, ...]:
    ratio = quantization.step_ratio(bits=4, than_bits=8)
    return (
        Line("steps of INT4", quantization.levels(bits=4) - 1, "step"),
        Line("steps of INT8", quantization.levels(bits=8) - 1, "step"),
        Line("step of INT4 against INT8", ratio, "1"),
        Line("squared error of INT4 against INT8", ratio**2, "1"),
    )


def _fp8() -> tuple[Line, ...]:
    h100 = catalog.load_gpu("h100-sxm-80gb").flop_per_s
    ada = catalog.load_gpu("rtx-4090-24gb").flop_per_s
    halved = memory.weight_bytes(parameters=7e9, bits=16) / memory.weight_bytes(parameters=7e9, bits=8)
    return (
        Line("largest E4M3", quantization.float_max(exponent_bits=4, mantissa_bits=3, specials="nan"), "1"),
        Line("largest E5M2", quantization.float_max(exponent_bits=5, mantissa_bits=2, specials="ieee"), "1"),
        Line(
            "largest E2M1 (FP4)",
            quantization.float_max(exponent_bits=2, mantissa_bits=1, specials="none"),
            "1",
        ),
        Line("memory of fp16 against fp8", halved, "1"),
        Line("dense peak of an H100 in fp8 against fp16", h100["fp8"] / h100["fp16"], "1"),
        Line("the same on an RTX 4090", ada["fp8"] / ada["fp16"], "1"),
    )


def _gptq_awq() -> tuple[Line, ...]:
    return (
        Line(
            "GPTQ: a weight rounded up by 0.04 moves its neighbour by",
            quantization.gptq_correction(
                error=-0.04, inverse_hessian_own=2 / 3, inverse_hessian_other=-1 / 3
            ),
            "1",
        ),
        Line(
            "AWQ: a salient channel scaled by 2 keeps of its error",
            quantization.awq_error_ratio(step_before=1, step_after=1, channel_scale=2),
            "1",
        ),
        Line(
            "AWQ: the same where it sets the group's maximum, step 1.25 times",
            quantization.awq_error_ratio(step_before=1, step_after=1.25, channel_scale=2),
            "1",
        ),
        Line("stored by GPTQ, g128", catalog.load_format("gptq").effective_bits, "bit"),
        Line("stored by AWQ, g128", catalog.load_format("awq").effective_bits, "bit"),
    )


def _w4a16() -> tuple[Line, ...]:
    lines = []
    seconds = []
    for name, bits in (("16 bits", 16.0), ("4 bits", 4.0), ("4 bits with scales and zeros", 4.15625)):
        size = memory.weight_bytes(parameters=70e9, bits=bits)
        seconds.append(roofline.bandwidth_bound_s(bytes_moved=size, bytes_per_s=A100_BYTES_PER_S))
        lines.append(Line(f"70B weights in {name}", size, "B"))
        lines.append(Line(f"read once at 2.0 TB/s in {name}", seconds[-1], "s"))
    return (*lines, Line("decode at batch 1, at best", seconds[0] / seconds[-1], "1"))


def _weight_only() -> tuple[Line, ...]:
    def speed_up(m: int) -> float:
        times = [
            roofline.bound_s(
                flop=roofline.gemm_flop(m=m, **WIDE),
                bytes_moved=roofline.gemm_bytes(m=m, **WIDE, weight_bits=bits),
                flop_per_s=A100_FLOP_PER_S,
                bytes_per_s=A100_BYTES_PER_S,
            )
            for bits in (16, 4)
        ]
        return times[0] / times[1]

    return (
        Line("INT4 against fp16 weights, 1 token (decode), at best", speed_up(1), "1"),
        Line("64 tokens (decode, 64 users)", speed_up(64), "1"),
        Line("4,096 tokens (prefill)", speed_up(4096), "1"),
    )


QUANTIZATION: Final[tuple[Topic, ...]] = (
    topic(
        "affine-scale",
        "Scale of affine quantization",
        (quantization.affine_scale,),
        lambda: (
            Line("−1 to 2 in 4 bits", quantization.affine_scale(r_min=-1, r_max=2, bits=4), "1"),
            Line("−1 to 2 in 8 bits", quantization.affine_scale(r_min=-1, r_max=2, bits=8), "1"),
        ),
        aliases=("scale", "quantization-scale"),
    ),
    topic(
        "zero-point",
        "Zero point of affine quantization",
        (quantization.affine_zero_point, quantization.dequantize),
        _zero_point,
        aliases=("zero",),
    ),
    topic(
        "affine-quantization",
        "A value to its code and back",
        (quantization.affine_quantize, quantization.dequantize, quantization.max_rounding_error),
        _affine,
        aliases=("quantize", "dequantize", "asymmetric", "rounding", "clipping"),
    ),
    topic(
        "symmetric-quantization",
        "Quantization around zero",
        (quantization.symmetric_scale, quantization.symmetric_quantize, quantization.symmetric_max),
        _symmetric,
        aliases=("symmetric", "symmetric-scale", "absmax"),
    ),
    topic(
        "int4-int8-step",
        "Why INT4 errs so much more than INT8",
        (quantization.step_ratio, quantization.levels),
        _step,
        aliases=("step-ratio", "int4-error", "levels", "quantization-accuracy"),
    ),
    topic(
        "fp8",
        "FP8: range, memory, peak",
        (quantization.float_max, memory.weight_bytes),
        _fp8,
        aliases=("e4m3", "e5m2", "float8", "fp4", "float-max"),
        command="vram --precision fp8",
    ),
    topic(
        "gptq-vs-awq",
        "GPTQ corrects errors, AWQ protects salient channels",
        (quantization.gptq_correction, quantization.awq_error_ratio),
        _gptq_awq,
        aliases=("gptq", "awq", "awq-vs-gptq", "hessian", "salient-weights"),
        command="vram --precision awq",
    ),
    topic(
        "w4a16",
        "W4A16: weights in INT4, activations in FP16",
        (memory.weight_bytes, roofline.bandwidth_bound_s),
        _w4a16,
        holds="weights read in 4 bits; the arithmetic stays in 16.",
        aliases=("weight-only", "int4-decode"),
        command="vram --precision int4",
    ),
    topic(
        "weight-only-prefill",
        "Why weight-only INT4 helps decode and not prefill",
        (roofline.bound_s, roofline.gemm_bytes, roofline.gemm_flop),
        _weight_only,
        holds="an A100 and a 70B model's up projection; unpacking comes on top, so prefill gets slower.",
        aliases=("int4-prefill", "dequantization-overhead", "quantization-speed"),
    ),
)
