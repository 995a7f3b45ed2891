"""The compiled attention over expanded keys: what Python hands to ``mha_tiles.cpp``."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor

from .. import _options
from ._build import Entry
from ._runs import Run

_ENTRY = Entry("mha_tiles.cpp", "dsafx_attend", "dense and masked attention")
# Longer tiles spread the cost of packing operands for a product; their scores must stay in cache.
_TILE_ROWS = 512
_TILE_KEYS = 512
# Where causality cuts a tile, half of it is computed in vain.
_EDGE_KEYS = 64
_LEAST_TILE = 16


class _Array(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("row", "head", "column")),
    ]


class _Problem(ctypes.Structure):
    _fields_ = [
        *((name, _Array) for name in ("q", "k", "v", "out", "q_pe", "k_pe")),
        *((name, ctypes.c_void_p) for name in ("lse", "ks", "ke", "mask", "blocks")),
        *((name, ctypes.c_int64) for name in ("num_blocks", "heads")),
        *((name, ctypes.c_int64) for name in ("width", "v_width", "pe_width")),
        *((name, ctypes.c_int64) for name in ("mask_start", "mask_first", "mask_row")),
        *((name, ctypes.c_int64) for name in ("most_rows", "most_keys", "edge_keys", "is_half")),
        ("scale", ctypes.c_double),
    ]


def serve(q: Tensor) -> bool:
    """Whether ``attend`` takes this call; the first that it could take compiles it (``Entry``)."""
    # bfloat16 products are faster in the instructions that PyTorch's kernel finds for them.
    return q.dtype in (torch.float32, torch.float16) and _ENTRY.serves()


def attend(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ks: Tensor,
    ke: Tensor,
    runs: Iterable[Run],
    scale: float,
    mask: Tensor | None = None,
    q_pe: Tensor | None = None,
    k_pe: Tensor | None = None,
) -> None:
    """Write the rows of ``runs`` into ``out`` [T, N, V] and the contiguous ``lse`` [T, N].

    ``mask`` bool tells which keys a row reads; it holds the rows and keys of the one run. The
    rotated parts of queries and keys may come apart, as in ``dense_mha``; nothing is joined then.
    """
    parts = list(runs)
    if not parts or out.numel() == 0:
        return
    pe_width = 0 if q_pe is None else q_pe.shape[2]
    most_rows, most_keys = _tile(parts, q.shape[2] + pe_width, v.shape[2])
    blocks = [
        block for run in parts for block in run.even_parts(-(-(run.stop - run.start) // most_rows))
    ]
    edges = [x for block in blocks for x in (block.start, block.stop, block.first, block.last)]
    ks, ke = ks.contiguous(), ke.contiguous()
    problem = _Problem(
        q=_array(q),
        k=_array(k),
        v=_array(v),
        out=_array(out),
        q_pe=_Array() if q_pe is None else _array(q_pe),
        k_pe=_Array() if k_pe is None else _array(k_pe[:, None].expand(-1, q.shape[1], -1)),
        lse=lse.data_ptr(),
        ks=ks.data_ptr(),
        ke=ke.data_ptr(),
        mask=None if mask is None else mask.data_ptr(),
        blocks=ctypes.cast((ctypes.c_int64 * len(edges))(*edges), ctypes.c_void_p),
        num_blocks=len(blocks),
        heads=q.shape[1],
        width=q.shape[2],
        v_width=v.shape[2],
        pe_width=pe_width,
        mask_start=parts[0].start,
        mask_first=parts[0].first,
        mask_row=0 if mask is None else mask.stride(0),
        most_rows=most_rows,
        most_keys=most_keys,
        edge_keys=min(_EDGE_KEYS, most_keys),
        is_half=q.dtype == torch.float16,
        scale=scale,
    )
    _ENTRY.call(problem)


def _tile(parts: list[Run], width: int, v_width: int) -> tuple[int, int]:
    """Rows and keys of a tile such that what all threads hold fits half of the workspace."""
    rows = min(_TILE_ROWS, max(part.stop - part.start for part in parts))
    keys = min(_TILE_KEYS, max(part.last - part.first for part in parts))
    most = _options.current().workspace_bytes // 2 // torch.get_num_threads()
    while max(rows, keys) > _LEAST_TILE and _tile_bytes(rows, keys, width, v_width) > most:
        rows, keys = (min(x, max(_LEAST_TILE, x // 2)) for x in (rows, keys))
    return rows, keys


def _tile_bytes(rows: int, keys: int, width: int, v_width: int) -> int:
    """Scores, queries and their sums of values, and copies of keys and values, in float32."""
    return 4 * (rows * keys + (rows + keys) * (width + v_width))


def _array(x: Tensor) -> _Array:
    return _Array(x.data_ptr(), *x.stride())
