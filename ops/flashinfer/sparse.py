"""``sparse_mqa``, ``sparse_mla`` and ``sparse_mqa_paged`` on FlashInfer's sparse MLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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
    without_empty_rows,
)
from .._sparse import check_positions
from ..mla_cache import require_scale_value
from ..sparse_mqa_paged import selected_slots
from . import _sparse_sm90, _sparse_sm100, _sparse_sm120
from ._limits import (
    LSE_QUERY_TILE,
    LSE_SLOT_BYTES,
    MOST_HEADS,
    MOST_TOKENS,
    SM100_GAP,
    SM100_PAGES,
    SM120_DECODE_TOKENS,
    SM120_HEADS,
    SM120_OLD_PAGE,
    SM120_OLD_PREFILL_TOPK,
    SM120_OLD_TOPKS,
    SPARSE_BACKENDS,
    SPARSE_DIMS,
    SPARSE_DTYPES,
    SPARSE_LAYOUTS,
    SPARSE_TOPK_MULTIPLE,
)
from ._probe import unavailable

_INVARIANT = "FlashInfer does not promise that a row is bit-equal alone and in any batch"


class Shape(NamedTuple):
    """What decides whether and how a call is served."""

    tokens: int
    heads: int
    topk: int
    latent: int
    rope: int
    dtype: torch.dtype
    device: torch.device


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
    if batch_invariant:
        return _INVARIANT
    shape = _shape(q, indices, v_dim, q.shape[2] - v_dim)
    return _refusal(host, shape, "bf16") or too_many_keys(kv.shape[0])


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
    if batch_invariant:
        return _INVARIANT
    shape = _shape(q_latent, indices, q_latent.shape[2], q_pe.shape[2])
    reason = _refusal(host, shape, "bf16") or too_many_keys(kv_c.shape[0])
    if reason is None and not _takes_parts(host, shape):
        reason = joining_is_wasteful(kv_c, indices)
    return reason


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
    if batch_invariant:
        return _INVARIANT
    shape = _shape(q, indices, v_dim, q.shape[2] - v_dim)
    reason = _refusal(host, shape, layout) or too_many_keys(cache.shape[0] * cache.shape[1])
    if reason is not None:
        return reason
    if layout == "bf16" and cache.dtype != q.dtype:
        return f"the cache must have the dtype of q, {q.dtype}, got {cache.dtype}"
    if not cache.is_contiguous():
        return "the pages of the cache must follow each other without a gap"
    architecture, page = host.architecture(q.device), cache.shape[1]
    if architecture == 100 and page not in SM100_PAGES:
        return f"trtllm-gen has pages of {' or '.join(map(str, SM100_PAGES))} tokens, got {page}"
    if architecture == 120 and not _sparse_sm120.has_wrapper(host) and page != SM120_OLD_PAGE:
        return f"this version has pages of {SM120_OLD_PAGE} tokens on SM120, got {page}"
    return None


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
    """``sparse_mqa`` over packed rows [S, L + R]."""
    check_positions(indices, ks, kv.shape[0])
    shape = _shape(q, indices, v_dim, q.shape[2] - v_dim)
    attend = _over_rows(host, q, kv, scale, v_dim, return_lse)

    def addresses(block: slice) -> Tensor:
        return packed_slots(indices[block], ks[block], kv.shape[0])

    return _in_blocks(host, shape, kv.shape[0], addresses, attend, q, return_lse)


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
    """``sparse_mla``: SM90 takes the parts as they are, for the others they are joined."""
    shape = _shape(q_latent, indices, q_latent.shape[2], q_pe.shape[2])
    if not _takes_parts(host, shape):
        q, kv = torch.cat([q_latent, q_pe], dim=-1), torch.cat([kv_c, k_pe], dim=-1)
        return sparse_mqa(host, q, kv, indices, ks, scale, shape.latent, return_lse)
    check_positions(indices, ks, kv_c.shape[0])

    def addresses(block: slice) -> Tensor:
        return packed_slots(indices[block], ks[block], kv_c.shape[0])

    def attend(rows: SlotRows, block: slice) -> tuple[Tensor, Tensor | None]:
        queries = (q_latent[block], q_pe[block])
        return _sparse_sm90.attend(host, queries, (kv_c, k_pe), rows, scale, return_lse)

    return _in_blocks(host, shape, kv_c.shape[0], addresses, attend, q_latent, return_lse)


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
    """``sparse_mqa_paged``: bf16 pages on SM90 and SM100, rows of 656 bytes on SM120."""
    require_scale_value(cache_scale)
    shape = _shape(q, indices, v_dim, q.shape[2] - v_dim)

    def addresses(block: slice) -> Tensor:
        return selected_slots(cache, indices[block], block_table, row_request[block], lens[block])

    if layout == "fp8_ds_mla":
        attend = _over_packed_bytes(host, q, cache, scale, v_dim, return_lse)
    elif host.architecture(q.device) == 90:
        attend = _over_rows(host, q, cache.flatten(0, 1), scale, v_dim, return_lse)
    else:
        attend = _over_pages(host, q, cache, scale, v_dim, return_lse)
    capacity = cache.shape[0] * cache.shape[1]
    return _in_blocks(host, shape, capacity, addresses, attend, q, return_lse)


def _over_rows(host: Host, q: Tensor, kv: Tensor, scale: float, v_dim: int, lse: bool) -> Attend:
    """Attention over [S, L + R] rows in the dtype of ``q``, on SM90 and SM100."""
    if host.architecture(q.device) == 90:

        def attend(rows: SlotRows, block: slice) -> tuple[Tensor, Tensor | None]:
            queries = (q[block, :, :v_dim], q[block, :, v_dim:])
            keys = (kv[:, :v_dim], kv[:, v_dim:])
            return _sparse_sm90.attend(host, queries, keys, rows, scale, lse)

        return attend
    return _over_pages(host, q, _sparse_sm100.as_pages(kv), scale, v_dim, lse)


def _over_pages(
    host: Host, q: Tensor, pages: Tensor, scale: float, v_dim: int, lse: bool
) -> Attend:
    return lambda rows, block: _sparse_sm100.attend(host, q[block], pages, rows, scale, v_dim, lse)


def _over_packed_bytes(
    host: Host, q: Tensor, cache: Tensor, scale: float, v_dim: int, lse: bool
) -> Attend:
    return lambda rows, block: _sparse_sm120.attend(host, q[block], cache, rows, scale, v_dim, lse)


def _in_blocks(
    host: Host,
    shape: Shape,
    keys: int,
    addresses: Callable[[slice], Tensor],
    attend: Attend,
    q: Tensor,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Attend in calls of as many query tokens as a kernel and the workspace budget allow."""
    out = q.new_zeros((shape.tokens, shape.heads, shape.latent))
    lse_shape = (shape.tokens, shape.heads) if return_lse else (0,)
    lse = q.new_full(lse_shape, float("-inf"), dtype=torch.float32)
    if keys == 0 or shape.topk == 0:
        return out, lse
    width = _width(host, shape)
    step = _tokens_of_a_call(host, shape, width, return_lse)

    def attend_all(rows: SlotRows, block: slice) -> tuple[Tensor, Tensor | None]:
        return attend(without_empty_rows(rows), block)

    attend_in_blocks(out, lse, width, step, addresses, attend_all)
    return out, lse


