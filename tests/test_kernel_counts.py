"""Inlined ops cost as many generated kernels as the same arithmetic in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache

from dsafx import ops

ROWS, LATENT, ROTATED, DIM, HEADS = 40, 64, 16, 48, 4


def operands(dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    angle = torch.randn(ROWS, ROTATED // 2)
    shapes = ((ROWS, LATENT), (ROWS, LATENT), (ROWS, ROTATED), (ROWS, DIM), (ROWS, HEADS, DIM))
    rows = [torch.randn(shape).to(dtype) for shape in shapes]
    weights = [torch.rand(size).to(dtype) for size in (LATENT, LATENT, DIM, DIM)]
    return (*rows, *weights, angle.cos(), angle.sin())


def semantic(
    q_c: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    index_k: Tensor,
    index_q: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    k_weight: Tensor,
    k_bias: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, ...]:
    """The norms and rotations of one layer with its indexer."""
    key = ops.layer_norm(index_k, k_weight, k_bias, 1e-6)
    turned = [
        torch.cat([ops.rope(x[..., :ROTATED], cos, sin, "half"), x[..., ROTATED:]], dim=-1)
        for x in (key, index_q)
    ]
    q_c, kv_c = ops.rms_norm(q_c, q_weight, 1e-6), ops.rms_norm(kv_c, kv_weight, 1e-6)
    return q_c, kv_c, ops.rope(k_pe, cos, sin, "interleaved"), *turned


def fused(
    q_c: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    index_k: Tensor,
    index_q: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    k_weight: Tensor,
    k_bias: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, ...]:
    """The same with the fused op, for which a CPU has no kernel."""
    query = torch.cat(
        [ops.rope(index_q[..., :ROTATED], cos, sin, "half"), index_q[..., ROTATED:]], dim=-1
    )
    norms = (q_c, q_weight, kv_c, kv_weight, k_pe, index_k, k_weight, k_bias)
    made = ops.norm_rope_index(*norms, cos, sin, 1e-6, "interleaved", 1e-6, "half")
    return *made, query


def plain(
    q_c: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    index_k: Tensor,
    index_q: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    k_weight: Tensor,
    k_bias: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, ...]:
    """The same as one writes it without this package."""

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (scaled * weight.float()).to(x.dtype)

    def rotate_first(x: Tensor) -> Tensor:
        angles = (cos, sin) if x.dim() == 2 else (cos[:, None], sin[:, None])
        first, second = x[..., :ROTATED].float().chunk(2, dim=-1)
        turned = (
            first * angles[0] - second * angles[1],
            second * angles[0] + first * angles[1],
        )
        return torch.cat([torch.cat(turned, dim=-1).to(x.dtype), x[..., ROTATED:]], dim=-1)

    centred = index_k.float() - index_k.float().mean(-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6)
    key = (scaled * k_weight.float() + k_bias.float()).to(index_k.dtype)
    first, second = k_pe.float().unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    k_pe = pairs.flatten(-2).to(k_pe.dtype)
    latents = rms_norm(q_c, q_weight), rms_norm(kv_c, kv_weight)
    return *latents, k_pe, rotate_first(key), rotate_first(index_q)


def kernels(
    function: Callable[..., Any], backend: str, dtype: torch.dtype, dynamic: bool
) -> tuple[int, tuple[Tensor, ...]]:
    """How many kernels Inductor generates for ``function``, and what they compute."""
    torch._dynamo.reset()
    metrics.reset()
    with fresh_cache(), torch.no_grad():
        results = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(
            *operands(dtype)
        )
    return metrics.generated_kernel_count, results


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_semantic_and_fused_ops_cost_the_kernels_of_plain_pytorch(
    dtype: torch.dtype, dynamic: bool
):
    theirs, expected = kernels(plain, "inductor", dtype, dynamic)
    for function in (semantic, fused):
        mine, ours = kernels(function, "dsafx", dtype, dynamic)
        assert mine == theirs > 0, function.__name__
        # The fused index key is rounded once where the plain one is rounded twice.
        rounding = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours, expected, rtol=rounding + 1e-5, atol=rounding + 1e-5)
