"""Sparse MLA on SM90, where FlashInfer has none: dense paged MLA over pages of one token.

Each query token is a request whose pages are its selected tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._host import Host
from .._slot_rows import SlotRows
from ._limits import MLA_METADATA_VERSION, SPARSE_BACKENDS
from ._workspace import LN2, workspace

WRAPPER = "flashinfer.mla.BatchMLAPagedAttentionWrapper"
METADATA = "flashinfer.mla.MLAPlanMetadata"


def attend(
    host: Host,
    queries: tuple[Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    rows: SlotRows,
    scale: float,
    lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """out [T, N, L] and, if wanted, its natural lse [T, N]; copies lengths to the host.

    Args:
        queries: [T, N, L] and [T, N, R]; keys: [S, L] and [S, R], views are fine.
        rows: no empty ones.
    """
    (latent, rope), (kv_c, k_pe) = queries, keys
    csr = _pages_of_one_token(rows)
    plan: dict[str, Any] = {
        "num_heads": latent.shape[1],
        "head_dim_ckv": latent.shape[2],
        "head_dim_kpe": rope.shape[2],
        "page_size": 1,
        "causal": False,
        "sm_scale": scale,
        "q_data_type": latent.dtype,
        "kv_data_type": kv_c.dtype,
    }
    inputs: dict[str, Any]
    if has_metadata(host):
        split = {"query_layout": "split", "kv_cache_layout": "split"}
        mode = {"lse_mode": "base2" if lse else "none"}
        plan |= {"metadata": host.function(METADATA).csr(**csr), **split, **mode}
        inputs = {"query": (latent, rope), "kv_cache": (kv_c[:, None], k_pe[:, None])}
    else:
        plan |= csr
        inputs = {
            "q_nope": latent,
            "q_pe": rope,
            "ckv_cache": kv_c[:, None],
            "kpe_cache": k_pe[:, None],
        }
    wrapper = _wrapper(host, latent.device)
    wrapper.plan(**plan)
    if not lse:
        out: Tensor = wrapper.run(**inputs)
        return out, None
    out, base2 = wrapper.run(**inputs, return_lse=True)
    return out, base2 * LN2


def has_metadata(host: Host) -> bool:
    """Whether the wrapper of this version takes its metadata in one object."""
    return host.version() >= MLA_METADATA_VERSION


def _pages_of_one_token(rows: SlotRows) -> dict[str, Tensor]:
    """The selected tokens of all rows in a row, as the wrapper checks them: no lane without one."""
    tokens, width = rows.slots.shape
    device = rows.slots.device
    lane = torch.arange(width, dtype=torch.int32, device=device)
    indptr = torch.zeros(tokens + 1, dtype=torch.int32, device=device)
    torch.cumsum(rows.lengths, dim=0, dtype=torch.int32, out=indptr[1:])
    return {
        "qo_indptr": torch.arange(tokens + 1, dtype=torch.int32, device=device),
        "kv_indptr": indptr,
        "kv_indices": rows.slots[lane < rows.lengths[:, None]],
        "kv_len_arr": rows.lengths,
    }


def _wrapper(host: Host, device: torch.device) -> Any:
    return host.per_stream(
        device,
        WRAPPER,
        lambda: host.function(WRAPPER)(workspace(host, device), backend=SPARSE_BACKENDS[90]),
    )
