"""Cases of dense and masked attention, where kernels for them are declared (classes A, B and E)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import _oracle
from ._adapters import Adapters, Function
from ._case import Case, Size
from ._faults import Arguments, around, replacing
from ._inputs import int32, normal, prompt, random_lanes

Attention = tuple[Tensor, Tensor]


class _MhaInputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    ks: Tensor
    ke: Tensor
    scale: float


def _inputs(
    adapters: Adapters,
    ks: list[int],
    ke: list[int],
    keys: int | None = None,
    heads: int | None = None,
    dtype: torch.dtype | None = None,
) -> _MhaInputs:
    dims, dtype = adapters.dims, dtype or adapters.dtypes[0]
    heads, keys = heads or dims.heads, max(ke, default=0) if keys is None else keys
    width = dims.latent + dims.rope
    return _MhaInputs(
        normal(adapters, len(ks), heads, width, seed=1).to(dtype),
        normal(adapters, keys, heads, width, seed=2).to(dtype),
        normal(adapters, keys, heads, dims.latent, seed=3).to(dtype),
        int32(adapters, ks),
        int32(adapters, ke),
        width**-0.5,
    )


def _dense(adapters: Adapters, inputs: _MhaInputs) -> Attention:
    q, k, v, ks, ke, scale = inputs
    longest = max(0, int((ke - ks).max())) if ks.shape[0] else 0
    result: Attention = adapters.function("dense")(q, k, v, ks, ke, longest, scale)
    return result


def _hold(adapters: Adapters, got: Attention, inputs: _MhaInputs, chosen: Tensor) -> None:
    """``got`` is attention over the keys that ``chosen`` [T, S] names."""
    q, k, v, _, _, scale = inputs
    out = q.new_zeros((*q.shape[:2], v.shape[2]), dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64, device=q.device)
    for row in range(q.shape[0]):
        keys = chosen[row]
        if bool(keys.any()):
            logits = torch.einsum("nd,snd->ns", q[row].double(), k[keys].double()) * scale
            lse[row] = logits.logsumexp(-1)
            out[row] = torch.einsum("ns,snv->nv", logits.softmax(-1), v[keys].double())
    read = chosen.any(dim=0)
    _oracle.assert_mha(adapters, got, (out, lse), q, k[read], v[read], scale, k.shape[0])


def _check_dense(adapters: Adapters, inputs: _MhaInputs) -> None:
    seen = _oracle.visible(inputs.ks, inputs.ke, inputs.k.shape[0])
    _hold(adapters, _dense(adapters, inputs), inputs, seen)


def _check_causal(adapters: Adapters, size: Size) -> None:
    for dtype in adapters.dtypes:
        for heads in size.heads:
            ks, ke = prompt([size.rows], cached=5)
            _check_dense(adapters, _inputs(adapters, ks, ke, heads=heads, dtype=dtype))


def _check_packed(adapters: Adapters, size: Size) -> None:
    _check_dense(adapters, _inputs(adapters, *prompt([3, size.rows - 3], cached=4)))


def _check_dense_empty(adapters: Adapters, size: Size) -> None:
    _check_dense(adapters, _inputs(adapters, [0, 5, 2, 0], [0, 5, 7, 3], keys=9))
    for rows, keys in ((0, 4), (2, 0)):
        _check_dense(adapters, _inputs(adapters, [0] * rows, [keys] * rows, keys=keys))


def _check_dense_unread(adapters: Adapters, size: Size) -> None:
    """Two requests in a static cache: what is not valid yet is NaN, between them too."""
    inputs = _inputs(adapters, [2, 2, 20, 20], [8, 9, 26, 27], keys=size.keys)
    seen = _oracle.visible(inputs.ks, inputs.ke, size.keys)
    unread = ~seen.any(dim=0)[:, None, None]
    k, v = inputs.k.masked_fill(unread, math.nan), inputs.v.masked_fill(unread, math.nan)
    _hold(adapters, _dense(adapters, inputs._replace(k=k, v=v)), inputs, seen)


def _check_masked_unread(adapters: Adapters, size: Size) -> None:
    """Keys that no row has selected are NaN, the first and the last of them too."""
    inputs = _inputs(adapters, [1] * size.rows, [size.keys] * size.rows)
    table = random_lanes(adapters, size.rows, size.keys - 2, size.topk)
    chosen = _named(inputs, table)
    unread = ~chosen.any(dim=0)[:, None, None]
    k, v = inputs.k.masked_fill(unread, math.nan), inputs.v.masked_fill(unread, math.nan)
    _hold(adapters, _masked(adapters, inputs._replace(k=k, v=v), table), inputs, chosen)


def _check_dense_is_sparse(adapters: Adapters, size: Size) -> None:
    """Keys of one latent for all heads: dense MHA and top-k MQA over all keys are one function."""
    for keys in (1, 23, 24, 25, 30):
        rows = min(size.rows, keys)
        inputs = _inputs(adapters, *prompt([rows], cached=keys - rows))
        shared = inputs.k[:, :1]
        inputs = inputs._replace(
            k=shared.expand_as(inputs.k).contiguous(),
            v=shared[..., : inputs.v.shape[2]].expand_as(inputs.v).contiguous(),
        )
        _check_dense(adapters, inputs)
        seen = _oracle.visible(inputs.ks, inputs.ke, keys)
        lane = torch.arange(keys, dtype=torch.int32, device=adapters.device)
        table = torch.where(seen, lane, -1)
        attend = adapters.function("attend")
        sparse = attend(inputs.q, shared[:, 0], table, inputs.ks, inputs.scale, inputs.v.shape[2])
        _hold(adapters, sparse, inputs, seen)


def _masked(adapters: Adapters, inputs: _MhaInputs, table: Tensor) -> Attention:
    q, k, v, ks, ke, scale = inputs
    result: Attention = adapters.function("masked")(q, k, v, table, ks, ke, scale)
    return result


def _named(inputs: _MhaInputs, table: Tensor) -> Tensor:
    """[T, S] bool: the packed keys that ``table`` names."""
    keys = inputs.k.shape[0]
    column = torch.where(table >= 0, table + inputs.ks[:, None], keys).long()
    chosen = torch.zeros(table.shape[0], keys + 1, dtype=torch.bool, device=table.device)
    return chosen.scatter_(1, column, True)[:, :keys]


def _check_masked(adapters: Adapters, size: Size) -> None:
    for dtype in adapters.dtypes:
        rows, keys = size.rows, size.keys
        inputs = _inputs(adapters, [3] * rows, [keys] * rows, dtype=dtype)
        table = random_lanes(adapters, rows, keys - 3, size.topk)
        table[0, 0], table[1, :] = -1, -1
        _hold(adapters, _masked(adapters, inputs, table), inputs, _named(inputs, table))


def _check_masked_empty(adapters: Adapters, size: Size) -> None:
    inputs = _inputs(adapters, [0] * 3, [0, 9, 9], keys=9)
    table = random_lanes(adapters, 3, 9, 4)
    table[:2] = -1
    _hold(adapters, _masked(adapters, inputs, table), inputs, _named(inputs, table))


def _average(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, scale: float) -> Attention:
    """Attention that hides keys with a finite minimum and then averages where there is none."""
    logits = torch.einsum("tnd,snd->tns", q.float(), k.float()) * scale
    logits = logits.masked_fill(~chosen[:, None], torch.finfo(torch.float32).min)
    out = torch.einsum("tns,snv->tnv", logits.softmax(-1), v.float())
    return out.to(q.dtype), logits.logsumexp(-1)


def _dense_average(right: Function, a: Arguments) -> Attention:
    seen = _oracle.visible(a["ks"], a["ke"], a["k"].shape[0])
    return _average(a["q"], a["k"], a["v"], seen, a["scale"])


def _masked_average(right: Function, a: Arguments) -> Attention:
    keys = a["k"].shape[0]
    column = torch.where(a["indices"] >= 0, a["indices"] + a["ks"][:, None], keys).long()
    chosen = torch.zeros(a["q"].shape[0], keys + 1, dtype=torch.bool, device=column.device)
    return _average(a["q"], a["k"], a["v"], chosen.scatter_(1, column, True)[:, :-1], a["scale"])


def _last_key_for_none(a: Arguments) -> Tensor:
    """-1 wraps around to the last key of the row."""
    width = (a["ke"] - a["ks"])[:, None]
    return torch.where(a["indices"] < 0, width - 1, a["indices"])


def _all_keys(a: Arguments) -> Tensor:
    lane = torch.arange(a["k"].shape[0], dtype=torch.int32, device=a["q"].device)
    return torch.where(lane < (a["ke"] - a["ks"])[:, None], lane, -1)


def _without_rope(a: Arguments) -> Tensor:
    """From 24 keys on, the rotated part of a key is left out."""
    k: Tensor = a["k"].clone()
    if k.shape[0] >= 24:
        k[..., a["v"].shape[2] :] = 0
    return k


CASES = (
    Case(
        "dense attention sees its interval and nothing behind it",
        rules=("C12", "C13", "C18"),
        classes=("E3",),
        needs=("dense",),
        check=_check_causal,
        fault=replacing(
            "dense",
            ke=lambda a: torch.full_like(a["ke"], a["k"].shape[0]),
            max_kv_len=lambda a: a["k"].shape[0],
        ),
    ),
    Case(
        "dense attention of a packed request sees none of its neighbour's keys",
        rules=("C13",),
        classes=("E12",),
        needs=("dense",),
        check=_check_packed,
        fault=replacing("dense", ks=lambda a: 0 * a["ks"], max_kv_len=lambda a: a["k"].shape[0]),
    ),
    Case(
        "a row without keys gives 0 in dense attention",
        rules=("C12",),
        classes=("B5", "B6", "I1"),
        needs=("dense",),
        check=_check_dense_empty,
        fault=around("dense", _dense_average),
    ),
    Case(
        "what keys outside the interval hold reaches no dense result",
        rules=("C13",),
        classes=("B6", "E7"),
        needs=("dense",),
        check=_check_dense_unread,
        fault=around("dense", _dense_average),
    ),
    Case(
        "dense and sparse attention agree where all keys are selected",
        rules=("C3",),
        classes=("A10", "A13"),
        needs=("dense", "attend"),
        check=_check_dense_is_sparse,
        fault=replacing("dense", k=_without_rope),
    ),
    Case(
        "masked attention reads the selected keys alone",
        rules=("C4",),
        classes=("A1", "A2"),
        needs=("masked",),
        check=_check_masked,
        fault=replacing("masked", indices=_all_keys),
    ),
    Case(
        "-1 names no key in masked attention",
        rules=("C4", "C8"),
        classes=("B7", "B11"),
        needs=("masked",),
        check=_check_masked,
        fault=replacing("masked", indices=_last_key_for_none),
    ),
    Case(
        "a row without keys gives 0 in masked attention",
        rules=("C12",),
        classes=("B5", "B6"),
        needs=("masked",),
        check=_check_masked_empty,
        fault=around("masked", _masked_average),
    ),
    Case(
        "what keys hold that are not selected reaches no masked result",
        rules=("C4", "C13"),
        classes=("B6", "E7"),
        needs=("masked",),
        check=_check_masked_unread,
        fault=around("masked", _masked_average),
    ),
)
