"""The norms and rotations between a layer's down-projections and its caches, as one kernel.

The references are composed of the same plain functions as ``rms_norm``, ``layer_norm`` and
``rope``. In float32 and float64 the fused ops therefore equal the separate ones bit for bit. In a
narrower dtype they differ in one place: the index key is rounded once, at the end, and not between
LayerNorm and RoPE (nor before the Hadamard transform); q_c, kv_c and k_pe pass through one
operation each and stay bit-equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._checks import require_floating, require_rank, require_same_device, require_size
from ._library import define_op
from .hadamard import plain_hadamard, require_power_of_two
from .norm import (
    plain_layer_norm,
    plain_layer_norm_backward,
    plain_rms_norm,
    plain_rms_norm_backward,
    require_normalizable,
    rounded,
)
from .rope import plain_rope, plain_rope_backward, require_style, require_tables


def norm_rope(
    q_c: Tensor,
    q_weight: Tensor,
    kv_c: Tensor,
    kv_weight: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    style: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm of both latents and RoPE of the key's rotated part.

    Args:
        q_c: [T, q_lora], the query latent. kv_c: [T, L], the key-value latent.
        q_weight, kv_weight: [q_lora] and [L], of any floating dtype.
        k_pe: [T, R], the part of the key that RoPE rotates.
        cos, sin: [T, R/2], see ``rope``.
        eps: of both norms.
        style: RoPE style of ``k_pe``, see ``rope``.

    Returns:
        New q_c, kv_c and k_pe, each like its input, contiguous, and rounded once.

    Raises:
        ValueError: an unknown style, wrong ranks or sizes, two devices, or a table that
            requires a gradient.
        TypeError: a tensor is not floating point.
    """
    _check(q_c, q_weight, kv_c, kv_weight, k_pe, cos, sin, style)
    out: tuple[Tensor, Tensor, Tensor] = _norm_rope(
        q_c, q_weight, kv_c, kv_weight, k_pe, cos, sin, eps, style
    )
    return out


