"""Merge two attention results over disjoint keys, as chunked context and sharded keys need it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._checks import (
    require_dtype,
    require_floating,
    require_rank,
    require_same_device,
    require_size,
)
from ._library import define_op

LSE_DTYPES = (torch.float32, torch.float64)


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """The attention over the keys of both sides, from the result over each side.

    An ``lse`` of -inf marks a side without keys: it changes nothing, whatever its ``out`` holds
    (NaN included). +inf, which some kernels write for such a row, means the same. A row without
    keys on both sides gives out = 0 and lse = -inf (contract C12), with zero gradients.

    Args:
        out_a, out_b: [T, N, V] floating point, softmax outputs.
        lse_a, lse_b: [T, N] float32 or float64, natural logarithm of the sums of exponentials.

    Returns:
        out [T, N, V] in the promoted dtype of ``out_a`` and ``out_b``; lse [T, N] float32, or
        float64 if that promoted dtype is float64. Both contiguous; computed in lse's dtype.

    Raises:
        ValueError: wrong ranks or sizes, or two devices.
        TypeError: an out is not floating point, or an lse not float32 or float64.
    """
    require_floating("out_a", out_a)
    require_rank("out_a", out_a, 3)
    require_floating("out_b", out_b)
    require_rank("out_b", out_b, 3)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        require_dtype(name, lse, LSE_DTYPES)
        require_rank(name, lse, 2)
    for dim, what in enumerate(("tokens of out_a", "heads of out_a", "width of out_a")):
        require_size("out_b", out_b, dim, out_a.shape[dim], what)
        if dim < 2:
            require_size("lse_a", lse_a, dim, out_a.shape[dim], what)
            require_size("lse_b", lse_b, dim, out_a.shape[dim], what)
    require_same_device(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    merged: tuple[Tensor, Tensor] = _op(out_a, lse_a, out_b, lse_b)
    return merged


def _dtypes(out_a: Tensor, out_b: Tensor) -> tuple[torch.dtype, torch.dtype]:
    out = torch.promote_types(out_a.dtype, out_b.dtype)
    return out, torch.promote_types(out, torch.float32)


def _shares(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The part of each side in the merged softmax, and the merged lse, without inf - inf."""
    lse_a = torch.where(lse_a == torch.inf, -torch.inf, lse_a)
    lse_b = torch.where(lse_b == torch.inf, -torch.inf, lse_b)
    top = torch.maximum(lse_a, lse_b)
    empty = top == -torch.inf
    shift = torch.where(empty, 0.0, top)
    weight_a, weight_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    total = torch.where(empty, 1.0, weight_a + weight_b)
    lse = torch.where(empty, top, shift + torch.log(total))
    return weight_a / total, weight_b / total, lse


def _masked(out: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    """``out`` with zeros where its side has no keys: 0 * NaN would be NaN."""
    return torch.where(torch.isinf(lse)[..., None], 0.0, out.to(dtype))


def _reference(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    dtype, work = _dtypes(out_a, out_b)
    lse_a, lse_b = lse_a.to(work), lse_b.to(work)
    share_a, share_b, lse = _shares(lse_a, lse_b)
    out_a, out_b = _masked(out_a, lse_a, work), _masked(out_b, lse_b, work)
    out = share_a[..., None] * out_a + share_b[..., None] * out_b
    return out.to(dtype).contiguous(), lse.contiguous()


def _fake(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    dtype, work = _dtypes(out_a, out_b)
    return out_a.new_empty(out_a.shape, dtype=dtype), lse_a.new_empty(lse_a.shape, dtype=work)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    saved_out_a, saved_lse_a, saved_out_b, saved_lse_b = ctx.saved_tensors
    _, work = _dtypes(saved_out_a, saved_out_b)
    lse_a, lse_b = saved_lse_a.to(work), saved_lse_b.to(work)
    share_a, share_b, _ = _shares(lse_a, lse_b)
    out_a_grad = out_b_grad = None
    lse_a_grad, lse_b_grad = torch.zeros_like(lse_a), torch.zeros_like(lse_b)
    if grad_out is not None:
        grad_out = grad_out.to(work)
        out_a_grad = (share_a[..., None] * grad_out).to(saved_out_a.dtype)
        out_b_grad = (share_b[..., None] * grad_out).to(saved_out_b.dtype)
        difference = _masked(saved_out_a, lse_a, work) - _masked(saved_out_b, lse_b, work)
        # A softmax over two sides: raising one lse moves the output from the other side to it.
        pull = share_a * share_b * (grad_out * difference).sum(-1)
        lse_a_grad, lse_b_grad = pull, -pull
    if grad_lse is not None:
        lse_a_grad = lse_a_grad + share_a * grad_lse.to(work)
        lse_b_grad = lse_b_grad + share_b * grad_lse.to(work)
    grads = (
        out_a_grad,
        lse_a_grad.to(saved_lse_a.dtype),
        out_b_grad,
        lse_b_grad.to(saved_lse_b.dtype),
    )
    return tuple(g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=True))


_op = define_op(
    "merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
)
