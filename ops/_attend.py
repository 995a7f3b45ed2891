"""What ``mla_attention`` is made of: one composition around a kernel op for each route."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

# Importing the kernel ops registers them, which the calls below rely on.
from . import dense_mha as _dense_mha  # noqa: F401
from . import masked_mha as _masked_mha  # noqa: F401
from . import routing
from . import sparse_mqa as _sparse_mqa  # noqa: F401


def attend(
    route: routing.Route,
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_b_weight: Tensor,
    indices: Tensor | None,
    ks: Tensor,
    ke: Tensor,
    max_kv_len: int,
    scale: float,
    bound: int | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """``mla_attention`` on one fixed route, as ATen and a kernel op; the op and the passes both
    use it.

    Shapes and results are those of ``mla_attention``; ``bound`` is the premise of a specialised
    graph.
    """
    dtype = promoted_dtype(q_nope, q_pe, kv_c, k_pe)
    q_nope, q_pe, kv_c, k_pe = (x.to(dtype) for x in (q_nope, q_pe, kv_c, k_pe))
    heads, nope = q_nope.shape[1], q_nope.shape[2]
    width = kv_b_weight.shape[0] // heads
    weight = kv_b_weight.to(dtype)
    if route is routing.Route.SPARSE_MQA:
        w_k, w_v = weight.view(heads, width, kv_c.shape[1]).tensor_split([nope], dim=1)
        absorbed = torch.bmm(q_nope.transpose(0, 1), w_k).transpose(0, 1)
        latent, lse = torch.ops.dsafx.sparse_mqa.default(
            torch.cat([absorbed, q_pe], dim=-1),
            torch.cat([kv_c, k_pe], dim=-1),
            indices,
            ks,
            scale,
            kv_c.shape[1],
            return_lse,
            batch_invariant,
        )
        out = torch.bmm(latent.transpose(0, 1), w_v.transpose(1, 2)).transpose(0, 1)
        return out.contiguous(), lse
    expanded = torch.mm(kv_c, weight.t()).view(kv_c.shape[0], heads, width)
    k_nope, v = expanded.tensor_split([nope], dim=-1)
    q = torch.cat([q_nope, q_pe], dim=-1)
    k = torch.cat([k_nope, k_pe[:, None].expand(-1, heads, -1)], dim=-1)
    if route is routing.Route.DENSE_MHA:
        return torch.ops.dsafx.dense_mha.default(
            q, k, v, ks, ke, max_kv_len, scale, bound, return_lse
        )
    return torch.ops.dsafx.masked_mha.default(q, k, v, indices, ks, ke, scale, return_lse)


def promoted_dtype(*tensors: Tensor) -> torch.dtype:
    """The widest dtype among ``tensors``."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
