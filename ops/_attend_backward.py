"""Gradients of ``mla_attention``: each route's products around the gradient of its kernel op."""

from __future__ import annotations

import torch
from torch import Tensor

from . import routing
from ._attend import promoted_dtype
from .dense_mha import dense_mha_backward
from .masked_mha import masked_mha_backward
from .sparse_mla import sparse_mla, sparse_mla_backward


def attend_backward(
    route: routing.Route,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_b_weight: Tensor,
    indices: Tensor | None,
    ks: Tensor,
    ke: Tensor,
    scale: float,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the five operands that ``attend`` multiplies, in its order and their dtypes.

    What the forward made is made again as far as gradients need it, and nothing else of it: the
    output of sparse attention for the weight alone. Without ``weight_grad`` the last is empty.
    """
    operands = (q_nope, q_pe, kv_c, k_pe)
    dtype = promoted_dtype(*operands)
    q_nope, q_pe, kv_c, k_pe = (x.to(dtype) for x in operands)
    by_head = kv_b_weight.to(dtype).view(q_nope.shape[1], -1, kv_c.shape[1])
    if route is routing.Route.SPARSE_MQA:
        assert indices is not None
        *grads, grad_weight = _sparse(
            grad_out, grad_lse, q_nope, q_pe, kv_c, k_pe, by_head, indices, ks, scale, weight_grad
        )
    else:
        *grads, grad_weight = _expanded(
            grad_out,
            grad_lse,
            q_nope,
            q_pe,
            kv_c,
            k_pe,
            by_head,
            None if route is routing.Route.DENSE_MHA else indices,
            ks,
            ke,
            scale,
            weight_grad,
        )
    grad_q_nope, grad_q_pe, grad_kv_c, grad_k_pe = (
        grad.to(x.dtype).contiguous() for grad, x in zip(grads, operands, strict=True)
    )
    return grad_q_nope, grad_q_pe, grad_kv_c, grad_k_pe, grad_weight.to(kv_b_weight.dtype)


def _sparse(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    by_head: Tensor,
    indices: Tensor,
    ks: Tensor,
    scale: float,
    weight_grad: bool,
) -> tuple[Tensor, ...]:
    up_k, up_v = by_head.split([q_nope.shape[2], grad_out.shape[2]], dim=1)
    absorbed = torch.bmm(q_nope.transpose(0, 1), up_k).transpose(0, 1)
    grad_latent = torch.bmm(grad_out.transpose(0, 1), up_v).transpose(0, 1)
    grad_absorbed, grad_q_pe, grad_kv_c, grad_k_pe = sparse_mla_backward(
        grad_latent, grad_lse, absorbed, q_pe, kv_c, k_pe, indices, ks, scale
    )
    del grad_latent
    grad_q_nope = torch.bmm(grad_absorbed.transpose(0, 1), up_k.transpose(1, 2)).transpose(0, 1)
    grad_weight = by_head.new_empty(0)
    if weight_grad:
        latent, _ = sparse_mla(absorbed, q_pe, kv_c, k_pe, indices, ks, scale, return_lse=False)
        grad_up_k = torch.bmm(q_nope.permute(1, 2, 0), grad_absorbed.transpose(0, 1))
        grad_up_v = torch.bmm(grad_out.permute(1, 2, 0), latent.transpose(0, 1))
        grad_weight = torch.cat([grad_up_k, grad_up_v], dim=1).flatten(0, 1)
    return grad_q_nope, grad_q_pe, grad_kv_c, grad_k_pe, grad_weight


def _expanded(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    by_head: Tensor,
    indices: Tensor | None,
    ks: Tensor,
    ke: Tensor,
    scale: float,
    weight_grad: bool,
) -> tuple[Tensor, ...]:
    widths = [q_nope.shape[2], grad_out.shape[2]]
    expanded = torch.mm(kv_c, by_head.flatten(0, 1).t())
    k_nope, v = expanded.view(-1, *by_head.shape[:2]).split(widths, dim=2)
    operands = (grad_out, grad_lse, q_nope, k_nope, v)
    grads = (
        dense_mha_backward(*operands, ks, ke, scale, q_pe, k_pe)
        if indices is None
        else masked_mha_backward(*operands, indices, ks, ke, scale, q_pe, k_pe)
    )
    del expanded, k_nope, v, operands
    grad_q_nope, grad_k, grad_v, grad_q_pe, grad_k_pe = grads
    up_k, up_v = (part.flatten(0, 1) for part in by_head.split(widths, dim=1))
    grad_kv_c = torch.addmm(torch.mm(grad_k.flatten(1), up_k), grad_v.flatten(1), up_v)
    grad_weight = by_head.new_empty(0)
    if weight_grad:
        parts = (torch.mm(grad.flatten(1).t(), kv_c) for grad in (grad_k, grad_v))
        unflattened = [part.unflatten(0, (by_head.shape[0], -1)) for part in parts]
        grad_weight = torch.cat(unflattened, dim=1).flatten(0, 1)
    return grad_q_nope, grad_q_pe, grad_kv_c, grad_k_pe, grad_weight
