"""Requests of equal length as packed rows: how a model with a batch dim calls the ops."""

from __future__ import annotations

import torch
from torch import Tensor

from .index_select import index_select
from .mla_attention import mla_attention
from .norm import layer_norm, rms_norm
from .rope import rope


def causal_intervals(kv_positions: Tensor, q_positions: Tensor) -> Tensor:
    """What ``kv_positions <= q_positions`` says, as intervals.

    Args:
        kv_positions: [1, 1, 1, keys], 0, 1, ...
        q_positions: [B or 1, 1, S, 1] integers, the last key that each query token sees.

    Returns:
        [B or 1, S, 2] int32, start and end of the visible keys of the request.
    """
    end = q_positions[:, 0, :, 0].clamp(-1, kv_positions.shape[-1] - 1) + 1
    return torch.stack((torch.zeros_like(end), end), dim=-1).to(torch.int32)


def visible(mask: Tensor) -> Tensor:
    """A user's mask as bool, True = visible; in an additive one, what is above half its minimum.

    Raises:
        TypeError: the mask is neither bool nor floating point.
    """
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise TypeError(
            f"a prepared attention mask must be bool or floating point, got {mask.dtype}"
        )
    return mask > torch.finfo(mask.dtype).min / 2


def is_interval(visibility: Tensor) -> bool:
    """Whether ``visibility`` holds intervals, int32 [..., 2], and is no mask."""
    return visibility.dtype == torch.int32 and visibility.shape[-1] == 2


def packed_rows(visibility: Tensor, batch: int, rows: int, keys: int) -> tuple[Tensor, Tensor]:
    """``ks, ke`` [batch * rows] int32 over keys packed request by request.

    Args:
        visibility: [batch or 1, rows, 2] int32 intervals, or [batch or 1, rows, keys] of any mask,
            with which every key of the request lies in the interval.
        batch, rows, keys: requests, query tokens and keys of each.
    """
    offset = torch.arange(batch, dtype=torch.int32, device=visibility.device)[:, None] * keys
    if is_interval(visibility):
        ks, ke = (visibility + offset[:, None]).unbind(-1)
        return ks.reshape(-1), ke.reshape(-1)
    ks = offset.expand(-1, rows).reshape(-1)
    return ks, ks + keys


def packed_mask(visibility: Tensor, batch: int) -> Tensor | None:
    """The mask operand of ``index_select`` for keys packed request by request, or None.

    Args:
        visibility: [batch or 1, rows, 2] int32 intervals, or [batch or 1, rows, keys] bool or
            additive.
        batch: requests.

    Returns:
        None for intervals, else bool [batch * rows, batch * keys], block-diagonal: ``batch`` times
        the size of the given mask, and a view of it for one request.
    """
    if is_interval(visibility):
        return None
    seen = visible(visibility)
    if batch == 1:
        return seen[0]
    own = torch.eye(batch, dtype=torch.bool, device=seen.device)[:, None, :, None]
    blocks = seen[:, :, None, :] & own
    return blocks.flatten(2).flatten(0, 1)


def select_requests(
    query: Tensor,
    keys: Tensor,
    weights: Tensor,
    visibility: Tensor,
    topk: int,
    batch_invariant: bool = False,
) -> Tensor:
    """``index_select`` of each request over its own keys.

    Args:
        query: [B, S, H, D]; keys: [B, T, D]; weights: [B, S, H] float32, folded.
        visibility: [B or 1, S, 2] int32 intervals, or [B or 1, S, T] bool or additive.
        topk, batch_invariant: as of ``index_select``.

    Returns:
        [B, S, topk] int32 positions from the start of the row's interval, ascending, then -1.
    """
    batch, rows = query.shape[:2]
    key_len = keys.shape[1]
    ks, ke = packed_rows(visibility, batch, rows, key_len)
    selected = index_select(
        query.flatten(0, 1).to(keys.dtype),
        keys.reshape(batch * key_len, keys.shape[2]),
        weights.flatten(0, 1),
        ks,
        ke,
        key_len,
        topk,
        packed_mask(visibility, batch),
        batch_invariant,
    )
    return selected.view(batch, rows, topk)


