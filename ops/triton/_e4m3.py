"""float8_e4m3fn and powers of two by their bits, the same on every architecture.

Integers round here, not conversion instructions: those exist from sm_89 up only, differ beyond 448,
and are wrong in Triton's interpreter. The caches hold bytes, so that nothing else needs fp8.
"""

from __future__ import annotations

import triton
import triton.language as tl

FP8_MAX = tl.constexpr(448.0)
# Bits of float32: 448, 2**-6 (the smallest normal e4m3), 2**14, infinity and a NaN.
_MAX_BITS = tl.constexpr(0x43E00000)
_NORMAL_BITS = tl.constexpr(0x3C800000)
_SPACER_BITS = tl.constexpr(0x46800000)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_NAN_BITS = tl.constexpr(0x7FC00000)
_MANTISSA = tl.constexpr(0x7FFFFF)
# What the exponent of float32 has more than that of e4m3, seen from the bit that e4m3 keeps last.
_REBIAS = tl.constexpr(960)
_NAN_CODE = tl.constexpr(0x7F)


@triton.jit
def e4m3_codes(x):
    """Bytes of float32 ``x``, rounded to even: finite values stop at +-448, others become NaN."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    size = tl.minimum(magnitude, _MAX_BITS)
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - _REBIAS
    # The last bit of a float32 near 2**14 is worth 2**-9, the step of subnormal e4m3.
    spaced = size.to(tl.float32, bitcast=True) + 16384.0
    subnormal = spaced.to(tl.int32, bitcast=True) - _SPACER_BITS
    code = tl.where(size < _NORMAL_BITS, subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where(magnitude < _INFINITY_BITS, code, _NAN_CODE).to(tl.uint8)


@triton.jit
def e4m3_values(codes):
    """float32 values of the bytes ``codes``."""
    bits = codes.to(tl.int32)
    size = bits & 0x7F
    subnormal = (size.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
    magnitude = tl.where(size < 8, subnormal, (size + _REBIAS) << 20)
    magnitude = tl.where(size == _NAN_CODE, _NAN_BITS, magnitude)
    return (magnitude | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def finite_sizes(x):
    """Magnitudes of float32 ``x``, 0 for infinities and NaN."""
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(magnitude < _INFINITY_BITS, magnitude, 0).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two_above(x):
    """``2**ceil(log2(x))`` of positive normal float32 numbers, see ``cache_layouts``."""
    bits = (x.to(tl.int32, bitcast=True) + _MANTISSA) & _INFINITY_BITS
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def inverse_power_of_two(x):
    """``1 / x`` of powers of two between 2**-126 and 2**126, exactly."""
    # The bits of 2**e and of 2**-e have this sum.
    return (0x7F000000 - x.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def exponent_bytes(scale):
    """int32 that holds the ue8m0 byte of a power of two four times."""
    return (scale.to(tl.int32, bitcast=True) >> 23) * 0x01010101


@triton.jit
def exponent_value(stored):
    """float32 that the lowest ue8m0 byte of an int32 stands for."""
    exponent = stored & 0xFF
    bits = tl.where(exponent == 0, 0x400000, exponent << 23)
    bits = tl.where(exponent == 0xFF, _NAN_BITS, bits)
    return bits.to(tl.float32, bitcast=True)
