"""The softmax weights of attention over selected keys, for a caller who asked to see them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops._requests import is_interval, visible


def attention_weights(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_b_weight: Tensor,
    indices: Tensor | None,
    visibility: Tensor,
    scale: float,
) -> Tensor:
    """What ``attend_requests`` weighs each key's value with; 0 at keys that are not selected.

    This is for looking at: it holds several tensors of ``N * S * T`` numbers in each layer, as
    transformers' eager attention does, where the attention itself holds none.

    Args:
        q_nope: [B, N, S, P]; q_pe: [B, N, S, R], rotated.
        kv_c: [B, 1, T, L], the latents; k_pe: [B, 1, T, R], rotated.
        kv_b_weight: [N * (P + V), L], rows of each head ``[P | V]``.
        indices: [B, S, K] int32, the selection, -1 in any lane is no key; None: all visible keys.
        visibility: [B or 1, S, 2] int32 intervals, or [B or 1, S, T] bool or additive.
        scale: softmax scale.

    Returns:
        [B, N, S, T] of the dtype of ``q_nope``, computed in float32 or wider. Rows sum to 1, and an
        empty row is 0.
    """
    heads, nope = q_nope.shape[1], q_nope.shape[3]
    wide = torch.promote_types(q_nope.dtype, torch.float32)
    by_head = kv_b_weight.view(heads, -1, kv_b_weight.shape[1])[:, :nope].to(wide)
    absorbed = torch.matmul(q_nope.to(wide), by_head)
    scores = _dots(absorbed, kv_c.to(wide)) + _dots(q_pe.to(wide), k_pe.to(wide))
    seen = _selected(indices, visibility, key_len=kv_c.shape[2])[:, None]
    # An empty row is even here and 0 below; of -inf it would be NaN in between.
    hidden = torch.finfo(wide).min
    weights = torch.softmax((scores * scale).masked_fill(~seen, hidden), dim=-1)
    return torch.where(seen, weights, 0).to(q_nope.dtype)


def _dots(queries: Tensor, keys: Tensor) -> Tensor:
    """[B, N, S, T] from [B, N, S, C] and [B, 1, T, C], which is not copied for each head."""
    batch, heads, rows, _ = queries.shape
    return torch.bmm(queries.flatten(1, 2), keys[:, 0].mT).view(batch, heads, rows, -1)


def _selected(indices: Tensor | None, visibility: Tensor, key_len: int) -> Tensor:
    """[B or 1, S, T] bool, the keys that a row attends to."""
    start = visibility.new_zeros((), dtype=torch.int32)
    if is_interval(visibility):
        start = visibility[..., :1]
        keys = torch.arange(key_len, device=visibility.device)
        seen = (keys >= start) & (keys < visibility[..., 1:])
    else:
        seen = visible(visibility)
    if indices is None:
        return seen
    # One lane more than there are keys takes what names no key.
    places = torch.where(indices < 0, key_len, indices + start).long()
    marked = seen.new_zeros((*indices.shape[:-1], key_len + 1)).scatter(-1, places, True)
    return seen & marked[..., :key_len]
