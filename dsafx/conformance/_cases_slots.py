"""Cases of the helpers: positions to slots, and compaction (classes B, E, F and I)."""

from __future__ import annotations

import torch
from torch import Tensor

from ._adapters import Adapters
from ._case import Case, Size
from ._faults import Arguments, around, replacing
from ._inputs import int32, lanes

_STALE = 2_000_000_000


def _slots(
    adapters: Adapters,
    positions: list[list[int]],
    table: list[list[int]],
    block: int,
    lengths: list[int] | None = None,
) -> list[list[int]]:
    """The slots of row i, a row of request i."""
    indices = lanes(adapters, positions, max(len(row) for row in positions))
    blocks = torch.tensor(table, dtype=torch.int32, device=adapters.device)
    lens = None if lengths is None else int32(adapters, lengths)
    requests = torch.arange(len(positions), dtype=torch.int32, device=adapters.device)
    found = adapters.slots(indices, blocks, requests, block, lens)
    assert found.dtype == torch.int64, f"slots are int64, got {found.dtype}"
    result: list[list[int]] = found.tolist()
    return result


def _check_large_slots(adapters: Adapters, size: Size) -> None:
    got = _slots(adapters, [[0, 63, 64]], [[40_000_000, 33_554_432]], 64)
    assert got == [[2_560_000_000, 2_560_000_063, 2_147_483_648]], f"slots are {got}"


def _check_block_sizes(adapters: Adapters, size: Size) -> None:
    positions = [0, 15, 16, 63, 64, 127, 130]
    for block in (16, 64, 128):
        table = [(7 * column + 3) % 11 for column in range(130 // block + 1)]
        wanted = [table[p // block] * block + p % block for p in positions]
        got = _slots(adapters, [positions], [table], block)
        assert got == [wanted], f"blocks of {block}: slots are {got}, and {wanted} is right"


def _check_no_slot(adapters: Adapters, size: Size) -> None:
    """-1, stale columns behind a request's own blocks, and positions beyond its length."""
    positions = [[0, -1, 69, 70, 128], [5, 63, 64, -1, -1]]
    got = _slots(adapters, positions, [[4, 7, 99], [2, 98, 97]], 64, [70, 64])
    wanted = [[256, -1, 453, -1, -1], [133, 191, -1, -1, -1]]
    assert got == wanted, f"slots are {got}, and {wanted} is right"


def _check_compact(adapters: Adapters, size: Size) -> None:
    table = lanes(adapters, [[-1, 3, -1, 5], [7, -1, -1, 0], [-1, -1, -1, -1]], 4)
    got = adapters.compact(table, None).tolist()
    wanted = [[3, 5, -1, -1], [0, 7, -1, -1], [-1, -1, -1, -1]]
    assert got == wanted, f"compacted to {got}, and {wanted} is right"


def _check_lengths(adapters: Adapters, size: Size) -> None:
    """Lanes at and beyond a row's length hold what an earlier step or nobody wrote."""
    table = lanes(adapters, [[2, 0, 9, _STALE], [_STALE, 8, 1, 3], [4, 1, 2, 0], [6, -1, 5, 7]], 4)
    lengths = int32(adapters, [2, 0, 4, 3])
    got = adapters.compact(table, lengths).tolist()
    wanted = [[0, 2, -1, -1], [-1, -1, -1, -1], [0, 1, 2, 4], [5, 6, -1, -1]]
    assert got == wanted, f"compacted to {got}, and {wanted} is right"


def _int32_arithmetic(result: Tensor, a: Arguments) -> Tensor:
    return result.to(torch.int32).to(torch.int64)


def _stops_at_a_gap(a: Arguments) -> Tensor:
    """Valid lanes are taken for a prefix already."""
    return torch.where((a["indices"] < 0).cumsum(dim=1) > 0, -1, a["indices"])


CASES = (
    Case(
        "slots are int64",
        rules=("C9",),
        classes=("I7",),
        needs=("slots",),
        check=_check_large_slots,
        fault=around("slots", lambda right, a: _int32_arithmetic(right(*a.values()), a)),
    ),
    Case(
        "a slot follows the cache's own block size",
        rules=("C9",),
        classes=("B12", "E14"),
        needs=("slots",),
        check=_check_block_sizes,
        fault=replacing("slots", block_size=lambda a: 64),
    ),
    Case(
        "no slot stands for -1, for a stale block or beyond a request's length",
        rules=("C8", "C9"),
        classes=("B7", "E13"),
        needs=("slots",),
        check=_check_no_slot,
        fault=replacing("slots", lens=lambda a: None),
    ),
    Case(
        "compaction keeps ids behind a gap, in ascending order",
        rules=("C8",),
        classes=("B11",),
        needs=("compact",),
        check=_check_compact,
        fault=replacing("compact", indices=_stops_at_a_gap),
    ),
    Case(
        "lanes beyond a row's length are ignored whatever they hold",
        rules=("C8",),
        classes=("B1", "B2", "F1"),
        needs=("compact",),
        check=_check_lengths,
        fault=replacing("compact", lengths=lambda a: None),
    ),
)
