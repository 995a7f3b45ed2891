"""Cases of batches and caches: chunks, packed requests, strides, memory (classes B, E, F)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import _oracle
from ._adapters import Adapters, Function
from ._case import Case, Size
from ._cases_rows import check_selection
from ._cases_topk import select
from ._faults import Arguments, after, around, as_if_contiguous, replacing
from ._inputs import index_inputs, prompt, spelled
from ._poison import poison


def _check_loose_bound(adapters: Adapters, size: Size) -> None:
    """Two requests in a static cache: ``max_kv_len`` is its length; the rest of it is NaN."""
    keys = 2 * size.keys
    inputs = index_inputs(adapters, [0, 0, keys], [9, size.keys, keys + 25], keys=2 * keys)
    k = inputs.k.clone()
    k[size.keys : keys], k[keys + 25 :] = math.nan, math.nan
    idx = select(adapters, inputs._replace(k=k), size.topk, bound=keys)
    _oracle.assert_selection(adapters, idx, inputs, size.topk)


def _check_packed(adapters: Adapters, size: Size) -> None:
    topk = size.topk // 2
    lengths = [3, size.rows - 3]
    check_selection(adapters, index_inputs(adapters, *prompt(lengths, cached=size.topk)), topk)


def _check_chunks(adapters: Adapters, size: Size) -> None:
    rows, cached = size.rows, size.keys // 2
    inputs = index_inputs(adapters, *prompt([rows], cached=cached))
    for splits in ([rows], [1] * rows, [3, rows - 3], [rows - 1, 1]):
        first = 0
        for length in splits:
            chunk = inputs.rows(slice(first, first + length))
            first += length
            # A chunk sees no key that a later chunk will bring.
            keys = cached + first
            check_selection(adapters, chunk._replace(k=inputs.k[:keys]), size.topk)


def _check_mixed_batch(adapters: Adapters, size: Size) -> None:
    """Two decode rows, a verified draft of three and a prefill, each as if it were alone."""
    ks, ke = [0, 30, 50, 50, 50], [30, 50, 70, 71, 72]
    more = prompt([size.rows - 5], cached=size.topk)
    ks, ke = ks + [72 + start for start in more[0]], ke + [72 + end for end in more[1]]
    inputs = index_inputs(adapters, ks, ke)
    check_selection(adapters, inputs, size.topk)
    for row in range(len(ks)):
        check_selection(adapters, inputs.rows(slice(row, row + 1)), size.topk)


def _check_strides(adapters: Adapters, size: Size) -> None:
    inputs = index_inputs(adapters, [0] * size.rows, [size.keys] * size.rows)
    wide = inputs.k.new_full((size.keys, 2 * inputs.k.shape[1]), 7)
    wide[:, 3 : 3 + inputs.k.shape[1]] = inputs.k
    inputs = inputs._replace(
        q=inputs.q.transpose(0, 1).contiguous().transpose(0, 1),
        k=wide[:, 3 : 3 + inputs.k.shape[1]],
        weights=inputs.weights.t().contiguous().t(),
    )
    check_selection(adapters, inputs, size.topk)


def _check_inputs_kept(adapters: Adapters, size: Size) -> None:
    inputs = index_inputs(adapters, *prompt([size.rows], cached=size.topk))
    inputs = inputs._replace(mask=_oracle.visible(inputs.ks, inputs.ke, inputs.k.shape[0]))
    kept = [tensor.clone() for tensor in inputs if tensor is not None]
    select(adapters, inputs, size.topk)
    for was, tensor in zip(kept, inputs, strict=True):
        assert tensor is not None
        assert torch.equal(was, tensor), "a call changes its inputs"


def _check_fresh_memory(adapters: Adapters, size: Size) -> None:
    """Under a poisoned allocator, which Python code at least cannot escape."""
    inputs = index_inputs(adapters, *prompt([size.rows], cached=size.topk // 2))
    with poison():
        idx = select(adapters, inputs, size.topk)
    _oracle.assert_selection(adapters, idx, inputs, size.topk)


def _check_local_positions(adapters: Adapters, size: Size) -> None:
    """The same request at two places of the packed keys selects the same positions."""
    alone = index_inputs(adapters, [0] * 3, [size.keys] * 3)
    behind = alone._replace(
        k=torch.cat([alone.k[:17] * 9, alone.k]), ks=alone.ks + 17, ke=alone.ke + 17
    )
    for inputs in (alone, behind):
        check_selection(adapters, inputs, size.topk)


def _check_last_key(adapters: Adapters, size: Size) -> None:
    """The newest key of each row is its best one."""
    keys = size.keys
    scores = [float(key) for key in range(keys)]
    inputs = spelled(adapters, scores, [0] * 3, [keys - 2, keys - 1, keys])
    idx = select(adapters, inputs, size.topk)
    _oracle.assert_exact(adapters, idx, inputs, size.topk, scores)


def _whole_cache_is_valid(right: Function, a: Arguments) -> Tensor:
    end = (a["ks"] + a["max_kv_len"]).clamp(max=a["k"].shape[0])
    result: Tensor = right(*{**a, "ke": end}.values())
    return result


def _chunk_keys_only(right: Function, a: Arguments) -> Tensor:
    """A suffix sees the keys of its own chunk, as many as it has rows."""
    start = torch.maximum(a["ks"], a["ke"].max() - a["q"].shape[0])
    found = right(*{**a, "ks": start}.values())
    return torch.where(found >= 0, found + (start - a["ks"])[:, None], -1)


def _padded_decode_rows(result: Tensor, a: Arguments) -> Tensor:
    """Rows of the first requests are written padded, over those that follow."""
    result = result.clone()
    if result.shape[0] > 5:
        result[2:4] = result[:2]
    return result


def _unfilled_buffer(right: Function, a: Arguments) -> Tensor:
    found = right(*a.values())
    buffer = torch.empty(found.shape, dtype=found.dtype, device=found.device)
    return torch.where(found >= 0, found, buffer)


def _narrows_the_mask(right: Function, a: Arguments) -> Any:
    result = right(*a.values())
    a["mask"][:, 0] = False
    return result


def _packed_keys(result: Tensor, a: Arguments) -> Tensor:
    return torch.where(result >= 0, result + a["ks"][:, None], -1)


CASES = (
    Case(
        "the bound on the length is no length",
        rules=("C10", "C13"),
        classes=("E3", "E5"),
        needs=("select",),
        check=_check_loose_bound,
        fault=around("select", _whole_cache_is_valid),
    ),
    Case(
        "a packed request selects none of its neighbour's keys",
        rules=("C13",),
        classes=("E12",),
        needs=("select",),
        check=_check_packed,
        fault=replacing("select", ks=lambda a: 0 * a["ks"], max_kv_len=lambda a: a["k"].shape[0]),
    ),
    Case(
        "any split of a prompt selects the same keys",
        rules=("C14",),
        classes=("E2", "E9", "E11"),
        needs=("select",),
        check=_check_chunks,
        fault=around("select", _chunk_keys_only),
    ),
    Case(
        "decode, draft and prefill rows of one batch keep apart",
        rules=("C7",),
        classes=("E1", "F7"),
        needs=("select",),
        check=_check_mixed_batch,
        fault=after("select", _padded_decode_rows),
    ),
    Case(
        "strides of the operands do not matter to a selection",
        rules=("C17",),
        classes=("D17",),
        needs=("select",),
        check=_check_strides,
        fault=replacing("select", k=lambda a: as_if_contiguous(a["k"])),
    ),
    Case(
        "selecting leaves its inputs as they were",
        rules=("C17",),
        classes=("E10",),
        needs=("select",),
        check=_check_inputs_kept,
        fault=around("select", _narrows_the_mask),
    ),
    Case(
        "no lane of a selection is left unwritten",
        rules=("C8",),
        classes=("B3",),
        needs=("select",),
        check=_check_fresh_memory,
        fault=around("select", _unfilled_buffer),
    ),
    Case(
        "positions count from the row's own first key",
        rules=("C9",),
        classes=("B12", "E12"),
        needs=("select",),
        check=_check_local_positions,
        fault=after("select", _packed_keys),
    ),
    Case(
        "the newest key is selectable",
        rules=("C7", "C13"),
        classes=("F7",),
        needs=("select",),
        check=_check_last_key,
        fault=replacing("select", ke=lambda a: a["ke"] - 1),
        exact=True,
    ),
)