def _tokens_of_a_call(host: Host, shape: Shape, width: int, lse: bool) -> int:
    architecture = host.architecture(shape.device)
    if architecture == 120 and not _has_sm120_prefill(host, shape, width):
        return SM120_DECODE_TOKENS
    per_token = LANE_BYTES * width
    if architecture == 100 and lse:
        per_token += LSE_SLOT_BYTES * LSE_QUERY_TILE * shape.heads
    return min(MOST_TOKENS, max(1, _options.current().workspace_bytes // per_token))


def _has_sm120_prefill(host: Host, shape: Shape, width: int) -> bool:
    if _sparse_sm120.has_wrapper(host):
        return shape.heads in SM120_HEADS
    return width == SM120_OLD_PREFILL_TOPK


def _width(host: Host, shape: Shape) -> int:
    architecture = host.architecture(shape.device)
    if architecture == 120 and not _sparse_sm120.has_wrapper(host):
        return min(topk for topk in SM120_OLD_TOPKS if topk >= shape.topk)
    return padded_width(shape.topk, SPARSE_TOPK_MULTIPLE[architecture])


def _shape(q: Tensor, indices: Tensor, latent: int, rope: int) -> Shape:
    tokens, heads = q.shape[:2]
    return Shape(tokens, heads, indices.shape[1], latent, rope, q.dtype, q.device)


def _takes_parts(host: Host, shape: Shape) -> bool:
    return host.architecture(shape.device) == 90


def _refusal(host: Host, shape: Shape, layout: str) -> str | None:
    """What all three ops may not be asked for, cheapest question first."""
    reason = unavailable(host)
    if reason is not None:
        return reason
    architecture = host.architecture(shape.device)
    if architecture not in SPARSE_BACKENDS:
        return f"FlashInfer has no sparse MLA for sm_{architecture}"
    if shape.dtype not in SPARSE_DTYPES[architecture]:
        return f"no kernel for {shape.dtype} queries on sm_{architecture}"
    if layout != SPARSE_LAYOUTS[architecture]:
        wanted = SPARSE_LAYOUTS[architecture]
        return f"keys must be stored as {wanted} on sm_{architecture}, got {layout}"
    if (shape.latent, shape.rope) not in SPARSE_DIMS[architecture]:
        return f"no kernel for rows of {shape.latent} + {shape.rope} on sm_{architecture}"
    if shape.heads > MOST_HEADS:
        return f"at most {MOST_HEADS} heads, got {shape.heads}"
    if architecture == 90:
        if host.capturing():
            return "its plan copies lengths to the host, which a CUDA graph cannot record"
        metadata = (_sparse_sm90.METADATA,) if _sparse_sm90.has_metadata(host) else ()
        return host.lacks(_sparse_sm90.WRAPPER, *metadata)
    if architecture == 100:
        low, high = SM100_GAP
        if low < shape.heads < high:
            return f"trtllm-gen has no kernel for {shape.heads} heads, between {low} and {high}"
        return host.lacks(_sparse_sm100.CALL)
    return _refusal_sm120(host, shape)


def _refusal_sm120(host: Host, shape: Shape) -> str | None:
    if host.capturing():
        return "its scratch memory must be there, at its full size, before a CUDA graph is recorded"
    if _sparse_sm120.has_wrapper(host):
        return host.lacks(_sparse_sm120.WRAPPER)
    if shape.heads not in SM120_HEADS or shape.topk > max(SM120_OLD_TOPKS):
        return f"this version has no kernel for {shape.heads} heads and top-k {shape.topk} on SM120"
    return host.lacks(_sparse_sm100.CALL)
