"""e4m3 and power-of-two scales in plain Python arithmetic, one number at a time."""

from __future__ import annotations

import math
import struct

NAN = 0x7F


def float32(value: float) -> float:
    """``value`` rounded to the nearest float32."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def bfloat16_bytes(value: float) -> bytes:
    """The two bytes of a float32 rounded to bfloat16, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def e4m3_value(code: int) -> float:
    """The number that a byte stands for: sign, 4 bits of exponent, 3 of mantissa; no infinity."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == NAN:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e4m3_code(value: float) -> int:
    """The byte nearest to ``value``, ties to even; finite values stop at 448."""
    if not math.isfinite(value):
        return NAN
    size = min(abs(value), 448.0)
    nearest = min(range(NAN), key=lambda code: (abs(e4m3_value(code) - size), code & 1))
    return nearest | (0x80 if math.copysign(1.0, value) < 0 else 0)


def power_of_two_from(value: float) -> float:
    """The smallest power of two that is at least ``value``."""
    mantissa, exponent = math.frexp(value)
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)


def index_key_bytes(key: list[float]) -> tuple[bytes, float]:
    """The e4m3 bytes of one index key and its scale, ``2**ceil(log2(max(amax, 1e-4) / 448))``."""
    amax = max(float32(1e-4), *(abs(value) for value in key))
    scale = power_of_two_from(float32(amax / 448.0))
    return bytes(e4m3_code(value / scale) for value in key), scale


def latent_bytes(latent: list[float]) -> tuple[bytes, list[float]]:
    """The e4m3 bytes of a latent and ``2**ceil(log2(max(amax / 448, 1e-4)))`` for 128 values."""
    codes, scales = b"", []
    for start in range(0, len(latent), 128):
        tile = latent[start : start + 128]
        amax = max(abs(value) for value in tile)
        scale = power_of_two_from(max(float32(amax / 448.0), float32(1e-4)))
        codes += bytes(e4m3_code(value / scale) for value in tile)
        scales.append(scale)
    return codes, scales


def ds_mla_row(latent: list[float], rope: list[float]) -> bytes:
    """One token of ``fp8_ds_mla``: e4m3 latent, float32 scales, bfloat16 rotated key."""
    codes, scales = latent_bytes(latent)
    return (
        codes
        + b"".join(struct.pack("<f", scale) for scale in scales)
        + b"".join(bfloat16_bytes(value) for value in rope)
    )
