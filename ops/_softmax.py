"""Softmax over keys of which some are hidden: what all attention references share."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_lse(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and natural-log LSE over the last dimension of ``scores``, where ``visible``.

    A row without a visible key has probability 0 everywhere and lse -inf (contract C12).
    """
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    shift = torch.where(lse.isneginf(), 0.0, lse)
    return (scores - shift[..., None]).exp(), lse


def softmax_backward(
    probabilities: Tensor, grad_probabilities: Tensor, grad_lse: Tensor | None
) -> Tensor:
    """Gradient of the scores: ``p * (dp - sum(p * dp) + dlse)``."""
    centre = (probabilities * grad_probabilities).sum(dim=-1, keepdim=True)
    if grad_lse is not None:
        centre = centre - grad_lse[..., None]
    return probabilities * (grad_probabilities - centre)
