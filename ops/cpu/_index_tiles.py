"""The compiled scores of index queries: what Python hands to ``index_tiles.cpp``."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .. import _options
from ._build import Entry

_ENTRY = Entry("index_tiles.cpp", "dsafx_score", "the indexer")
# Rows times heads, and keys, of one tile: its 512 KiB of dots lie in the cache of a core.
_TILE_LANES = 512
_TILE_KEYS = 256


class _Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "weights", "k", "ends", "out")),
        *((name, ctypes.c_int64) for name in ("k_row", "out_row")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "dim", "keys")),
        *((name, ctypes.c_int64) for name in ("tile_rows", "tile_keys")),
    ]


def serve() -> bool:
    """Whether ``score`` can be called; the first call compiles it (``Entry``)."""
    return _ENTRY.serves()


def score(out: Tensor, q: Tensor, k: Tensor, weights: Tensor, ends: Tensor) -> None:
    """Write the scores of q [r, H, D] against k [n, D] into ``out`` [r, n]; all are float32.

    ``ends`` [r] int64 tells how many of the keys each row sees; what lies beyond in ``out``
    is a score or -inf. ``q``, ``weights`` [r, H] and the rows of ``k`` and ``out`` are contiguous.
    """
    if out.numel() == 0:
        return
    rows, heads, dim = q.shape
    if heads * dim == 0:
        out.zero_()
        return
    _ENTRY.call(
        _Problem(
            q=q.data_ptr(),
            weights=weights.data_ptr(),
            k=k.data_ptr(),
            ends=ends.data_ptr(),
            out=out.data_ptr(),
            k_row=k.stride(0),
            out_row=out.stride(0),
            rows=rows,
            heads=heads,
            dim=dim,
            keys=k.shape[0],
            tile_rows=_tile_rows(heads),
            tile_keys=_TILE_KEYS,
        )
    )


def workspace_bytes(heads: int) -> int:
    """The dots that all threads hold: an eighth of the workspace, or those of one row a thread."""
    return 4 * torch.get_num_threads() * _tile_rows(heads) * heads * _TILE_KEYS


def _tile_rows(heads: int) -> int:
    most = _options.current().workspace_bytes // 8 // torch.get_num_threads()
    return max(1, min(_TILE_LANES, most // (4 * _TILE_KEYS)) // heads)
