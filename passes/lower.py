"""Turn ops that no kernel took into the ATen ops that Inductor fuses by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from .. import fusion
from ..ops.hadamard import plain_hadamard
from ..ops.norm import layer_norm_reference, plain_layer_norm, rms_norm_reference, rounded
from ..ops.norm_rope import norm_rope_reference
from ..ops.rope import plain_rope, rope_reference
from ._edit import arguments, calls, inline, replace, value_of
from ._report import PassContext, PassReport


def lower_pass(graph: fx.Graph, context: PassContext) -> PassReport:
    """Inline ``rms_norm``, ``layer_norm``, ``rope``, and fused ops that no kernel makes faster.

    Invariant: what is inlined is the plain PyTorch that the op's reference runs, traced in
    Inductor's own decompositions, so that the value is the op's and the code is what Inductor would
    have made of it. A fused op that the model itself calls stays where the device's provider has a
    kernel for it, or where ``fuse="always"`` asks for the reference kernel. Attention that decides
    at run time, selections, cache writes and kernels stay ops.
    """
    report = PassReport("lower")
    semantic, fused = _semantic(), _fused()
    for node in calls(graph, *semantic):
        _inline(graph, node, semantic[node.target], context)
        report.matched += 1
    for node in calls(graph, *fused):
        which, body = fused[node.target]
        reason = _reason_to_inline(which, node, context)
        if reason is not None:
            _inline(graph, node, body, context)
            report.rewrite(node, f"its parts: {reason}")
    return report


def _inline(graph: fx.Graph, node: fx.Node, body: Callable[..., Any], context: PassContext) -> None:
    replace(node, inline(graph, node, body, list(arguments(node).values()), context.traces))


def _reason_to_inline(which: fusion.Fusion, node: fx.Node, context: PassContext) -> str | None:
    """Why Inductor does better with the parts of a fused op; None where it does not."""
    if context.options.fuse == "always":
        return None
    device = value_of(node.args[0]).device.type
    return fusion.reason_not_to_fuse(which, "auto", device)


def _semantic() -> dict[Any, Callable[..., Tensor]]:
    ops = torch.ops.dsafx
    return {
        ops.rms_norm.default: rms_norm_reference,
        ops.layer_norm.default: layer_norm_reference,
        ops.rope.default: rope_reference,
    }


def _fused() -> dict[Any, tuple[fusion.Fusion, Callable[..., tuple[Tensor, ...]]]]:
    ops = torch.ops.dsafx
    return {
        ops.norm_rope.default: (fusion.NORM_ROPE, norm_rope_reference),
        ops.norm_rope_index.default: (fusion.NORM_ROPE_INDEX, _norm_rope_index),
    }


def _norm_rope_index(
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
    hadamard: bool,
) -> tuple[Tensor, ...]:
    wide = plain_layer_norm(index_k, index_weight, index_bias, index_eps)
    width = 2 * cos.shape[1]
    parts = (plain_rope(wide[:, :width], cos, sin, index_style), wide[:, width:])
    if hadamard:
        key = rounded(plain_hadamard(torch.cat(parts, dim=-1)), index_k.dtype)
    else:
        # Rounded before they are joined, which is the same and saves Inductor a wide buffer.
        key = torch.cat([part.to(index_k.dtype) for part in parts], dim=-1)
    latents = norm_rope_reference(q_c, q_weight, kv_c, kv_weight, k_pe, cos, sin, eps, style)
    return (*latents, key)
