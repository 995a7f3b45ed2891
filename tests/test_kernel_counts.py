"""Inlined ops cost as many generated kernels as the same arithmetic in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache

from dsafx import ops

ROWS, LATENT, ROTATED, DIM, HEADS = 40, 64, 16, 48, 4
Parts: TypeAlias = dict[str, Tensor]


def operands(dtype: torch.dtype) -> Parts:
    torch.manual_seed(0)
    angle = torch.randn(ROWS, ROTATED // 2)
    rows = {"q_c": (LATENT,), "kv_c": (LATENT,), "k_pe": (ROTATED,), "index_k": (DIM,)}
    rows["index_q"] = (HEADS, DIM)
    weights = {"q_weight": LATENT, "kv_weight": LATENT, "k_weight": DIM, "k_bias": DIM}
    return {
        **{name: torch.randn(ROWS, *shape).to(dtype) for name, shape in rows.items()},
        **{name: torch.rand(size).to(dtype) for name, size in weights.items()},
        "cos": angle.cos(),
        "sin": angle.sin(),
    }


def semantic(a: Parts) -> tuple[Tensor, ...]:
    """The norms and rotations of one layer with its indexer."""
    cos, sin = a["cos"], a["sin"]
    key = ops.layer_norm(a["index_k"], a["k_weight"], a["k_bias"], 1e-6)
    turned = [
        torch.cat([ops.rope(x[..., :ROTATED], cos, sin, "half"), x[..., ROTATED:]], dim=-1)
        for x in (key, a["index_q"])
    ]
    q_c = ops.rms_norm(a["q_c"], a["q_weight"], 1e-6)
    kv_c = ops.rms_norm(a["kv_c"], a["kv_weight"], 1e-6)
    return q_c, kv_c, ops.rope(a["k_pe"], cos, sin, "interleaved"), *turned


def fused(a: Parts) -> tuple[Tensor, ...]:
    """The same with the fused op, for which a CPU has no kernel."""
    cos, sin, index_q = a["cos"], a["sin"], a["index_q"]
    query = torch.cat(
        [ops.rope(index_q[..., :ROTATED], cos, sin, "half"), index_q[..., ROTATED:]], dim=-1
    )
    latents = (a["q_c"], a["q_weight"], a["kv_c"], a["kv_weight"], a["k_pe"])
    norms = (*latents, a["index_k"], a["k_weight"], a["k_bias"])
    made = ops.norm_rope_index(*norms, cos, sin, 1e-6, "interleaved", 1e-6, "half")
    return *made, query


def plain(a: Parts) -> tuple[Tensor, ...]:
    """The same as one writes it without this package."""
    cos, sin, index_k, k_pe = a["cos"], a["sin"], a["index_k"], a["k_pe"]

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
    key = (scaled * a["k_weight"].float() + a["k_bias"].float()).to(index_k.dtype)
    first, second = k_pe.float().unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    k_pe = pairs.flatten(-2).to(k_pe.dtype)
    latents = rms_norm(a["q_c"], a["q_weight"]), rms_norm(a["kv_c"], a["kv_weight"])
    return *latents, k_pe, rotate_first(key), rotate_first(a["index_q"])


def kernels(
    function: Callable[..., Any], backend: str, dtype: torch.dtype, dynamic: bool
) -> tuple[int, tuple[Tensor, ...]]:
    """How many kernels Inductor generates for ``function``, and what they compute."""
    torch._dynamo.reset()
    metrics.reset()
    with fresh_cache(), torch.no_grad():
        results = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(
            operands(dtype)
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
