"""The rotation of the indexer's queries and keys, which keep their rotated dims first."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from .config import DSAConfig


def rotate_index(x: Tensor, cos: Tensor, sin: Tensor, config: DSAConfig) -> Tensor:
    """``x`` [T, D] or [T, H, D] with RoPE on its first R dims, in the style of the model's indexer.

    Args:
        x: keys or queries of the indexer.
        cos, sin: [T, R / 2], one angle a pair.
        config: of the model.
    """
    rotated, passed = torch.split(
        x, [config.qk_rope_head_dim, config.index_head_dim - config.qk_rope_head_dim], dim=-1
    )
    turned = ops.rope(rotated, cos, sin, config.index_rope_style)
    return torch.cat((turned, passed), dim=-1)
