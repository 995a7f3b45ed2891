"""What ``mla_attention`` is made of: one composition around a kernel op for each route."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import routing
from .dense_mha import dense_mha
from .masked_mha import masked_mha
from .sparse_mla import sparse_mla


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
    """``mla_attention`` on one fixed route, as ATen around a kernel op.

    The body of the op and the passes both use it, so that they cannot differ. Shapes and results
    are those of ``mla_attention``; ``bound`` is the premise of a specialised graph.
    """
    dtype = promoted_dtype(q_nope, q_pe, kv_c, k_pe)
    q_nope, q_pe, kv_c, k_pe = (x.to(dtype) for x in (q_nope, q_pe, kv_c, k_pe))
    heads, nope = q_nope.shape[1], q_nope.shape[2]
    width = kv_b_weight.shape[0] // heads
    weight = kv_b_weight.to(dtype)
    if route is routing.Route.SPARSE_MQA:
        assert indices is not None
        by_head = weight.view(heads, width, kv_c.shape[1])
        absorbed = torch.bmm(q_nope.transpose(0, 1), by_head[:, :nope]).transpose(0, 1)
        latent, lse = sparse_mla(
            absorbed, q_pe, kv_c, k_pe, indices, ks, scale, return_lse, batch_invariant
        )
        out = torch.bmm(latent.transpose(0, 1), by_head[:, nope:].transpose(1, 2))
        return out.transpose(0, 1).contiguous(), lse
    expanded = torch.mm(kv_c, weight.t()).view(kv_c.shape[0], heads, width)
    k_nope, v = expanded[..., :nope], expanded[..., nope:]
    if route is routing.Route.DENSE_MHA:
        return dense_mha(
            q_nope, k_nope, v, ks, ke, max_kv_len, scale, bound, return_lse, q_pe, k_pe
        )
    assert indices is not None
    return masked_mha(q_nope, k_nope, v, indices, ks, ke, scale, return_lse, q_pe, k_pe)


def promoted_dtype(*tensors: Tensor) -> torch.dtype:
    """The widest dtype among ``tensors``."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
