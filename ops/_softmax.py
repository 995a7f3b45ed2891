"""Softmax over keys of which some are hidden: what all attention references share."""

from __future__ import annotations

import torch
from torch import Tensor

from ._dtypes import wide_dtype


def softmax_lse(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and natural-log LSE over the last dimension of ``scores``, where ``visible``.

    A row without a visible key has probability 0 everywhere and lse -inf (contract C12).
    """
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    shift = torch.where(lse.isneginf(), 0.0, lse)
    return (scores - shift[..., None]).exp(), lse


def wide_rows(x: Tensor, blind: Tensor) -> Tensor:
    """``x`` [t, ...] in the wide dtype, 0 in the rows that are ``blind`` [t].

    What a row without a visible key holds, and what flows back to it, may be NaN, and 0 * NaN would
    reach the gradients of keys.
    """
    return x.to(wide_dtype(x)).masked_fill(blind.view(-1, *[1] * (x.dim() - 1)), 0.0)


def softmax_backward(
    probabilities: Tensor, grad_probabilities: Tensor, grad_lse: Tensor | None
) -> Tensor:
    """Gradient of the scores: ``p * (dp - sum(p * dp) + dlse)``."""
    centre = (probabilities * grad_probabilities).sum(dim=-1, keepdim=True)
    if grad_lse is not None:
        centre = centre - grad_lse[..., None]
    return probabilities * (grad_probabilities - centre)
