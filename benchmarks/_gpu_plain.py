"""Peers that anybody can write: the ops in plain PyTorch, to be compiled, and PyTorch's own SDPA.

Each is as fast as plain code gets without a kernel of its own: no loop over rows, one pass where
``torch.compile`` can fuse, and the head dots of the indexer one head at a time, so that no
``T * H * S`` is held.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

EPS = 1e-6
_FP8 = torch.float8_e4m3fn
_FP8_MAX, _FLOOR, _TILE = 448.0, 1e-4, 128


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Over the last dimension."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, EPS)


def rope(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """Rotates pairs of the last dimension, ``half`` or ``interleaved``."""
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    wide = x.float()
    if style == "half":
        x1, x2 = wide.chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)
    x1, x2 = wide[..., 0::2], wide[..., 1::2]
    turned = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def rope_first(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """Rotates the first dims, as the indexer keeps them."""
    width = 2 * cos.shape[-1]
    return torch.cat((rope(x[..., :width], cos, sin, style), x[..., width:]), dim=-1)


def power_of_two_scale(x: Tensor) -> Tensor:
    """[..., 1] float32: what makes ``x`` fit e4m3."""
    highest = x.abs().amax(dim=-1, keepdim=True).float().clamp(min=_FLOOR)
    return torch.exp2(torch.ceil(torch.log2(highest / _FP8_MAX)))


def index_query(
    q: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, style: str, quantize: bool
) -> tuple[Tensor, Tensor]:
    """Rotated queries and folded weights."""
    turned = rope_first(q, cos, sin, style)
    folded = weights * (q.shape[1] * q.shape[2]) ** -0.5
    if not quantize:
        return turned, folded
    scale = power_of_two_scale(turned)
    return (turned.float() / scale).to(_FP8), folded * scale[..., 0]


def write_latents(cache: Tensor, slots: Tensor, kv_c: Tensor, k_pe: Tensor, layout: str) -> None:
    """Rows of the layouts ``bf16`` and ``fp8_ds_mla``."""
    rows = cache.view(-1, cache.shape[2])
    if layout == "bf16":
        rows.index_copy_(0, slots, torch.cat((kv_c, k_pe), dim=-1))
        return
    tiles = kv_c.float().unflatten(-1, (-1, _TILE))
    scale = power_of_two_scale(tiles)
    values = (tiles / scale).to(_FP8).flatten(1).view(torch.uint8)
    scales = scale.flatten(1).contiguous().view(torch.uint8)
    turned = k_pe.bfloat16().contiguous().view(torch.uint8)
    rows.index_copy_(0, slots, torch.cat((values, scales, turned), dim=-1))


def read_latents(cache: Tensor, slots: Tensor, latent: int, layout: str) -> Tensor:
    """[..., L + R] bfloat16."""
    taken = cache.view(-1, cache.shape[2])[slots]
    if layout == "bf16":
        return taken
    end = latent + latent // _TILE * 4
    tiles = taken[..., :latent].contiguous().view(_FP8).float().unflatten(-1, (-1, _TILE))
    scale = taken[..., latent:end].contiguous().view(torch.float32)[..., None]
    turned = taken[..., end:].contiguous().view(torch.bfloat16)
    return torch.cat(((tiles * scale).flatten(-2).bfloat16(), turned), dim=-1)


def write_index_keys(cache: Tensor, slots: Tensor, index_k: Tensor) -> None:
    """e4m3 keys and their exponents, planar in a block."""
    blocks, size, width = cache.shape
    dim = width - 4
    scale = power_of_two_scale(index_k)
    values = (index_k.float() / scale).to(_FP8).view(torch.uint8)
    exponent = (torch.log2(scale) + 127).to(torch.uint8).expand(-1, 4)
    planes = cache.view(blocks, -1)
    block, offset = slots // size, slots % size
    planes[:, : size * dim].view(blocks, size, dim)[block, offset] = values
    planes[:, size * dim :].view(blocks, size, 4)[block, offset] = exponent


def read_index_keys(cache: Tensor, slots: Tensor) -> Tensor:
    """[..., D] bfloat16."""
    blocks, size, width = cache.shape
    dim = width - 4
    planes = cache.view(blocks, -1)
    block, offset = slots // size, slots % size
    keys = planes[:, : size * dim].view(blocks, size, dim)[block, offset]
    exponent = planes[:, size * dim :].view(blocks, size, 4)[block, offset][..., :1]
    return (keys.view(_FP8).float() * torch.exp2(exponent.float() - 127)).bfloat16()


def scores(compiled: Callable[..., Tensor], q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """[T, S] float32, one head at a time. ``compiled``: ``add_head``, compiled."""
    total = weights.new_zeros(q.shape[0], k.shape[0])
    for head in range(q.shape[1]):
        total = compiled(total, torch.mm(q[:, head], k.t()), weights[:, head])
    return total


def add_head(total: Tensor, dots: Tensor, weight: Tensor) -> Tensor:
    """What one head adds to the scores."""
    return total + weight[:, None] * dots.float().relu()


def highest(total: Tensor, ke: Tensor, topk: int) -> Tensor:
    """The best keys of rows that see ``ke`` keys from the first on, unsorted; -1 where none."""
    key = torch.arange(total.shape[1], device=total.device)
    found = total.masked_fill(key >= ke[:, None], -torch.inf)
    best = found.topk(min(topk, total.shape[1]), dim=-1, sorted=False)
    return best.indices.masked_fill(best.values == -torch.inf, -1)


def sparse(q: Tensor, kv: Tensor, indices: Tensor, scale: float, latent: int) -> Tensor:
    """Attention over rows that are gathered before: kv [T, K, L + R]."""
    logits = torch.einsum("tnd,tkd->tnk", q, kv).float() * scale
    weights = logits.masked_fill(indices[:, None] < 0, -torch.inf).softmax(dim=-1)
    return torch.einsum("tnk,tkl->tnl", weights.to(q.dtype), kv[..., :latent])


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """[T, N, V], causal from the last key back unless a mask says otherwise."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    square = mask is None and q.shape[2] == k.shape[2]
    shape = q.shape[2], k.shape[2]
    bias = causal_lower_right(*shape) if mask is None and not square else mask
    out = F.scaled_dot_product_attention(q, k, v, bias, is_causal=square, scale=scale)
    return out[0].transpose(0, 1)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys, both with keys."""
    lse = torch.logaddexp(lse_a, lse_b)
    parts = ((lse_a - lse).exp()[..., None], (lse_b - lse).exp()[..., None])
    return (out_a.float() * parts[0] + out_b.float() * parts[1]).to(out_a.dtype), lse
