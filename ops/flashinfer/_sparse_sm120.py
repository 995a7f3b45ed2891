"""Sparse MLA on SM120 over rows of 656 bytes: a wrapper from 0.7 on, before that one function.

Its products are fp8: queries and probabilities are rounded too, see ``SPARSE_ROUNDS``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._host import Host
from .._slot_rows import SlotRows
from ._limits import NOPE_DIMS, SM120_SCALES, SM120_WRAPPER_VERSION
from ._sparse_sm100 import CALL
from ._workspace import LN2, workspace

WRAPPER = "flashinfer.mla.SparseMLASm120Wrapper"


def has_wrapper(host: Host) -> bool:
    """Whether this version has the wrapper, which owns its scratch memory."""
    return host.version() >= SM120_WRAPPER_VERSION


def attend(
    host: Host, q: Tensor, pages: Tensor, rows: SlotRows, scale: float, v_dim: int, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """out [T, N, v_dim] and, if wanted, its natural lse [T, N].

    Args:
        q: [T, N, 576] bfloat16; pages: [n, page, 656] uint8, one block of memory.
        rows: no empty ones; lanes beyond a row's length hold -1, else they reach the output
            (FlashInfer #5095).
    """
    out = q.new_empty((*q.shape[:2], v_dim))
    base2 = q.new_empty(q.shape[:2], dtype=torch.float32)
    if has_wrapper(host):
        _wrapper(host, q.device).run(
            q.contiguous(),
            pages,
            rows.slots,
            out,
            scale,
            topk_length=rows.lengths,
            out_lse=base2,
            return_lse=True,
        )
    else:
        host.function(CALL)(
            query=q.contiguous()[:, None],
            kv_cache=pages,
            workspace_buffer=workspace(host, q.device),
            qk_nope_head_dim=NOPE_DIMS[v_dim],
            kv_lora_rank=v_dim,
            qk_rope_head_dim=q.shape[2] - v_dim,
            block_tables=rows.slots[:, None],
            seq_lens=rows.lengths,
            max_seq_len=rows.slots.shape[1],
            sparse_mla_top_k=rows.slots.shape[1],
            out=out[:, None],
            bmm1_scale=scale,
            bmm2_scale=1.0,
            backend="sparse",
            lse=base2,
            return_lse=True,
            kv_scale_format=SM120_SCALES,
        )
    return out, base2.mul_(LN2) if lse else None


def _wrapper(host: Host, device: torch.device) -> Any:
    """One for each stream: its scratch memory may not be shared (FlashInfer #4973)."""
    return host.per_stream(
        device,
        WRAPPER,
        lambda: host.function(WRAPPER)(kv_scale_format=SM120_SCALES, device=device),
    )
