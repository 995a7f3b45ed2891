"""``sparse_mqa``, ``sparse_mla`` and ``sparse_mqa_paged`` on FlashMLA's two sparse kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from .. import _options
from .._host import Host
from .._slot_rows import (
    LANE_BYTES,
    Attend,
    SlotRows,
    attend_in_blocks,
    joining_is_wasteful,
    packed_slots,
    padded_width,
    too_many_keys,
)
from .._sparse import check_positions
from ..mla_cache import require_scale_value
from ..sparse_mqa_paged import selected_slots
from ._limits import (
    ARCHITECTURES,
    DECODE_LENGTHS,
    DIMS,
    HEADS,
    MOST_TOKENS,
    NATURAL_LSE_ARGUMENT,
    TOPK_MULTIPLE,
)

PREFILL = "flash_mla.flash_mla_sparse_fwd"
DECODE = "flash_mla.flash_mla_with_kvcache"
SCHEDULE = "flash_mla.get_mla_metadata"


def supports_packed(
    host: Host,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    ks: Tensor,
    scale: float,
    v_dim: int,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> str | None:
    """None where ``sparse_mqa`` is served, else the reason why not."""
    return _refusal(host, q, (v_dim, q.shape[2] - v_dim), kv.shape[0], batch_invariant)


def supports_parts(
    host: Host,
    q_latent: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    indices: Tensor,
    ks: Tensor,
    scale: float,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> str | None:
    """None where ``sparse_mla`` is served, else the reason why not."""
    dims = (q_latent.shape[2], q_pe.shape[2])
    reason = _refusal(host, q_latent, dims, kv_c.shape[0], batch_invariant)
    return reason or joining_is_wasteful(kv_c, indices)


def supports_paged(
    host: Host,
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    block_table: Tensor,
    row_request: Tensor,
    lens: Tensor,
    scale: float,
    v_dim: int,
    layout: str,
    cache_scale: Tensor | None = None,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> str | None:
    """None where ``sparse_mqa_paged`` is served, else the reason why not."""
    dims, keys = (v_dim, q.shape[2] - v_dim), cache.shape[0] * cache.shape[1]
    reason = _refusal(host, q, dims, keys, batch_invariant)
    if reason is not None:
        return reason
    if layout == "fp8" or (layout == "bf16" and cache.dtype != q.dtype):
        return f"no kernel for a cache of {cache.dtype} in the layout {layout}"
    if not cache.is_contiguous():
        return "the pages of the cache must follow each other without a gap"
    return host.lacks(DECODE, SCHEDULE) if layout == "fp8_ds_mla" else None


def sparse_mqa(
    host: Host,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    ks: Tensor,
    scale: float,
    v_dim: int,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """``sparse_mqa`` in bfloat16."""
    check_positions(indices, ks, kv.shape[0])

    def addresses(block: slice) -> Tensor:
        return packed_slots(indices[block], ks[block], kv.shape[0])

    attend = _prefill(host, _with_heads(q), kv, scale, v_dim)
    return _in_blocks(q, indices, kv.shape[0], v_dim, addresses, attend, return_lse)


def sparse_mla(
    host: Host,
    q_latent: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    indices: Tensor,
    ks: Tensor,
    scale: float,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """``sparse_mla`` on joined parts."""
    q, kv = torch.cat([q_latent, q_pe], dim=-1), torch.cat([kv_c, k_pe], dim=-1)
    return sparse_mqa(host, q, kv, indices, ks, scale, kv_c.shape[1], return_lse)


def sparse_mqa_paged(
    host: Host,
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    block_table: Tensor,
    row_request: Tensor,
    lens: Tensor,
    scale: float,
    v_dim: int,
    layout: str,
    cache_scale: Tensor | None = None,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """``sparse_mqa_paged``: the decode kernel for rows of 656 bytes, the prefill kernel for bf16.

    SM100 reads a scale of the 656-byte rows as a power of two, which this package's caches hold.
    """
    require_scale_value(cache_scale)

    def addresses(block: slice) -> Tensor:
        return selected_slots(cache, indices[block], block_table, row_request[block], lens[block])

    filled = _with_heads(q)
    if layout == "fp8_ds_mla":
        attend = _decode(host, filled, cache, scale, v_dim)
    else:
        attend = _prefill(host, filled, cache.flatten(0, 1), scale, v_dim)
    keys = cache.shape[0] * cache.shape[1]
    return _in_blocks(q, indices, keys, v_dim, addresses, attend, return_lse)


def _prefill(host: Host, q: Tensor, kv: Tensor, scale: float, v_dim: int) -> Attend:
    def attend(rows: SlotRows, block: slice) -> tuple[Tensor, Tensor]:
        out, _, lse = host.function(PREFILL)(
            q[block],
            kv[:, None],
            rows.slots[:, None],
            scale,
            d_v=v_dim,
            # Lanes of -1 cost accuracy where they are not cut off (vLLM #36616).
            topk_length=rows.lengths,
        )
        return out, lse

    return attend


def _decode(host: Host, q: Tensor, cache: Tensor, scale: float, v_dim: int) -> Attend:
    lengths = DECODE_LENGTHS[host.architecture(q.device)]

    def attend(rows: SlotRows, block: slice) -> tuple[Tensor, Tensor]:
        # A schedule holds for one set of lengths only, so that none is kept.
        schedule, _ = host.function(SCHEDULE)()
        out, lse = host.function(DECODE)(
            q[block, None],
            cache[:, :, None],
            None,
            None,
            v_dim,
            schedule,
            softmax_scale=scale,
            is_fp8_kvcache=True,
            indices=rows.slots[:, None],
            topk_length=rows.lengths if lengths else None,
        )
        return out[:, 0], lse[:, :, 0]

    return attend


def _in_blocks(
    q: Tensor,
    indices: Tensor,
    keys: int,
    v_dim: int,
    addresses: Callable[[slice], Tensor],
    attend: Attend,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Attend in calls of as many query tokens as a kernel and the workspace budget allow."""
    (tokens, heads), topk = q.shape[:2], indices.shape[1]
    out = q.new_zeros((tokens, heads, v_dim))
    lse = q.new_full((tokens, heads), float("-inf"), dtype=torch.float32)
    width = padded_width(topk, TOPK_MULTIPLE)
    per_token = LANE_BYTES * width + (v_dim + 2) * 4 * max(HEADS)
    step = min(MOST_TOKENS, max(1, _options.current().workspace_bytes // per_token))
    if keys and topk:
        attend_in_blocks(out, lse, width, step, addresses, attend)
    return out, lse if return_lse else lse.new_empty(0)


def _with_heads(q: Tensor) -> Tensor:
    """``q`` [T, N, L + R] with zeros for the heads that a kernel has beyond N."""
    heads = next(count for count in HEADS if count >= q.shape[1])
    return torch.nn.functional.pad(q, (0, 0, 0, heads - q.shape[1])).contiguous()


def _refusal(
    host: Host, q: Tensor, dims: tuple[int, int], keys: int, batch_invariant: bool
) -> str | None:
    if batch_invariant:
        return "FlashMLA does not promise that a row is bit-equal alone and in any batch"
    if not host.available():
        return "there is no CUDA device"
    architecture = host.architecture(q.device)
    if architecture not in ARCHITECTURES:
        return f"FlashMLA has no sparse kernel for sm_{architecture}"
    if q.dtype != torch.bfloat16:
        return f"no kernel for {q.dtype} queries"
    if dims != DIMS:
        return f"no kernel for rows of {dims[0]} + {dims[1]}"
    if q.shape[1] > max(HEADS):
        return f"at most {max(HEADS)} heads, got {q.shape[1]}"
    reason = too_many_keys(keys) or host.lacks(PREFILL)
    if reason is None:
        known = inspect.signature(host.function(PREFILL)).parameters
        if NATURAL_LSE_ARGUMENT not in known:
            reason = "this FlashMLA is older than January 2026 and returns its LSE in base 2"
    return reason
