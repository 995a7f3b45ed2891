"""Cases of attention as a call: batches, shards, strides, memory, repeats (classes B to I)."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from . import _faults_attend as faults
from . import _oracle
from ._adapters import Adapters
from ._case import Case, Size
from ._cases_attend import attend, check_attention, random_inputs
from ._faults import after, around, as_if_contiguous, in_batch_invariant_mode, replacing
from ._inputs import attend_inputs
from ._poison import poison


def _check_no_rows(adapters: Adapters, size: Size) -> None:
    for rows, keys in ((0, 5), (2, 0), (0, 0)):
        table = torch.full((rows, 4), -1, dtype=torch.int32, device=adapters.device)
        check_attention(adapters, attend_inputs(adapters, table, [0] * rows, keys))


def _check_strides(adapters: Adapters, size: Size) -> None:
    inputs = random_inputs(adapters, size)
    wide = inputs.kv.new_full((inputs.kv.shape[0] + 2, inputs.kv.shape[1] + 5), 7)
    wide[1:-1, 2:-3] = inputs.kv
    changed = inputs._replace(
        q=inputs.q.transpose(0, 1).contiguous().transpose(0, 1),
        kv=wide[1:-1, 2:-3],
        indices=inputs.indices.t().contiguous().t(),
    )
    check_attention(adapters, changed)


def _check_inputs_kept(adapters: Adapters, size: Size) -> None:
    inputs = random_inputs(adapters, size)
    kept = [value.clone() for value in inputs[:4]]
    out, _ = attend(adapters, inputs)
    for was, tensor in zip(kept, inputs[:4], strict=True):
        assert torch.equal(was, tensor), "a call changes its inputs"
    stores = [tensor.untyped_storage().data_ptr() for tensor in inputs[:4]]
    assert out.untyped_storage().data_ptr() not in stores, "out lies in an input's memory"


def _check_fresh_memory(adapters: Adapters, size: Size) -> None:
    inputs = random_inputs(adapters, size)
    inputs.indices[0] = -1
    with poison():
        result = attend(adapters, inputs)
    _oracle.assert_attention(adapters, result, inputs)


def _check_repeats(adapters: Adapters, size: Size) -> None:
    inputs = random_inputs(adapters, size)
    first = attend(adapters, inputs)
    for _ in range(size.repeats):
        again = attend(adapters, inputs)
        assert torch.equal(first[0], again[0]), "the same call gives other bits"


def _check_rows_apart(adapters: Adapters, size: Size) -> None:
    inputs = random_inputs(adapters, size)
    for splits in ([1] * size.rows, [3, size.rows - 3], [size.rows - 1, 1]):
        first = 0
        for length in splits:
            rows = slice(first, first + length)
            first += length
            part = inputs._replace(
                q=inputs.q[rows], indices=inputs.indices[rows], ks=inputs.ks[rows]
            )
            check_attention(adapters, part)


def _check_sharded(adapters: Adapters, size: Size) -> None:
    """Each of two ranks attends to the keys that it owns; the LSE merges them to the whole."""
    if not adapters.returns_lse:
        raise NotImplementedError("no log-sum-exp is returned, so keys cannot be sharded")
    inputs = random_inputs(adapters, size)
    inputs.indices[1] = torch.where(inputs.indices[1] % 2 == 0, inputs.indices[1], -1)
    held = inputs.indices >= 0
    sides: list[Tensor] = []
    for rank in range(2):
        own = torch.where(held & (inputs.indices % 2 == rank), inputs.indices, -1)
        sides += attend(adapters, inputs._replace(indices=own))
    _oracle.assert_attention(adapters, ops.merge_attention(*sides), inputs)


def _check_batch_invariance(adapters: Adapters, size: Size) -> None:
    mode = adapters.batch_invariant
    if mode is None or mode.attend is None:
        raise NotImplementedError("no batch-invariant mode is declared")
    inputs = random_inputs(mode, size)
    whole = attend(mode, inputs)
    for row in range(size.rows):
        for first in {row, max(0, row - 1), 0}:
            rows = slice(first, row + 1)
            part = inputs._replace(
                q=inputs.q[rows], indices=inputs.indices[rows], ks=inputs.ks[rows]
            )
            out, lse = attend(mode, part)
            same = torch.equal(out[-1], whole[0][row]) and torch.equal(lse[-1], whole[1][row])
            assert same, f"row {row} depends on its batch"


CASES = (
    Case(
        "no rows or no keys give an empty result",
        rules=("C12",),
        classes=("I1", "I2"),
        needs=("attend",),
        check=_check_no_rows,
        fault=after("attend", faults.one_row_at_least),
    ),
    Case(
        "strides of the operands do not matter to attention",
        rules=("C17",),
        classes=("D16", "D17"),
        needs=("attend",),
        check=_check_strides,
        fault=replacing("attend", kv=lambda a: as_if_contiguous(a["kv"])),
    ),
    Case(
        "attention leaves its inputs as they were",
        rules=("C17",),
        classes=("E10", "J7"),
        needs=("attend",),
        check=_check_inputs_kept,
        fault=around("attend", faults.clamps_in_place),
    ),
    Case(
        "no part of the output is left unwritten",
        rules=("C12",),
        classes=("B3",),
        needs=("attend",),
        check=_check_fresh_memory,
        fault=around("attend", faults.unfilled_output),
    ),
    Case(
        "repeating an attention gives the same bits",
        rules=("C11",),
        classes=("C7",),
        needs=("attend",),
        check=_check_repeats,
        fault=faults.splits_every_other_call,
    ),
    Case(
        "a row's result is its own in every split of the batch",
        rules=("C7", "C14"),
        classes=("E1", "E11"),
        needs=("attend",),
        check=_check_rows_apart,
        fault=replacing("attend", ks=lambda a: a["ks"][:1].expand_as(a["ks"])),
    ),
    Case(
        "results over two shards of the keys merge to the whole",
        rules=("C16",),
        classes=("A4", "B5", "H3"),
        needs=("attend",),
        check=_check_sharded,
        fault=after("attend", lambda result, a: (result[0], result[1].nan_to_num(neginf=0.0))),
    ),
    Case(
        "in batch-invariant mode a row's result is bit-equal alone and in any batch",
        rules=("C11",),
        classes=("C7",),
        needs=("attend",),
        check=_check_batch_invariance,
        fault=in_batch_invariant_mode(around("attend", faults.splits_by_batch)),
    ),
)
