"""The parts of one layer between its projections, its caches and its selection, for fusing."""

from __future__ import annotations

from typing import Any

import torch
from _graphs import static_context
from torch import Tensor

from dsafx import ops
from dsafx.ops.cache_layouts import new_index_cache, new_mla_cache
from dsafx.passes._report import PassOptions

ROTATED, LATENT, DIM, HEADS, HIDDEN, TOKENS, TOPK = 4, 8, 16, 8, 16, 20, 4
# Of the index keys; the paged latents start a slot early, so that the first has none.
FIRST_SLOT = 3
STYLES = ("half", "interleaved", "interleaved_to_half")
DTYPES = (torch.float32, torch.bfloat16)
ALWAYS = static_context(options=PassOptions(fuse="always"))

Parts = dict[str, Any]


def operands(dtype: torch.dtype = torch.float32, rows: tuple[int, ...] = (TOKENS,)) -> Parts:
    """Hidden states, weights, tables, and paged caches with the slots of the new tokens."""
    torch.manual_seed(0)
    tokens = torch.Size(rows).numel()
    angle = torch.randn(tokens, ROTATED // 2)
    ends = torch.arange(1, tokens + 1, dtype=torch.int32)
    shapes = {
        "x": (*rows, HIDDEN),
        "q_a": (HIDDEN, 10),
        "kv_a": (HIDDEN, LATENT + ROTATED),
        "wk": (HIDDEN, DIM),
        "wq_b": (10, HEADS * DIM),
        "weights_proj": (HIDDEN, HEADS),
        "q_w": (10,),
        "kv_w": (LATENT,),
        "k_w": (DIM,),
        "k_b": (DIM,),
    }
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    return {
        **tensors,
        "cos": angle.cos(),
        "sin": angle.sin(),
        "ks": torch.zeros_like(ends),
        "ke": ends,
        "cache": new_mla_cache(8, 4, "bf16", LATENT, ROTATED, dtype=dtype),
        "slots": torch.arange(tokens) - 1,
        "index_cache": new_index_cache(8, 4, DIM),
        "index_slots": torch.arange(tokens) + FIRST_SLOT,
        "table": torch.arange(8, dtype=torch.int32)[None],
    }


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def latents(a: Parts, style: str = "interleaved", eps: float = 1e-6) -> tuple[Tensor, ...]:
    """q_c, kv_c and k_pe."""
    q_c = ops.rms_norm(a["x"] @ a["q_a"], a["q_w"], eps)
    both = a["x"] @ a["kv_a"]
    kv_c = ops.rms_norm(both[..., :LATENT], a["kv_w"], 1e-6)
    return q_c, kv_c, ops.rope(flat(both[..., LATENT:]), a["cos"], a["sin"], style)


def rotate_first(x: Tensor, a: Parts, style: str) -> Tensor:
    first, second = x.split([ROTATED, x.shape[-1] - ROTATED], dim=-1)
    return torch.cat([ops.rope(first, a["cos"], a["sin"], style), second], dim=-1)


def index_key(a: Parts, style: str = "half") -> Tensor:
    normed = ops.layer_norm(a["x"] @ a["wk"], a["k_w"], a["k_b"], 1e-6)
    return rotate_first(flat(normed), a, style)


def index_query(a: Parts, q_c: Tensor, style: str = "half") -> Tensor:
    return rotate_first((flat(q_c) @ a["wq_b"]).view(-1, HEADS, DIM), a, style)


def head_weights(a: Parts) -> Tensor:
    """In float32, as a model makes them."""
    weights = flat(a["x"]).float() @ a["weights_proj"].float()
    return weights * (HEADS * DIM) ** -0.5
