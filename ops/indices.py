"""What a selection looks like, and the only way from positions to cache slots."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import (
    require_dtype,
    require_interval,
    require_positive,
    require_rank,
    require_same_device,
    require_size,
)

_INTEGERS = (torch.int32, torch.int64)
_NO_KEY = -1
_LAST = torch.iinfo(torch.int32).max


def compact(indices: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Bring a selection into the form that this package's ops return.

    Reads no value on the host.

    Args:
        indices: [..., K] int32; -1 (or any negative number) in any lane marks "no key".
        lengths: [...] int32 or int64. If given, only the first ``lengths`` lanes of a row count,
            and the others are ignored whatever they hold.

    Returns:
        [..., K] int32, new: the valid ids of each row, ascending, then -1.

    Raises:
        ValueError: wrong ranks or sizes, or two devices.
        TypeError: a wrong dtype.
    """
    require_dtype("indices", indices, (torch.int32,))
    if indices.dim() < 1:
        raise ValueError("indices must have at least 1 dimension, got shape ()")
    valid = indices >= 0
    if lengths is not None:
        require_dtype("lengths", lengths, _INTEGERS)
        _require_rows("lengths", lengths, indices)
        require_same_device(indices=indices, lengths=lengths)
        lane = torch.arange(indices.shape[-1], device=indices.device)
        valid = valid & (lane < lengths[..., None])
    ids = torch.where(valid, indices, _LAST).sort(dim=-1).values
    return torch.where(ids == _LAST, _NO_KEY, ids)


def slots(
    indices: Tensor,
    block_table: Tensor,
    row_request: Tensor,
    block_size: int,
    lens: Tensor | None = None,
) -> Tensor:
    """Turn positions into slots of a paged cache: ``block * block_size + position % block_size``.

    Reads no value on the host and never addresses with -1. All arithmetic is int64.

    Args:
        indices: [..., K] int32, positions that count from the request's first token.
        block_table: [requests, blocks] int32 or int64, the blocks of each request in order.
        row_request: [...] int32 or int64, the request of each row of ``indices``.
        block_size: tokens in a block.
        lens: [requests] int32 or int64, tokens of each request. Give it where a request's row of
            ``block_table`` may hold stale blocks after its own.

    Returns:
        [..., K] int64. -1 stands where there is no slot: for a negative position, a position at
        or beyond ``lens`` or beyond the table, a negative block, and a request that the table
        does not have (a padding row).

    Raises:
        ValueError: wrong ranks or sizes, ``block_size < 1``, or two devices.
        TypeError: a wrong dtype.
    """
    require_dtype("indices", indices, (torch.int32,))
    if indices.dim() < 1:
        raise ValueError("indices must have at least 1 dimension, got shape ()")
    require_dtype("block_table", block_table, _INTEGERS)
    require_rank("block_table", block_table, 2)
    require_dtype("row_request", row_request, _INTEGERS)
    _require_rows("row_request", row_request, indices)
    require_positive("block_size", block_size)
    if lens is not None:
        require_dtype("lens", lens, _INTEGERS)
        require_rank("lens", lens, 1)
        require_size("lens", lens, 0, block_table.shape[0], "one per row of block_table")
    require_same_device(
        indices=indices, block_table=block_table, row_request=row_request, lens=lens
    )
    requests, blocks = block_table.shape
    if requests == 0 or blocks == 0:
        return torch.full_like(indices, _NO_KEY, dtype=torch.int64)
    position = indices.long()
    request = row_request.long()[..., None]
    column = position.div(block_size, rounding_mode="floor")
    valid = (position >= 0) & (column < blocks) & (request >= 0) & (request < requests)
    request = request.clamp(0, requests - 1)
    if lens is not None:
        valid = valid & (position < lens[request])
    block = block_table[request, column.clamp(0, blocks - 1)].long()
    valid = valid & (block >= 0)
    return torch.where(valid, block * block_size + position.remainder(block_size), _NO_KEY)


def check_indices(
    idx: Tensor, ks: Tensor, ke: Tensor, topk: int, mask: Tensor | None = None
) -> None:
    """Assert that ``idx`` is a selection as this package's ops return it (contract C8, C10).

    A selection is int32, ``topk`` wide, and each row holds ``min(visible keys, topk)`` distinct
    visible positions in ascending order, then -1. For tests and diagnosis: it reads the device.

    Args:
        idx: [T, topk], the selection, relative to ``ks``.
        ks, ke: [T] int32, the visible interval of packed keys; ``ks >= ke`` is an empty row.
        topk: the width that ``idx`` must have.
        mask: [T, S] bool, column = packed key, True = visible; None sees the whole interval.

    Raises:
        AssertionError: ``idx`` is no such selection; names the first row that is wrong.
        ValueError, TypeError: ``ks``, ``ke`` or ``mask`` has a wrong rank, size or dtype.
    """
    rows = ks.shape[0]
    require_interval(ks, ke, rows)
    if mask is not None:
        require_dtype("mask", mask, (torch.bool,))
        require_rank("mask", mask, 2)
        require_size("mask", mask, 0, rows, "one row per query token")
    if idx.dtype != torch.int32:
        raise AssertionError(f"a selection is int32, got {idx.dtype}")
    if tuple(idx.shape) != (rows, topk):
        raise AssertionError(f"a selection here has shape {(rows, topk)}, got {tuple(idx.shape)}")

    width = (ke - ks).clamp(min=0)
    valid = idx >= 0
    inside = valid & (idx < width[:, None])
    visible = width.long()
    hidden = torch.zeros_like(valid)
    if mask is not None:
        column = torch.arange(mask.shape[1], device=mask.device)
        seen = mask & (column >= ks[:, None]) & (column < ke[:, None])
        visible = seen.sum(1)
        if mask.shape[1]:
            key = (ks[:, None] + idx).long().clamp(0, mask.shape[1] - 1)
            hidden = inside & ~seen.gather(1, key)
    expected = visible.clamp(max=topk)
    both = valid[:, 1:] & valid[:, :-1]
    ids = torch.where(valid, idx, _LAST).sort(dim=1).values

    _assert_no_row(idx < _NO_KEY, idx, "holds a negative id other than -1")
    _assert_no_row(valid[:, 1:] & ~valid[:, :-1], idx, "holds -1 before a valid id")
    _assert_no_row(valid & ~inside, idx, "holds a position outside its interval", width)
    _assert_no_row((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] != _LAST), idx, "repeats an id")
    _assert_no_row(both & (idx[:, 1:] <= idx[:, :-1]), idx, "is not ascending")
    _assert_no_row(hidden, idx, "holds a position that the mask hides")
    _assert_no_row((valid.sum(1) != expected)[:, None], idx, "has a wrong count", expected)


def _require_rows(name: str, tensor: Tensor, indices: Tensor) -> None:
    require_rank(name, tensor, indices.dim() - 1)
    for dim in range(tensor.dim()):
        require_size(name, tensor, dim, indices.shape[dim], "one per row of indices")


def _assert_no_row(wrong: Tensor, idx: Tensor, sentence: str, limit: Tensor | None = None) -> None:
    bad = wrong.any(dim=1).nonzero().flatten()
    if bad.numel() == 0:
        return
    row = int(bad[0])
    bound = "" if limit is None else f" (of {int(limit[row])} keys)"
    raise AssertionError(
        f"row {row} {sentence}{bound}: {idx[row].tolist()} ({bad.numel()} rows are wrong)"
    )
