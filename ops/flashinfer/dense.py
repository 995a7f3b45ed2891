"""``dense_mha`` on FlashInfer's ragged prefill."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._blocks import check_interval_values
from .._host import Host
from .._mha import joined
from ..causal_positions import require_premise
from ._limits import MOST_TOKENS, RAGGED_BACKENDS, RAGGED_DIMS, RAGGED_DTYPES
from ._probe import unavailable
from ._segments import Call, calls
from ._workspace import LN2, lse_bytes, workspace

WRAPPER = "flashinfer.BatchPrefillWithRaggedKVCacheWrapper"
RAGGED_CALL = "flashinfer.prefill.trtllm_ragged_attention_deepseek"


def supports(
    host: Host,
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
) -> str | None:
    """None where the call is served, else the reason why not."""
    reason = unavailable(host)
    if reason is not None:
        return reason
    architecture = host.architecture(q.device)
    if architecture not in RAGGED_BACKENDS:
        return f"FlashInfer has no ragged prefill for sm_{architecture}"
    if q.dtype not in RAGGED_DTYPES:
        return f"no kernel for {q.dtype}"
    dims = (q.shape[2] + (0 if q_pe is None else q_pe.shape[2]), v.shape[2])
    if dims not in RAGGED_DIMS[architecture]:
        return f"no kernel for head dims {dims[0]} and {dims[1]} on sm_{architecture}"
    if host.capturing():
        return "intervals are read on the host, which a CUDA graph cannot record"
    return host.lacks(RAGGED_CALL if architecture == 100 else WRAPPER)


def dense_mha(
    host: Host,
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
    """``dense_mha`` in as few calls as the intervals allow; copies them to the host."""
    require_premise(max_kv_len, bound)
    check_interval_values(ks, ke, k.shape[0], max_kv_len)
    q, k = joined(q, k, q_pe, k_pe)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = q.new_zeros((q.shape[0], q.shape[1], v.shape[2]))
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
    attend = _trtllm_gen if host.architecture(q.device) == 100 else _wrapper
    for call in calls(ks, ke, MOST_TOKENS):
        rows, keys = slice(call.start, call.stop), slice(call.first, call.last)
        attend(host, q[rows], k[keys], v[keys], call, scale, out[rows], lse[rows])
    return out, lse.mul_(LN2) if return_lse else lse.new_empty(0)


def _wrapper(
    host: Host, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float, out: Tensor, lse: Tensor
) -> None:
    """Fill ``out`` and ``lse``, base 2, through the planned wrapper of SM80, SM90 and SM120."""

    def make() -> Any:
        backend = RAGGED_BACKENDS[host.architecture(q.device)]
        return host.function(WRAPPER)(workspace(host, q.device), "NHD", backend=backend)

    wrapper = host.per_stream(q.device, WRAPPER, make)
    wrapper.plan(
        torch.tensor(call.rows, dtype=torch.int32),
        torch.tensor(call.keys, dtype=torch.int32),
        q.shape[1],
        k.shape[1],
        q.shape[2],
        head_dim_vo=v.shape[2],
        causal=call.causal,
        sm_scale=scale,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )
    wrapper.run(q, k, v, out=out, lse=lse, return_lse=True)


def _trtllm_gen(
    host: Host, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float, out: Tensor, lse: Tensor
) -> None:
    """Fill ``out`` and ``lse``, base 2, through trtllm-gen on SM100."""
    rows = torch.tensor(call.rows, dtype=torch.int32)
    keys = torch.tensor(call.keys, dtype=torch.int32)
    longest_q, longest_k = call.longest()
    host.function(RAGGED_CALL)(
        query=q,
        key=k,
        value=v,
        workspace_buffer=workspace(host, q.device, lse_bytes(q.shape[1], call.requests, longest_q)),
        seq_lens=keys.diff().to(q.device),
        max_q_len=longest_q,
        max_kv_len=longest_k,
        bmm1_scale=scale,
        bmm2_scale=1.0,
        o_sf_scale=1.0,
        batch_size=call.requests,
        window_left=-1,
        cum_seq_lens_q=rows.to(q.device),
        cum_seq_lens_kv=keys.to(q.device),
        enable_pdl=False,
        is_causal=call.causal,
        return_lse=True,
        out=out,
        lse=lse,
        # Without these, 0.6.18 copies the lengths back to look for empty requests.
        q_seq_lens_cpu=rows.diff(),
        kv_seq_lens_cpu=keys.diff(),
    )
