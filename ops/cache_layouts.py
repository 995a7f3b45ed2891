"""What the caches hold, byte by byte: layouts, scales, and quantisation in both directions.

A cache is a tensor [num_blocks, block_size, width]. A block is contiguous; blocks may lie apart,
as in one layer's view of an allocation that all layers share.

The MLA cache, one row a token, L = kv_lora_rank and R = qk_rope_head_dim:

========== ============ =============================================================
layout     width        a token's row
========== ============ =============================================================
bf16       L + R        [kv_c | k_pe] in the cache's own floating dtype
fp8        L + R bytes  [kv_c | k_pe] as e4m3 of ``value / scale``, one scale for all
fp8_ds_mla L + L/32     bytes [0, L) kv_c as e4m3; then L/128 float32 scales, one for 128
           + 2R bytes   values; then k_pe as R bfloat16. 656 bytes for 512 and 64
========== ============ =============================================================

The index cache, D = index head dim, is planar in a block: ``block_size * D`` bytes of e4m3 keys,
token after token, then ``block_size * 4`` bytes of scales; 132 bytes a token for D = 128. A scale
is a float32, or its exponent byte (ue8m0) four times.

Sources: vLLM 0.33 ``fused_norm_rope`` (models/deepseek_v32/common/kernels.py) for the writers, and
the FP8 caches of FlashMLA (656 bytes) and DeepGEMM (132 bytes) for the readers. All numbers are
little-endian.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import FLOATING, require_dtype, require_positive, require_rank, require_same_device

LAYOUTS = ("bf16", "fp8", "fp8_ds_mla")
SCALE_STORES = ("fp32", "ue8m0")
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FLOOR = 1e-4
TILE = 128
SCALE_BYTES = 4

_ROPE_BYTES = 2
_MANTISSA = 0x7FFFFF


class MlaFields(NamedTuple):
    """Where the parts of a token stand in its row, in elements of the cache's dtype."""

    latent: slice
    scales: slice
    rope: slice


def mla_cache_shape(
    num_blocks: int,
    block_size: int,
    layout: str,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
) -> tuple[int, int, int]:
    """Shape of an MLA cache: [num_blocks, block_size, width].

    Raises:
        ValueError: an unknown layout, a size below 1, or ``fp8_ds_mla`` with a ``kv_lora_rank``
            that is not a multiple of 128.
    """
    for name, size in (("num_blocks", num_blocks), ("block_size", block_size)):
        require_positive(name, size)
    fields = mla_fields(layout, kv_lora_rank, qk_rope_head_dim)
    return num_blocks, block_size, fields.rope.stop


def index_cache_shape(
    num_blocks: int, block_size: int, index_head_dim: int = 128
) -> tuple[int, int, int]:
    """Shape of an index cache: [num_blocks, block_size, index_head_dim + 4].

    Raises:
        ValueError: a size below 1, or an ``index_head_dim`` above 128, which needs more scales.
    """
    for name, size in (("num_blocks", num_blocks), ("block_size", block_size)):
        require_positive(name, size)
    _require_index_head_dim(index_head_dim)
    return num_blocks, block_size, index_head_dim + SCALE_BYTES


