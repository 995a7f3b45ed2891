"""Fuse the norms and rotations between one layer's down-projections and its caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .. import fusion
from ._edit import calls, value_of
from ._norm_rope import NormRope, find, rewrite
from ._report import PassContext, PassReport
from ._torch_compat import is_erased


def fuse_norm_rope_pass(graph: fx.Graph, context: PassContext) -> PassReport:
    """Rewrite ``rms_norm``, ``rms_norm`` and ``rope`` of one layer, and its index key, to one op.

    Invariant: each output is made of the same operands as before, so that the values are those of
    the parts but for the rounding that the fusion declares. Which parts go together only decides
    what runs in one launch; where several choices fit, nothing is fused. The fused op stands where
    the first part stood and its operands move above it, which is right only while nothing in
    between writes; so a write there declines. A functionalised write makes a new value and is none.
    """
    report = PassReport("fuse_norm_rope")
    for rope in calls(graph, torch.ops.dsafx.rope.default):
        if is_erased(rope):
            continue
        group = find(rope)
        if group is None:
            continue
        if isinstance(group, str):
            report.decline(rope, group)
            continue
        which = fusion.NORM_ROPE_INDEX if group.has_index_key else fusion.NORM_ROPE
        device = value_of(rope).device.type
        reason = fusion.reason_not_to_fuse(which, context.options.fuse, device)
        reason = reason or _fuse(graph, group)
        if reason is None:
            report.rewrite(rope, f"part of {which.op}")
        else:
            report.decline(rope, reason)
    return report


def _fuse(graph: fx.Graph, group: NormRope) -> str | None:
    """Rewrite one group; the reason where it must stay."""
    ops = torch.ops.dsafx
    op = ops.norm_rope_index.default if group.has_index_key else ops.norm_rope.default

    def fused(operands: dict[str, Any]) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = op(**operands)
        return results

    outcome = rewrite(graph, group, fused, max(group.parts))
    return outcome if isinstance(outcome, str) else None
