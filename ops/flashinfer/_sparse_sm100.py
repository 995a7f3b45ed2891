"""Sparse MLA on SM100: trtllm-gen, one request for each query token."""

from __future__ import annotations

import torch
from torch import Tensor

from .._host import Host
from .._slot_rows import SlotRows
from ._limits import NOPE_DIMS, SM100_PAGES
from ._workspace import LN2, lse_bytes, workspace

CALL = "flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla"


def attend(
    host: Host, q: Tensor, pages: Tensor, rows: SlotRows, scale: float, v_dim: int, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """out [T, N, v_dim] and, if wanted, its natural lse [T, N].

    Args:
        q: [T, N, L + R] bfloat16; pages: [n, 32 or 64, L + R], one block of memory, since the
            kernel finds a token at ``slot * (L + R)`` whatever the strides say (vLLM #47783).
        rows: no empty ones.
    """
    tokens, heads, width = q.shape
    topk = rows.slots.shape[1]
    out = q.new_empty((tokens, 1, heads, v_dim))
    base2 = q.new_empty((tokens, heads), dtype=torch.float32) if lse else None
    host.function(CALL)(
        query=q.contiguous()[:, None],
        kv_cache=pages,
        workspace_buffer=workspace(host, q.device, lse_bytes(heads, tokens, 1) if lse else 0),
        qk_nope_head_dim=NOPE_DIMS[v_dim],
        kv_lora_rank=v_dim,
        qk_rope_head_dim=width - v_dim,
        block_tables=rows.slots[:, None],
        seq_lens=rows.lengths,
        max_seq_len=topk,
        sparse_mla_top_k=topk,
        out=out,
        bmm1_scale=scale,
        bmm2_scale=1.0,
        backend="trtllm-gen",
        lse=base2,
        return_lse=lse,
    )
    return out[:, 0], None if base2 is None else base2.mul_(LN2)


def as_pages(kv: Tensor) -> Tensor:
    """Packed rows [S, L + R] as pages; padded, and so copied, where they do not fill the last."""
    page = next((size for size in SM100_PAGES if kv.shape[0] % size == 0), SM100_PAGES[0])
    missing = -kv.shape[0] % page
    full = torch.nn.functional.pad(kv, (0, 0, 0, missing)) if missing else kv.contiguous()
    return full.view(-1, page, kv.shape[1])
