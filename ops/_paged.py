"""Rows over a paged cache: which request, how many of its tokens, and where these are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ._blocks import checks_values
from ._checks import require_dtype, require_rank, require_same_device, require_size
from ._slots import packed_slots


def require_paged_rows(
    cache: Tensor, block_table: Tensor, row_request: Tensor, lens: Tensor, rows: int
) -> None:
    """Check ``block_table`` [B, blocks], ``row_request`` [rows] and ``lens`` [rows], int32.

    They stand in for the packed keys and ``ks, ke``: row t sees the first ``lens[t]`` tokens of the
    request ``row_request[t]``. A row whose request is not in the table is padding and sees none.
    """
    require_rank("cache", cache, 3)
    for name, tensor, rank in (
        ("block_table", block_table, 2),
        ("row_request", row_request, 1),
        ("lens", lens, 1),
    ):
        require_rank(name, tensor, rank)
        require_dtype(name, tensor, (torch.int32,))
    require_size("row_request", row_request, 0, rows, "one per query token")
    require_size("lens", lens, 0, rows, "one per query token")
    require_same_device(cache=cache, block_table=block_table, row_request=row_request, lens=lens)


def visible_lens(
    block_table: Tensor, row_request: Tensor, lens: Tensor, max_kv_len: int | None = None
) -> Tensor:
    """[T] int32: ``lens``, but 0 in padding rows.

    Raises:
        ValueError: where values are checked (contract C23), a row beyond ``max_kv_len``.
    """
    padding = (row_request < 0) | (row_request >= block_table.shape[0])
    seen = lens.masked_fill(padding, 0).clamp_(min=0)
    if max_kv_len is not None and seen.shape[0] and checks_values(seen):
        longest = int(seen.max())
        if longest > max_kv_len:
            raise ValueError(f"max_kv_len must bound lens, got {max_kv_len} for a row of {longest}")
    return seen


class RequestRows(NamedTuple):
    """Some rows of one request.

    rows: their numbers, int64. lens: [rows] int32, what each sees. longest: the most of them.
    slots: [longest] int64, where the request's first tokens are.
    """

    rows: Tensor
    lens: Tensor
    longest: int
    slots: Tensor


def by_request(
    cache: Tensor, block_table: Tensor, row_request: Tensor, seen: Tensor, wanted: Tensor
) -> Iterator[RequestRows]:
    """The ``wanted`` [T] rows, one request after another; reads the device.

    No column of ``block_table`` beyond the longest of a request's rows is read.

    Raises:
        ValueError: where values are checked (contract C23), a token without a block in the cache.
    """
    wanted = wanted & (seen > 0)
    for request in row_request[wanted].unique().tolist():
        rows = (wanted & (row_request == request)).nonzero()[:, 0]
        lens = seen[rows]
        longest = int(lens.max())
        bounds = torch.tensor([0, longest], dtype=torch.int32, device=lens.device)
        table = block_table[request : request + 1]
        yield RequestRows(rows, lens, longest, packed_slots(table, bounds, longest, cache))
