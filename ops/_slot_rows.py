"""Selections as sparse kernels of other libraries take them: int32 addresses, valid ones first."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

LARGEST_SLOT = 2**31 - 1
"""The largest address that an int32 holds; a cache with more tokens is refused (contract C9)."""

# Workspace of one lane of a selection on its way to ``SlotRows``: int64 addresses and lanes, masks.
LANE_BYTES = 40


class SlotRows(NamedTuple):
    """The addresses that some rows read.

    slots: [T, width] int32, valid addresses first, in their given order, then -1.
    lengths: [T] int32, how many are valid.
    """

    slots: Tensor
    lengths: Tensor


Attend: TypeAlias = Callable[[SlotRows, slice], tuple[Tensor, Tensor | None]]
"""attend(rows, block) -> out and lse of the query tokens of ``block``, which select ``rows``."""


def packed_slots(indices: Tensor, ks: Tensor, keys: int) -> Tensor:
    """[T, K] int64: the packed row of each position, -1 where there is none."""
    row = indices.long() + ks[:, None]
    return torch.where((indices >= 0) & (row >= 0) & (row < keys), row, -1)


def valid_first(slot: Tensor, width: int) -> SlotRows:
    """Bring the valid lanes of ``slot`` [T, K] to the front of ``width`` >= K lanes.

    Kernels stop at a row's length, while -1 may stand in any lane (contract C8). Reads no value on
    the host.
    """
    valid = slot >= 0
    # Lanes without an address go to a column of their own, which is cut off.
    lane = torch.where(valid, valid.cumsum(dim=1) - 1, width)
    slots = slot.new_full((slot.shape[0], width + 1), -1, dtype=torch.int32)
    slots.scatter_(1, lane, slot.to(torch.int32))
    return SlotRows(slots[:, :width].contiguous(), valid.sum(dim=1, dtype=torch.int32))


def without_empty_rows(rows: SlotRows) -> SlotRows:
    """``rows``, but an empty one reads address 0: kernels leave its result undefined otherwise.

    What they compute for it is thrown away, see ``blank_empty_rows``.
    """
    slots = rows.slots.clone()
    slots[:, 0] = torch.where(rows.lengths == 0, 0, slots[:, 0])
    return SlotRows(slots, rows.lengths.clamp(min=1))


def blank_empty_rows(rows: SlotRows, out: Tensor, lse: Tensor | None) -> None:
    """Write what an empty row has, 0 and -inf (contract C12), whatever a kernel left there."""
    empty = (rows.lengths == 0)[:, None]
    out.masked_fill_(empty[..., None], 0.0)
    if lse is not None:
        lse.masked_fill_(empty, float("-inf"))


def attend_in_blocks(
    out: Tensor,
    lse: Tensor,
    width: int,
    step: int,
    addresses: Callable[[slice], Tensor],
    attend: Attend,
) -> None:
    """Write ``out`` [T, N, V] and, where ``attend`` has one, ``lse``, ``step`` tokens a call.

    A kernel may have more heads than N; ``addresses`` gives [t, K] int64 of a block of tokens.
    """
    heads = out.shape[1]
    for start in range(0, out.shape[0], step):
        block = slice(start, min(start + step, out.shape[0]))
        rows = valid_first(addresses(block), width)
        part, part_lse = attend(rows, block)
        # Whatever a kernel has for an empty row: FlashMLA's lse is +inf there.
        blank_empty_rows(rows, part, part_lse)
        out[block] = part[:, :heads]
        if part_lse is not None:
            lse[block] = part_lse[:, :heads]


def too_many_keys(keys: int) -> str | None:
    """Why kernels with int32 addresses cannot read so many keys, or None."""
    return None if keys <= LARGEST_SLOT else f"addresses are int32, and there are {keys} keys"


def joining_is_wasteful(kv_c: Tensor, indices: Tensor) -> str | None:
    """Why not to call a kernel that wants both parts of the keys side by side, or None."""
    if kv_c.shape[0] <= indices.numel():
        return None
    return "joining latents and rotated keys would copy more rows than are selected"


def padded_width(width: int, multiple: int) -> int:
    """``width`` rounded up to a positive multiple."""
    return max(1, -(-width // multiple)) * multiple
