"""Attention over expanded keys on the CPU: compiled tiles, else PyTorch's flash kernel.

The compiled kernel (``_tiles``) takes each interval as it is. Where it does not serve, the flash
kernel computes what each run of rows sees. It skips what lies beyond a causal diagonal that starts
at the first key, so a run with context is two calls, the keys that all its rows see and the
diagonal square, merged by their LSE. Values narrower than keys, or keys than values, are padded,
for it has one head dim.

On one thread in float32 the tiles are 1.2 times faster than that for a prompt of 2048 tokens at the
dimensions of GLM-5.2, 1.4 times at those of DeepSeek-V3.2, and 1.5 times under a selection at 4096.
A third candidate, GEMM, softmax and GEMM as single calls of ATen on blocks, was at best 1.17 times
faster on one thread. But each call waits for all threads: with two of them on a busy machine it
took 1.5 to 2 times as long.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _options
from .._blocks import check_interval_values
from .._mha import joined, selected_keys
from ..causal_positions import closed_form, require_premise
from ..index_scores import visible_keys
from . import _tiles
from ._runs import Form, Run, runs

# Rows from which the kernel takes its largest tile of queries, at its full rate. A masked block
# is hardly longer, since it computes all keys of its last row for every row.
_FULL_RATE_ROWS = 768
# Rows of a block without a mask: its result is a copy of its part of the output.
_MOST_ROWS = 4096
# Copies of one group of heads: what the allocator reuses instead of asking for fresh pages.
_GROUP_BYTES = 16 << 20


def supports(q: Tensor, *args: object) -> str | None:
    """None unless ``q`` is float64."""
    return "float64 attention is computed in float64" if q.dtype == torch.float64 else None


def dense_mha(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ks: Tensor,
    ke: Tensor,
    max_kv_len: int,
    scale: float,
    bound: int | None = None,
    return_lse: bool = True,
    q_pe: Tensor | None = None,
    k_pe: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``dense_mha`` for float32, bfloat16 and float16; hidden keys cost nothing in causal runs."""
    require_premise(max_kv_len, bound)
    check_interval_values(ks, ke, k.shape[0], max_kv_len)
    out, lse = _results(q, v, ks, ke)
    if _tiles.serve(q):
        _tiles.attend(out, lse, q, k, v, ks, ke, runs(ks, ke), scale, None, q_pe, k_pe)
        return out, lse if return_lse else lse.new_empty(0)
    q, k = joined(q, k, q_pe, k_pe)
    for run in runs(ks, ke):
        for block in _blocks(run, 0 if run.form is not Form.RAGGED else _mask_row_bytes(run)):
            mask = None
            if run.form is Form.RAGGED:
                rows = slice(block.start, block.stop)
                mask = visible_keys(ks[rows], ke[rows], block.first, block.last)
            _attend(out, lse, q, k, v, block, mask, scale)
    return out, lse if return_lse else lse.new_empty(0)


def masked_mha(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    ks: Tensor,
    ke: Tensor,
    scale: float,
    return_lse: bool = True,
    q_pe: Tensor | None = None,
    k_pe: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``masked_mha`` for float32, bfloat16 and float16, in blocks of rows over the keys they see.

    A block whose rows select all they see needs no mask.
    """
    check_interval_values(ks, ke, k.shape[0])
    compiled = _tiles.serve(q)
    if not compiled:
        q, k = joined(q, k, q_pe, k_pe)
    out, lse = _results(q, v, ks, ke)
    for run in runs(ks, ke):
        for block in _blocks(run, _mask_row_bytes(run) + 40 * indices.shape[1], compiled):
            rows = slice(block.start, block.stop)
            chosen, first, last = indices[rows], ks[rows], ke[rows]
            mask = None
            # Tiles know the interval of each row.
            if (run.form is Form.RAGGED and not compiled) or not selects_all(chosen, first, last):
                mask = selected_keys(chosen, first, last, block.first, block.last)
            if compiled:
                _tiles.attend(out, lse, q, k, v, ks, ke, [block], scale, mask, q_pe, k_pe)
            else:
                _attend(out, lse, q, k, v, block, mask, scale)
    return out, lse if return_lse else lse.new_empty(0)


def _results(q: Tensor, v: Tensor, ks: Tensor, ke: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse to write to, with those of empty rows in place."""
    out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
    empty = ks >= ke
    if bool(empty.any()):
        out[empty] = 0.0
    return out, q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)


