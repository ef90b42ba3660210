"""Quantization of one number: scales, zero points, codes, errors. Pure functions of numbers.

Every function is keyword-only. Rounding is to the nearest integer, ties to even, as IEEE, NumPy and
torch do it.
"""

from typing import Literal


def levels(*, bits: int) -> int:
    """Codes an integer of `bits` bits has; one fewer steps lie between them.

        2^b

    Holds for: integer formats. Source: flashcard lesson, "Affine quantization".
    Example: 4 bits: 16 codes, 15 steps; 8 bits: 256 codes, 255 steps.
    """
    return 1 << bits


def affine_scale(*, r_min: float, r_max: float, bits: int) -> float:
    """Real units per integer step of a range.

        s = (r_max − r_min) / (2^b − 1)

    Holds for: asymmetric quantization of a range with r_max > r_min. Not for: a constant.
    Source: flashcard lesson, "Affine quantization scale formula".
    Example: −1 to 2 in 4 bits: 3 / 15 = 0.2.
    """
    return (r_max - r_min) / (levels(bits=bits) - 1)


def affine_zero_point(*, r_min: float, scale: float) -> int:
    """The integer that stands for 0.0.

        z = round(−r_min / s)

    Holds for: scale > 0; it is a valid code where the range contains 0.
    Source: flashcard lesson, "Zero-point formula".
    Example: r_min −1, s 0.2: 5.
    """
    return round(-r_min / scale)


def affine_quantize(*, value: float, scale: float, zero_point: int, bits: int) -> int:
    """Code of a value; outliers saturate.

        q = clip(round(r / s) + z, 0, 2^b − 1)

    Holds for: scale > 0. Source: flashcard lesson, "Affine (asymmetric) quantization".
    Example: 0.73 with s 0.2, z 5, 4 bits: round(3.65) + 5 = 9.
    """
    return min(max(round(value / scale) + zero_point, 0), levels(bits=bits) - 1)


def dequantize(*, code: int, scale: float, zero_point: int = 0) -> float:
    """The value a code stands for.

        r̂ = s · (q − z)         (z = 0 when symmetric)

    Holds for: affine and symmetric codes. Source: flashcard lesson, "quantize / dequantize".
    Example: code 9 with s 0.2, z 5: 0.8.
    """
    return scale * (code - zero_point)


def symmetric_max(*, bits: int) -> int:
    """Largest code of a signed symmetric format; the smallest is its negative.

        q_max = 2^(b − 1) − 1

    Holds for: the restricted range that keeps 0 in the middle. Not for: GPTQ's offset-8 codes (−8 to 7).
    Source: serving lesson, "Quantization" (q_min, q_max).
    Example: 8 bits: 127; 4 bits: 7.
    """
    return (1 << (bits - 1)) - 1


def symmetric_scale(*, max_abs: float, bits: int) -> float:
    """Real units per integer step when 0.0 is code 0.

        s = max|x| / q_max

    Holds for: max|x| > 0; usual for weights. Source: serving lesson, "Quantization".
    Example: max|x| 3.5 in 4 bits: 3.5 / 7 = 0.5.
    """
    return max_abs / symmetric_max(bits=bits)


def symmetric_quantize(*, value: float, scale: float, bits: int) -> int:
    """Code of a value under symmetric quantization; outliers saturate.

        q = clip(round(x / s), −q_max, q_max)

    Holds for: scale > 0. Source: serving lesson, "Quantization".
    Example: −1.3 with s 0.5, 4 bits: round(−2.6) = −3.
    """
    largest = symmetric_max(bits=bits)
    return min(max(round(value / scale), -largest), largest)


def max_rounding_error(*, scale: float) -> float:
    """Largest error of a value inside the range.

        s / 2

    Holds for: nearest rounding, no clipping. Source: flashcard lesson, "Why round?".
    Example: s 0.2: 0.1.
    """
    return scale / 2


def step_ratio(*, bits: int, than_bits: int) -> float:
    """How many times larger the step of `bits` is than that of `than_bits` over one range.

        (2^than − 1) / (2^b − 1)

    Holds for: the same range and grouping; error grows with the step, squared error with its square.
    Source: flashcard lesson, "Why is INT4 error much larger than INT8".
    Example: INT4 against INT8: 255 / 15 = 17.
    """
    return (levels(bits=than_bits) - 1) / (levels(bits=bits) - 1)


def float_max(*, exponent_bits: int, mantissa_bits: int, specials: Literal["ieee", "nan", "none"]) -> float:
    """Largest finite value of a small floating-point format.

        2^(e_max) · (2 − 2^(−m))         (one step less where NaN takes the top code)

    `specials`: "ieee" keeps the top exponent for inf and NaN, "nan" only its top mantissa, "none" nothing.
    Holds for: bias 2^(e − 1) − 1. Source: OCP 8-bit and MX format specifications; serving lesson, "FP8".
    Example: E4M3: 448; E5M2: 57,344; E2M1 (FP4): 6.
    """
    top = (1 << exponent_bits) - 1 - ((1 << (exponent_bits - 1)) - 1)
    if specials == "ieee":
        top -= 1
    last = 2 * 2.0**-mantissa_bits if specials == "nan" else 2.0**-mantissa_bits
    return 2.0**top * (2 - last)


def gptq_correction(*, error: float, inverse_hessian_own: float, inverse_hessian_other: float) -> float:
    """What GPTQ adds to a weight not yet quantized to make up for one that was.

        δ_j = −(w_q − quant(w_q)) / [H⁻¹]_qq · [H⁻¹]_qj

    Holds for: one weight of a row, H = 2XXᵀ of the layer's inputs.
    Source: GPTQ paper, arXiv 2210.17323, eq. 2 (Optimal Brain Surgeon).
    Example: error −0.04, H⁻¹ = [[2, −1], [−1, 2]] / 3: −0.02.
    """
    return -error / inverse_hessian_own * inverse_hessian_other


def awq_error_ratio(*, step_before: float, step_after: float, channel_scale: float) -> float:
    """Error of a salient weight after AWQ multiplied its channel, as a share of the error before.

        (Δ' / Δ) / s

    The activation is divided by the same s, so the product is unchanged and the rounding error shrinks.
    Holds for: the expected rounding error. Source: AWQ paper, arXiv 2306.00978, section 3.2.
    Example: the group's largest weight is another, Δ' = Δ, s = 2: 0.5.
    """
    return step_after / step_before / channel_scale