def norm_rope_index(
    q_c: Tensor,
    q_weight: Tensor,
    kv_c: Tensor,
    kv_weight: Tensor,
    k_pe: Tensor,
    index_k: Tensor,
    index_weight: Tensor,
    index_bias: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    style: str,
    index_eps: float,
    index_style: str,
    hadamard: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``norm_rope`` plus the index key: LayerNorm, then RoPE of its first R dimensions.

    Args:
        q_c, q_weight, kv_c, kv_weight, k_pe, cos, sin, eps, style: see ``norm_rope``.
        index_k: [T, D], the indexer's key before its norm, D >= R.
        index_weight, index_bias: [D], of any floating dtype.
        index_eps: of the LayerNorm.
        index_style: RoPE style of ``index_k``, which may differ from ``style``.
        hadamard: end with the orthonormal Hadamard transform of ``index_k`` (the query must be
            transformed too).

    Returns:
        New q_c, kv_c, k_pe and index_k, each like its input, contiguous. ``index_k`` is rounded
        once, after the last step: in bfloat16 or float16 that is closer to the exact value than
        ``rope(layer_norm(...))``, which rounds in between.

    Raises:
        ValueError: an unknown style, wrong ranks or sizes, two devices, a table that requires a
            gradient, or ``hadamard`` with a D that is not a power of two.
        TypeError: a tensor is not floating point.
    """
    _check(q_c, q_weight, kv_c, kv_weight, k_pe, cos, sin, style)
    require_style("index_style", index_style)
    require_rank("index_k", index_k, 2)
    require_normalizable("index_k", index_k, index_weight=index_weight, index_bias=index_bias)
    require_size("index_k", index_k, 0, q_c.shape[0], "one row per token")
    if index_k.shape[1] < 2 * cos.shape[1]:
        raise ValueError(
            f"index_k must have at least {2 * cos.shape[1]} columns (twice those of cos), "
            f"got shape {tuple(index_k.shape)}"
        )
    if hadamard:
        require_power_of_two("the width of index_k", index_k.shape[1])
    require_same_device(q_c=q_c, index_k=index_k)
    out: tuple[Tensor, Tensor, Tensor, Tensor] = _norm_rope_index(
        q_c,
        q_weight,
        kv_c,
        kv_weight,
        k_pe,
        index_k,
        index_weight,
        index_bias,
        cos,
        sin,
        eps,
        style,
        index_eps,
        index_style,
        hadamard,
    )
    return out


def _check(
    q_c: Tensor,
    q_weight: Tensor,
    kv_c: Tensor,
    kv_weight: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    style: str,
) -> None:
    require_style("style", style)
    for name, tensor in (("q_c", q_c), ("kv_c", kv_c), ("k_pe", k_pe)):
        require_rank(name, tensor, 2)
        require_size(name, tensor, 0, q_c.shape[0], "one row per token")
    require_normalizable("q_c", q_c, q_weight=q_weight)
    require_normalizable("kv_c", kv_c, kv_weight=kv_weight)
    require_floating("k_pe", k_pe)
    require_tables(cos, sin, rows=q_c.shape[0])
    require_size("k_pe", k_pe, 1, 2 * cos.shape[1], "twice the columns of cos")
    require_same_device(q_c=q_c, kv_c=kv_c, k_pe=k_pe, cos=cos, sin=sin)


def _plain_index_key(
    index_k: Tensor,
    weight: Tensor,
    bias: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    style: str,
    hadamard: bool,
) -> Tensor:
    """The index key from its projection, without the final rounding."""
    rotated = 2 * cos.shape[1]
    normed = plain_layer_norm(index_k, weight, bias, eps)
    key = torch.cat((plain_rope(normed[:, :rotated], cos, sin, style), normed[:, rotated:]), dim=-1)
    return plain_hadamard(key) if hadamard else key


def _plain_index_key_backward(
    grad: Tensor | None, cos: Tensor, sin: Tensor, style: str, hadamard: bool
) -> Tensor | None:
    """Gradient of the LayerNorm's output."""
    if grad is None:
        return None
    if hadamard:
        grad = plain_hadamard(grad)
    rotated = 2 * cos.shape[1]
    return torch.cat(
        (plain_rope_backward(grad[:, :rotated], cos, sin, style), grad[:, rotated:]), dim=-1
    )


def norm_rope_reference(
    q_c: Tensor,
    q_weight: Tensor,
    kv_c: Tensor,
    kv_weight: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    style: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """What ``norm_rope`` means, in plain PyTorch."""
    return (
        rounded(plain_rms_norm(q_c, q_weight, eps), q_c.dtype),
        rounded(plain_rms_norm(kv_c, kv_weight, eps), kv_c.dtype),
        rounded(plain_rope(k_pe, cos, sin, style), k_pe.dtype),
    )


def _norm_rope_fake(
    q_c: Tensor, q_weight: Tensor, kv_c: Tensor, kv_weight: Tensor, k_pe: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    return q_c.new_empty(q_c.shape), kv_c.new_empty(kv_c.shape), k_pe.new_empty(k_pe.shape)


def _norm_rope_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.eps, ctx.style = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _norm_rope_backward(
    ctx: Any, grad_q: Tensor | None, grad_kv: Tensor | None, grad_pe: Tensor | None
) -> tuple[Tensor | None, ...]:
    grads = _latent_grads(ctx, ctx.saved_tensors, (grad_q, grad_kv, grad_pe))
    return (*grads, None, None, None, None)


def _latent_grads(
    ctx: Any, saved: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Gradients of q_c, q_weight, kv_c, kv_weight and k_pe, which both ops take first."""
    q_c, q_weight, kv_c, kv_weight, k_pe = saved[:5]
    cos, sin = saved[-2:]
    grad_q, grad_kv, grad_pe = grads
    needs = ctx.needs_input_grad
    grads_q = plain_rms_norm_backward(grad_q, q_c, q_weight, ctx.eps, needs[0:2])
    grads_kv = plain_rms_norm_backward(grad_kv, kv_c, kv_weight, ctx.eps, needs[2:4])
    grad_k_pe = None
    if grad_pe is not None and needs[4]:
        grad_k_pe = plain_rope_backward(grad_pe, cos, sin, ctx.style).to(k_pe.dtype)
    return (*grads_q, *grads_kv, grad_k_pe)


def _norm_rope_index_reference(
    q_c: Tensor,
    q_weight: Tensor,
    kv_c: Tensor,
    kv_weight: Tensor,
    k_pe: Tensor,
    index_k: Tensor,
    index_weight: Tensor,
    index_bias: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    style: str,
    index_eps: float,
    index_style: str,
    hadamard: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    key = _plain_index_key(
        index_k, index_weight, index_bias, cos, sin, index_eps, index_style, hadamard
    )
    return (
        *norm_rope_reference(q_c, q_weight, kv_c, kv_weight, k_pe, cos, sin, eps, style),
        rounded(key, index_k.dtype),
    )


def _norm_rope_index_fake(
    q_c: Tensor,
    q_weight: Tensor,
    kv_c: Tensor,
    kv_weight: Tensor,
    k_pe: Tensor,
    index_k: Tensor,
    *rest: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        *_norm_rope_fake(q_c, q_weight, kv_c, kv_weight, k_pe),
        index_k.new_empty(index_k.shape),
    )


def _norm_rope_index_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.eps, ctx.style, ctx.index_eps, ctx.index_style, ctx.hadamard = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _norm_rope_index_backward(
    ctx: Any,
    grad_q: Tensor | None,
    grad_kv: Tensor | None,
    grad_pe: Tensor | None,
    grad_index: Tensor | None,
) -> tuple[Tensor | None, ...]:
    *_, index_k, weight, bias, cos, sin = ctx.saved_tensors
    grads = _latent_grads(ctx, ctx.saved_tensors, (grad_q, grad_kv, grad_pe))
    grad_normed = _plain_index_key_backward(grad_index, cos, sin, ctx.index_style, ctx.hadamard)
    needs = ctx.needs_input_grad[5:8]
    grads_index = plain_layer_norm_backward(
        grad_normed, index_k, weight, bias, ctx.index_eps, needs
    )
    return (*grads, *grads_index, *[None] * 7)


_norm_rope = define_op(
    "norm_rope(Tensor q_c, Tensor q_weight, Tensor kv_c, Tensor kv_weight, Tensor k_pe, "
    "Tensor cos, Tensor sin, float eps, str style) -> (Tensor, Tensor, Tensor)",
    reference=norm_rope_reference,
    fake=_norm_rope_fake,
    backward=_norm_rope_backward,
    setup_context=_norm_rope_setup,
)

_norm_rope_index = define_op(
    "norm_rope_index(Tensor q_c, Tensor q_weight, Tensor kv_c, Tensor kv_weight, Tensor k_pe, "
    "Tensor index_k, Tensor index_weight, Tensor index_bias, Tensor cos, Tensor sin, float eps, "
    "str style, float index_eps, str index_style, bool hadamard=False) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    reference=_norm_rope_index_reference,
    fake=_norm_rope_index_fake,
    backward=_norm_rope_index_backward,
    setup_context=_norm_rope_index_setup,
)