def _blocks(run: Run, mask_row_bytes: int, compiled: bool = False) -> list[Run]:
    """Even parts of ``run`` whose mask takes half of the workspace.

    Under a mask they are short for the flash kernel, and for tiles as long as can be.
    """
    rows = run.stop - run.start
    parts = -(-rows // _MOST_ROWS)
    if mask_row_bytes:
        most = max(1, _options.current().workspace_bytes // 2 // mask_row_bytes)
        parts = max(1, 0 if compiled else rows // _FULL_RATE_ROWS, -(-rows // most))
    return run.even_parts(parts)


def _mask_row_bytes(run: Run) -> int:
    """One row of a mask as booleans, while it is made, and as floats."""
    return 8 * (run.last - run.first)


def selects_all(indices: Tensor, ks: Tensor, ke: Tensor) -> bool:
    """Whether each row selects all that it sees, in ascending order."""
    return bool((closed_form(ks, ke, indices.shape[1]) == indices).all()) and (
        int((ke - ks).max()) <= indices.shape[1]
    )


def _attend(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    run: Run,
    mask: Tensor | None,
    scale: float,
) -> None:
    """Write the rows of ``run`` into ``out`` and ``lse``, in groups of heads that fit the budget.

    ``mask`` [rows, keys] tells which keys a row attends to. Keys of which no row does are dropped:
    what lies there may be NaN, which survives a mask.
    """
    rows = slice(run.start, run.stop)
    keys: slice | Tensor = slice(run.first, run.last)
    blind = None
    if mask is not None:
        seen, read = mask.any(dim=1), mask.any(dim=0)
        if not bool(seen.any()):
            out[rows] = 0.0
            return
        if not bool(read.all()):
            keys, mask = read.nonzero()[:, 0] + run.first, mask[:, read]
        if not bool(seen.all()):
            blind = ~seen
            mask = mask | blind[:, None]
        mask = torch.zeros(mask.shape, dtype=_compute_dtype(q)).masked_fill_(~mask, float("-inf"))
    step = _heads_at_once(q, k, v, run, keys.shape[0] if isinstance(keys, Tensor) else 0)
    width = max(q.shape[2], v.shape[2])
    for start in range(0, q.shape[1], step):
        heads = slice(start, start + step)
        q_run, k_run, v_run = (
            _operand(x, width) for x in (q[rows, heads], k[keys, heads], v[keys, heads])
        )
        out[rows, heads], lse[rows, heads] = _run(q_run, k_run, v_run, run, mask, scale, v.shape[2])
    if blind is not None:
        out[rows].masked_fill_(blind[:, None, None], 0.0)
        lse[rows].masked_fill_(blind[:, None], float("-inf"))


def _run(
    q: Tensor, k: Tensor, v: Tensor, run: Run, mask: Tensor | None, scale: float, v_dim: int
) -> tuple[Tensor, Tensor]:
    """out [rows, n, v_dim] and lse [rows, n] of a run on operands of one width."""
    if mask is not None or run.form is Form.FULL:
        out, lse = _flash(q, k, v, scale, mask=mask)
        return out[..., :v_dim], lse
    context = k.shape[0] - q.shape[0]
    out, lse = _flash(q, k[context:], v[context:], scale, causal=True)
    if context == 0:
        return out[..., :v_dim], lse
    out_context, lse_context = _flash(q, k[:context], v[:context], scale)
    # out = out_context + w * (out - out_context), with w = e^lse / (e^lse + e^lse_context).
    weight = torch.sigmoid(lse - lse_context).to(out.dtype)[..., None]
    merged = torch.lerp(out_context[..., :v_dim], out[..., :v_dim], weight)
    return merged, torch.logaddexp(lse, lse_context)


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [t, n, width] and lse [t, n] of q [t, n, width] and k, v [s, n, width]."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        0.0,
        causal,
        attn_mask=None if mask is None else mask[None, None],
        scale=scale,
    )
    return out[0].transpose(0, 1), lse[0].t()


def _compute_dtype(q: Tensor) -> torch.dtype:
    """float16 GEMMs have no fast path on most CPUs; bfloat16 ones accumulate scores in float32."""
    return torch.float32 if q.dtype == torch.float16 else q.dtype


def _fits(x: Tensor, width: int) -> bool:
    """Whether the kernel can read ``x`` [rows, heads, w] where it lies."""
    return x.dtype == _compute_dtype(x) and x.shape[2] == width and x.stride(2) == 1


def _operand(x: Tensor, width: int) -> Tensor:
    if _fits(x, width):
        return x
    x = x.to(_compute_dtype(x))
    return torch.nn.functional.pad(x, (0, width - x.shape[2])).contiguous()


def _heads_at_once(q: Tensor, k: Tensor, v: Tensor, run: Run, gathered: int) -> int:
    """Heads whose copies of operands and results fit the workspace; more only for idle threads."""
    rows, keys = run.stop - run.start, run.last - run.first
    width = max(q.shape[2], v.shape[2])
    lines = rows * (4 if run.form is Form.CAUSAL and keys > rows else 1)
    lines += rows * (not _fits(q, width))
    lines += sum(gathered + (gathered or keys) * (not _fits(x, width)) for x in (k, v))
    bytes_per_head = max(1, lines * width * _compute_dtype(q).itemsize)
    threads = torch.get_num_threads()
    heads = max(threads, _GROUP_BYTES // bytes_per_head // threads * threads)
    return max(1, min(heads, _options.current().workspace_bytes // 2 // bytes_per_head))
