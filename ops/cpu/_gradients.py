"""What the gradients of dense and sparse attention share: a tile, from scores to their gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def supports(grad_out: Tensor, *args: object) -> str | None:
    """None unless the gradient is float64."""
    return "float64 gradients are computed in float64" if grad_out.dtype == torch.float64 else None


def through_softmax(
    scores: Tensor, grad_out: Tensor, values: Tensor, grad_lse: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Probabilities, and the gradient of the products that ``scale`` makes into scores.

    Args:
        scores: [b, rows, keys] float32, -inf where hidden; overwritten.
        grad_out: [b, rows, V]; values: [b, keys, V].
        grad_lse: [b, rows] or None.
        scale: of the scores.

    Returns:
        Two tensors [b, rows, keys] float32; NaN in a row in which all is hidden.
    """
    probabilities = scores.softmax(dim=-1)
    torch.bmm(grad_out, values.transpose(1, 2), out=scores)
    grad = torch.ops.aten._softmax_backward_data(scores, probabilities, -1, torch.float32)
    if grad_lse is not None:
        grad.addcmul_(probabilities, grad_lse[..., None])
    return probabilities, grad.mul_(scale)