def attend_requests(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_b_weight: Tensor,
    indices: Tensor | None,
    visibility: Tensor,
    topk: int,
    scale: float,
    spec: str,
) -> Tensor:
    """``mla_attention`` of each request over its own keys.

    Args:
        q_nope: [B, N, S, P]; q_pe: [B, N, S, R], rotated.
        kv_c: [B, 1, T, L], the latents; k_pe: [B, 1, T, R], rotated.
        kv_b_weight: [N * (P + V), L].
        indices: [B, S, topk] int32, the selection, or None on a route that reads none.
        visibility: [B or 1, S, 2] int32 intervals, or [B or 1, S, T] bool or additive.
        topk, scale, spec: as of ``mla_attention``.

    Returns:
        [B, N, S, V], a view of memory in the order [B, S, N, V].
    """
    batch, heads, rows, _ = q_nope.shape
    key_len = kv_c.shape[2]
    ks, ke = packed_rows(visibility, batch, rows, key_len)
    out, _ = mla_attention(
        q_nope.transpose(1, 2).flatten(0, 1),
        q_pe.transpose(1, 2).flatten(0, 1),
        kv_c.reshape(batch * key_len, kv_c.shape[3]),
        k_pe.reshape(batch * key_len, k_pe.shape[3]),
        kv_b_weight,
        None if indices is None else indices.reshape(batch * rows, topk),
        ks,
        ke,
        key_len,
        rows,
        topk,
        scale,
        spec,
        masked=not is_interval(visibility),
    )
    return out.view(batch, rows, heads, -1).transpose(1, 2)


def foreign_indices(indices: Tensor, width: int) -> Tensor:
    """A selection in the form of transformers: ``width`` lanes, each of them a position.

    Lanes without a key repeat the row's first one, and name position 0 in an empty row, so that a
    mask scattered from them marks the selected keys alone, and in an empty row a key that the
    causal mask hides.

    Args:
        indices: [B, S, K] int32, compact.
        width: min(K, keys), which no row's selection exceeds.
    """
    first = indices[..., :1].clamp(min=0)
    return torch.where(indices < 0, first, indices)[..., :width]


def normed_requests(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """``layer_norm`` of each token, or ``rms_norm`` where ``bias`` is None.

    Args:
        x: [B, S, C]; weight, bias: [C]; eps: as of the norm.

    Returns:
        Like ``x``, contiguous.
    """
    rows = x.flatten(0, 1)
    normed = rms_norm(rows, weight, eps) if bias is None else layer_norm(rows, weight, bias, eps)
    return normed.view(x.shape)


def packed_angles(angles: Tensor, x: Tensor) -> Tensor:
    """cos or sin as ``rope`` takes it, a row for each token of each request.

    Args:
        angles: [B or 1, S, R], the second half a copy of the first.
        x: [B, ..., R], what will be rotated; only its sizes are read.

    Returns:
        [B * S, R / 2] float32.
    """
    half = angles[..., : x.shape[-1] // 2].float()
    return half.expand(x.shape[0], -1, -1).reshape(-1, half.shape[-1])


def rotated_requests(x: Tensor, cos: Tensor, sin: Tensor, style: str, heads_dim: int) -> Tensor:
    """``rope`` of each token and head.

    Args:
        x: [B, N, S, R] with ``heads_dim`` 1, or [B, S, N, R] with ``heads_dim`` 2.
        cos, sin: [B * S, R / 2] float32, from ``packed_angles``.
        style: as of ``rope``.

    Returns:
        Of the shape of ``x``, in memory order [B, S, N, R].
    """
    rows = x.transpose(1, 2) if heads_dim == 1 else x
    turned = rope(rows.flatten(0, 1), cos, sin, style).view(rows.shape)
    return turned.transpose(1, 2) if heads_dim == 1 else turned
