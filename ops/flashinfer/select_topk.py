"""``select_topk`` on FlashInfer's top-k with a row's start and length."""

from __future__ import annotations

import torch
from torch import Tensor

from .._blocks import check_interval_values
from .._host import Host
from ..indices import compact
from ._limits import (
    BELOW_VERSION,
    MOST_CUB_COLUMNS,
    MOST_TOPK,
    TIE_BREAK_SMALL,
    TOPK_CUB,
    TOPK_NATIVE,
)
from ._probe import unavailable

CALL = "flashinfer.top_k_ragged_transform"

_LOWEST = torch.finfo(torch.float32).min


def supports(
    host: Host, scores: Tensor, ks: Tensor, ke: Tensor, topk: int, mask: Tensor | None = None
) -> str | None:
    """None where the call is served, else the reason why not."""
    if mask is not None:
        return "no kernel takes a mask: a hidden key would need a score below that of NaN"
    reason = unavailable(host, CALL)
    if reason is not None:
        return reason
    architecture = host.architecture(scores.device)
    if architecture not in TOPK_NATIVE:
        if host.version() < TOPK_CUB.get(architecture, BELOW_VERSION):
            return f"no kernel of this version breaks ties by position on sm_{architecture}"
        if scores.shape[1] > MOST_CUB_COLUMNS:
            return f"at most {MOST_CUB_COLUMNS} scores a row, got {scores.shape[1]}"
    return None if topk <= MOST_TOPK else f"a top-k of at most {MOST_TOPK}, got {topk}"


@torch.no_grad()
def run(
    host: Host, scores: Tensor, ks: Tensor, ke: Tensor, topk: int, mask: Tensor | None = None
) -> Tensor:
    """``select_topk``; the kernel promises no order of what it selects, so that is sorted.

    The one difference to the reference: the kernel has no place below -inf for NaN, so that -inf
    takes the lowest finite score, and ties with one that has it already.
    """
    check_interval_values(ks, ke, scores.shape[1])
    rows, columns = scores.shape
    if columns == 0 or rows == 0:
        return ks.new_full((rows, topk), -1)
    # -0.0 becomes 0.0, which it equals: the kernel compares bits.
    ranked = torch.nan_to_num(scores + 0.0, nan=-torch.inf, posinf=torch.inf, neginf=_LOWEST)
    starts = ks.clamp(0, columns)
    width = min(topk, columns)
    found: Tensor = host.function(CALL)(
        ranked,
        torch.zeros_like(ks),
        (ke.clamp(max=columns) - starts).clamp_(min=0),
        width,
        deterministic=False,
        tie_break=TIE_BREAK_SMALL,
        dsa_graph_safe=host.capturing() or host.architecture(scores.device) in TOPK_CUB,
        row_starts=starts,
    )
    return torch.nn.functional.pad(compact(found), (0, topk - width), value=-1)
