"""A tiny packed layer of each family, and what one step of it reads."""

from __future__ import annotations

from typing import Any

import torch
from _tiny import TOPK, deepseek_config, glm_config
from torch import Tensor

from dsafx import ops
from dsafx.models.config import DSAConfig
from dsafx.models.layer import DSAAttention

CAPACITY = 64


def build(
    kind: type[DSAAttention] = DSAAttention, family: str = "glm", with_indexer: bool = True
) -> DSAAttention:
    """A layer of class ``kind``; one without an indexer reads the selection of another."""
    torch.manual_seed(0)
    shared = {"indexer_types": ["full", "shared", "full", "full"]}
    config = glm_config(**shared) if family == "glm" else deepseek_config()
    return kind(DSAConfig.from_transformers(config), 0 if with_indexer else 1).eval()


def inputs(
    tokens: int, length: int | None = None, with_indexer: bool = True
) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Of a step whose ``tokens`` queries are the last of ``length`` tokens in a static cache."""
    torch.manual_seed(1)
    length = tokens if length is None else length
    angles = torch.arange(tokens * 4).view(tokens, 4) * 0.1
    ends = torch.arange(length - tokens + 1, length + 1, dtype=torch.int32)
    starts = torch.zeros_like(ends)
    caches = {
        "kv_c_cache": torch.zeros(CAPACITY, 32),
        "k_pe_cache": torch.zeros(CAPACITY, 8),
        "write_positions": torch.arange(length - tokens, length),
    }
    if with_indexer:
        caches["index_k_cache"] = torch.zeros(CAPACITY, 16)
    else:
        caches["indices"] = ops.causal_positions(starts, ends, length, TOPK)
    rows = (torch.randn(tokens, 64), angles.cos(), angles.sin(), starts, ends)
    return (*rows, length, tokens), caches
