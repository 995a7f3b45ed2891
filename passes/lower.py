"""Turn semantic ops that no kernel took into the ATen ops that Inductor fuses by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ..ops.norm import plain_layer_norm, plain_rms_norm, rounded
from ..ops.rope import plain_rope
from ._edit import arguments, calls, inline, replace
from ._report import PassContext, PassReport


def lower_pass(graph: fx.Graph, context: PassContext) -> PassReport:
    """Inline ``rms_norm``, ``layer_norm`` and ``rope``.

    Invariant: what is inlined is the plain PyTorch that the op's reference runs, traced in
    Inductor's own decompositions, so that the value is the op's and the code is what Inductor would
    have made of it. Attention that decides at run time, selections and kernels stay ops.
    """
    report = PassReport("lower")
    bodies = _bodies()
    for node in calls(graph, *bodies):
        replace(node, inline(graph, node, bodies[node.target], list(arguments(node).values())))
        report.matched += 1
    return report


def _bodies() -> dict[Any, Callable[..., Tensor]]:
    ops = torch.ops.dsafx
    return {
        ops.rms_norm.default: _rms_norm,
        ops.layer_norm.default: _layer_norm,
        ops.rope.default: _rope,
    }


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rounded(plain_rms_norm(x, weight, eps), x.dtype)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return rounded(plain_layer_norm(x, weight, bias, eps), x.dtype)


def _rope(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    return rounded(plain_rope(x, cos, sin, style), x.dtype)