def new_mla_cache(
    num_blocks: int,
    block_size: int,
    layout: str,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> Tensor:
    """An MLA cache of zeros; ``dtype`` is that of the layout ``bf16``, the others hold uint8.

    Raises:
        ValueError: see ``mla_cache_shape``.
        TypeError: ``dtype`` is not floating point.
    """
    shape = mla_cache_shape(num_blocks, block_size, layout, kv_lora_rank, qk_rope_head_dim)
    cache = torch.zeros(shape, dtype=dtype if layout == "bf16" else torch.uint8, device=device)
    _require_mla_dtype(cache, layout)
    return cache


def new_index_cache(
    num_blocks: int,
    block_size: int,
    index_head_dim: int = 128,
    device: torch.device | str | None = None,
) -> Tensor:
    """An index cache of zeros, uint8.

    Raises:
        ValueError: see ``index_cache_shape``.
    """
    shape = index_cache_shape(num_blocks, block_size, index_head_dim)
    return torch.zeros(shape, dtype=torch.uint8, device=device)


def mla_fields(layout: str, kv_lora_rank: int, qk_rope_head_dim: int) -> MlaFields:
    """Offsets of a token's parts; ``rope.stop`` is the width of its row.

    Raises:
        ValueError: an unknown layout, a size below 1, or ``fp8_ds_mla`` with a ``kv_lora_rank``
            that is not a multiple of 128.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    require_positive("kv_lora_rank", kv_lora_rank)
    require_positive("qk_rope_head_dim", qk_rope_head_dim)
    end = kv_lora_rank
    if layout == "fp8_ds_mla":
        if kv_lora_rank % TILE:
            raise ValueError(
                f"kv_lora_rank must be a multiple of {TILE} for fp8_ds_mla, got {kv_lora_rank}"
            )
        end += kv_lora_rank // TILE * SCALE_BYTES
    width = end + qk_rope_head_dim * (_ROPE_BYTES if layout == "fp8_ds_mla" else 1)
    return MlaFields(slice(0, kv_lora_rank), slice(kv_lora_rank, end), slice(end, width))


def mla_rope_dim(layout: str, width: int, kv_lora_rank: int) -> int:
    """The qk_rope_head_dim of a cache whose rows have ``width`` elements.

    Raises:
        ValueError: no row of this layout with this ``kv_lora_rank`` has that width.
    """
    narrowest = mla_fields(layout, kv_lora_rank, 1).rope
    step = narrowest.stop - narrowest.start
    rest = width - narrowest.start
    if rest < step or rest % step:
        raise ValueError(
            f"cache has rows of {width} elements, which the layout {layout} does not have with a"
            f" kv_lora_rank of {kv_lora_rank}"
        )
    rope_dim: int = rest // step
    return rope_dim


def index_planes(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of an index cache: keys [num_blocks, block_size, D] and scales [..., 4], both uint8."""
    blocks, block_size, width = cache.shape
    planes = cache.view(blocks, block_size * width)
    keys = planes[:, : block_size * (width - SCALE_BYTES)]
    scales = planes[:, block_size * (width - SCALE_BYTES) :]
    return (
        keys.unflatten(1, (block_size, width - SCALE_BYTES)),
        scales.unflatten(1, (block_size, SCALE_BYTES)),
    )


def quantise_index_key(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 of [..., D] with one scale for the last dimension, as the index key has it.

    The scale is ``2**ceil(log2(max(amax, 1e-4) / 448))``, exactly a power of two, where amax is
    taken over the finite values in float32. An infinity or NaN is stored as NaN and leaves the
    scale alone; zeros are stored as zeros.

    Returns:
        values [..., D] float8_e4m3fn and scales [...] float32; ``values * scales`` is ``x``
        rounded.
    """
    x = x.float()
    scale = power_of_two_above(_finite_amax(x).clamp(min=FLOOR) / FP8_MAX)
    return to_fp8(x / scale[..., None]), scale


def quantise_latent(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 of [..., L] with one scale for 128 values, as ``fp8_ds_mla`` has it.

    The scale is ``2**ceil(log2(max(amax / 448, 1e-4)))``: here the floor is one of the scale. For
    the rest see ``quantise_index_key``.

    Returns:
        values [..., L] float8_e4m3fn and scales [..., L / 128] float32.
    """
    tiles = x.float().unflatten(-1, (-1, TILE))
    scales = power_of_two_above((_finite_amax(tiles) / FP8_MAX).clamp(min=FLOOR))
    return to_fp8(tiles / scales[..., None]).flatten(-2), scales


def power_of_two_above(x: Tensor) -> Tensor:
    """``2**ceil(log2(x))`` of positive normal float32 numbers, exact where a logarithm is not."""
    return ((x.view(torch.int32) + _MANTISSA) & ~_MANTISSA).view(torch.float32)


def to_fp8(x: Tensor) -> Tensor:
    """e4m3 of ``x``, rounded to even: finite values stop at +-448; infinities and NaN become NaN.

    A cast alone differs between torch releases beyond 448.
    """
    finite = x.clamp(-FP8_MAX, FP8_MAX)
    return torch.where(x.isfinite(), finite, torch.nan).to(FP8)


def encode_scale(scale: Tensor, scale_store: str) -> Tensor:
    """Bytes [..., 4] of float32 powers of two [...]: the float32, or four equal ue8m0 bytes."""
    if scale_store == "fp32":
        return scale[..., None].contiguous().view(torch.uint8)
    exponent = scale.to(torch.float8_e8m0fnu).view(torch.uint8)
    return exponent[..., None].expand(*scale.shape, SCALE_BYTES)


def decode_scale(stored: Tensor, scale_store: str) -> Tensor:
    """float32 [...] of stored bytes [..., 4]."""
    if scale_store == "fp32":
        return stored.contiguous().view(torch.float32).squeeze(-1)
    return stored[..., 0].contiguous().view(torch.float8_e8m0fnu).float()


def require_mla_cache(
    cache: Tensor, layout: str, kv_lora_rank: int, qk_rope_head_dim: int, scale: Tensor | None
) -> None:
    """Check an MLA cache and the scale that its layout takes.

    Raises:
        ValueError: a wrong rank, width or stride, an unknown layout, a scale that is missing, not
            wanted, or has more than one element, or two devices.
        TypeError: a dtype that the layout does not have.
    """
    width = mla_fields(layout, kv_lora_rank, qk_rope_head_dim).rope.stop
    _require_blocks(cache)
    _require_mla_dtype(cache, layout)
    if cache.shape[2] != width:
        raise ValueError(
            f"cache must have {width} in dimension 2 (the layout {layout} with {kv_lora_rank} and"
            f" {qk_rope_head_dim}), got shape {tuple(cache.shape)}"
        )
    if (scale is not None) != (layout == "fp8"):
        wants = "one scale" if layout == "fp8" else "no scale"
        raise ValueError(f"scale: the layout {layout} takes {wants}")
    if scale is not None:
        require_dtype("scale", scale, (torch.float32,))
        require_same_device(cache=cache, scale=scale)
        if scale.numel() != 1:
            raise ValueError(f"scale must have one element, got shape {tuple(scale.shape)}")


def require_index_cache(cache: Tensor, index_head_dim: int, scale_store: str) -> None:
    """Check an index cache.

    Raises:
        ValueError: a wrong rank, width or stride, or an unknown ``scale_store``.
        TypeError: the cache is not uint8.
    """
    if scale_store not in SCALE_STORES:
        raise ValueError(
            f"scale_store must be one of {', '.join(SCALE_STORES)}, got {scale_store!r}"
        )
    _require_blocks(cache)
    require_dtype("cache", cache, (torch.uint8,))
    _require_index_head_dim(index_head_dim)
    if cache.shape[2] != index_head_dim + SCALE_BYTES:
        raise ValueError(
            f"cache must have {index_head_dim + SCALE_BYTES} in dimension 2 (a key of"
            f" {index_head_dim} and its scale), got shape {tuple(cache.shape)}"
        )


def _finite_amax(x: Tensor) -> Tensor:
    size = x.abs()
    return torch.where(size.isfinite(), size, 0.0).amax(-1)


def _require_blocks(cache: Tensor) -> None:
    require_rank("cache", cache, 3)
    blocks, block_size, width = cache.shape
    require_positive("the block size of cache", block_size)
    inner = cache.stride(2) == 1 and (block_size == 1 or cache.stride(1) == width)
    if not inner or (blocks > 1 and cache.stride(0) < block_size * width):
        raise ValueError(
            "cache must be contiguous in a block and its blocks must not overlap, got strides"
            f" {tuple(cache.stride())} for shape {tuple(cache.shape)}"
        )
    if cache.requires_grad:
        raise ValueError("cache must not require a gradient: a cache keeps none")


def _require_mla_dtype(cache: Tensor, layout: str) -> None:
    accepted = {"bf16": FLOATING, "fp8": (torch.uint8, FP8), "fp8_ds_mla": (torch.uint8,)}
    require_dtype("cache", cache, accepted[layout])


def _require_index_head_dim(index_head_dim: int) -> None:
    if not 1 <= index_head_dim <= TILE:
        raise ValueError(f"index_head_dim must be 1 to {TILE}, got {index_head_dim}")
