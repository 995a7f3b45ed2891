"""``sparse_mqa`` on latent rows in a paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._blocks import checks_values, row_blocks
from ._checks import require_floating, require_rank, require_same_device
from ._dtypes import wide_dtype
from ._library import define_op
from ._paged import require_paged_rows, visible_lens
from .cache_layouts import require_mla_cache
from .indices import slots
from .masked_mha import check_selection
from .mla_cache import load_latents, require_scale_value
from .sparse_mla import sparse_mla


def sparse_mqa_paged(
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
    """Softmax attention of each row over the selected tokens of its request alone.

    Equal to ``sparse_mqa`` on the dequantised rows of each row's request: keys are read as the
    cache stores them, in the dtype of ``q`` (contract C14). Has no gradient.

    Args:
        q: [T, N, L + R], the absorbed query and its rotated part.
        cache: [num_blocks, block_size, width], see ``cache_layouts``.
        indices: [T, K] int32 positions from the request's first token; -1 in any lane is no key;
            order is free.
        block_table: [B, blocks] int32, the blocks of each request in order. Columns past what a
            row selects may hold anything: they are not read.
        row_request: [T] int32, the request of each row. A request that the table does not have,
            such as -1, marks a padding row: out 0, lse -inf, and its ``indices`` are not read.
        lens: [T] int32, how many of its request's first tokens each row sees.
        scale: softmax scale, ``(P + R)**-0.5`` of the model and never of the absorbed width.
        v_dim: leading dims of a row that are its value (L).
        layout: one of ``cache_layouts.LAYOUTS``.
        cache_scale: one float32, for the layout ``fp8`` and no other.
        return_lse: whether the log-sum-exp is wanted.
        batch_invariant: compute each row in a fixed tile (contract C11).

    Returns:
        out [T, N, L] like ``q``, 0 where nothing is selected; lse [T, N] float32 (float64 for
        float64 queries), natural log, -inf where nothing is selected, or an empty tensor.

    Raises:
        ValueError: shapes, strides, devices, a layout or a scale that do not fit together, a
            position that its row does not see, or a token without a block in the cache.
        TypeError: a dtype outside of those above.
    """
    require_rank("q", q, 3)
    require_floating("q", q)
    if not 1 <= v_dim < q.shape[2]:
        raise ValueError(f"v_dim must be between 1 and {q.shape[2] - 1}, got {v_dim}")
    check_selection(indices, q)
    require_paged_rows(cache, block_table, row_request, lens, q.shape[0])
    require_mla_cache(cache, layout, v_dim, q.shape[2] - v_dim, cache_scale)
    require_same_device(q=q, cache=cache)
    return _op(
        q,
        cache,
        indices,
        block_table,
        row_request,
        lens,
        scale,
        v_dim,
        layout,
        cache_scale,
        return_lse,
        batch_invariant,
    )


def selected_slots(
    cache: Tensor, indices: Tensor, block_table: Tensor, row_request: Tensor, lens: Tensor
) -> Tensor:
    """[T, K] int64, -1 where there is no key."""
    seen = visible_lens(block_table, row_request, lens)[:, None]
    inside = (indices >= 0) & (indices < seen)
    slot = slots(indices.masked_fill(~inside, -1), block_table, row_request, cache.shape[1])
    capacity = cache.shape[0] * cache.shape[1]
    if indices.numel() and checks_values(indices):
        read = seen > 0
        if bool((read & ((indices < -1) | (indices >= seen))).any()):
            raise ValueError("indices must be -1 or a position below the lens of its row")
        if bool((inside & ((slot < 0) | (slot >= capacity))).any()):
            raise ValueError(
                f"block_table must name one of {cache.shape[0]} blocks for every selected token"
            )
    return torch.where(slot < capacity, slot, -1)


def _reference(
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
    require_scale_value(cache_scale)
    slot = selected_slots(cache, indices, block_table, row_request, lens)
    width = indices.shape[1]
    out = q.new_zeros((q.shape[0], q.shape[1], v_dim))
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=wide_dtype(q))
    # Stored bytes, float32 and the dtype of q, before the packed op takes its own.
    bytes_per_row = 3 * width * wide_dtype(q).itemsize * q.shape[2]
    for block in row_blocks(q.shape[0], bytes_per_row):
        kv_c, k_pe = load_latents(cache, slot[block], layout, cache_scale, v_dim, q.dtype)
        lane = torch.arange(width, dtype=torch.int32, device=q.device)
        starts = torch.arange(kv_c.shape[0], dtype=torch.int32, device=q.device) * width
        out[block], lse[block] = sparse_mla(
            q[block, :, :v_dim],
            q[block, :, v_dim:],
            kv_c.flatten(0, 1),
            k_pe.flatten(0, 1),
            torch.where(slot[block] < 0, -1, lane),
            starts,
            scale,
            True,
            batch_invariant,
        )
    return out, lse if return_lse else lse.new_empty(0)


def _fake(
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
    lse_shape = (q.shape[0], q.shape[1]) if return_lse else (0,)
    out = q.new_empty((q.shape[0], q.shape[1], v_dim))
    return out, q.new_empty(lse_shape, dtype=wide_dtype(q))


def no_gradient(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """Raise where a gradient is asked for, so that none is lost silently (contract C22)."""
    raise NotImplementedError(
        "attention over a paged cache has no gradient: gather the cache and use the packed op"
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    return None


_op = define_op(
    "sparse_mqa_paged(Tensor q, Tensor cache, Tensor indices, Tensor block_table,"
    " Tensor row_request, Tensor lens, float scale, SymInt v_dim, str layout,"
    " Tensor? cache_scale=None, bool return_lse=True, bool batch_invariant=False)"
    " -> (Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    backward=no_gradient,
    setup_context=_setup_context,
)
