"""What a user runs today: the lines of transformers' attention that an op stands for.

Where transformers has them as a function or a module, that is called. Where they lie in the middle
of a forward, they are repeated here; the tests hold them to the module's own results, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import apply_rotary_pos_emb_interleave


def score_and_select(
    indexer: Any, q: Tensor, k: Tensor, head_weights: Tensor, mask: Tensor
) -> Tensor:
    """The scoring and top-k at the end of an indexer's forward.

    Args:
        indexer: the module, for its scale and K.
        q: [1, T, H, D]; k: [1, S, D]; head_weights: [1, T, H] float32, times ``H**-0.5``.
        mask: [1, T, S] bool, True = visible.

    Returns:
        [1, T, min(K, S)] int32.
    """
    scores = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1))
    scores = scores * indexer.softmax_scale
    scores = F.relu(scores)
    index_scores = torch.matmul(head_weights.unsqueeze(-2), scores).squeeze(-2)
    index_scores = index_scores.masked_fill(~mask, float("-inf"))
    topk = min(indexer.index_topk, index_scores.shape[-1])
    return index_scores.topk(topk, dim=-1).indices.to(torch.int32)


def selected_mask(indices: Tensor, mask: Tensor) -> Tensor:
    """The attention mask of a selection.

    Args:
        indices: [1, T, K] int32, valid ids alone.
        mask: [1, 1, T, S] bool, True = visible.
    """
    hidden = indices.new_ones((1, mask.shape[2], mask.shape[3]), dtype=torch.bool)
    return mask & ~hidden.scatter(-1, indices.long(), False).unsqueeze(1)


def masked_attention(attention: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The attention function that the module is configured with, which is SDPA.

    Args:
        attention: the module.
        q: [1, N, T, P + R]; k: [1, N, S, P + R]; v: [1, N, S, V].
        mask: [1, 1, T, S] bool.

    Returns:
        [1, T, N, V].
    """
    function = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
    out: Tensor = function(attention, q, k, v, mask, dropout=0.0, scaling=attention.scaling)[0]
    return out


def attend(
    attention: Any, q: Tensor, latents: Tensor, rotated: Tensor, indices: Tensor, mask: Tensor
) -> Tensor:
    """From the cached latents and a selection to the attention's output, before ``o_proj``.

    Args:
        attention: the module.
        q: [1, N, T, P + R]; latents: [1, 1, S, L]; rotated: [1, 1, S, R].
        indices: [1, T, K] int32, valid ids alone.
        mask: [1, 1, T, S] bool.
    """
    k, v = attention.expand_kv(latents, rotated)
    return masked_attention(attention, q, k, v, selected_mask(indices, mask))


def norms_and_rope(
    attention: Any, q_c: Tensor, kv_c: Tensor, k_pe: Tensor, angles: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Both norms of the latents and the rotation of the key.

    Args:
        attention: the module, for its norms.
        q_c: [1, T, q_lora]; kv_c: [1, T, L]; k_pe: [1, 1, T, R].
        angles: cos and sin, [1, T, R] each.
    """
    no_head = k_pe[:, :0]
    _, rotated = apply_rotary_pos_emb_interleave(no_head, k_pe, *angles)
    return attention.q_a_layernorm(q_c), attention.kv_a_layernorm(kv_c), rotated


def projections_and_absorption(attention: Any, hidden: Tensor) -> Tensor:
    """The products that a decode step cannot do without: each weight of the layer read once.

    Every projection and the two absorption products in plain PyTorch, on values of the right shape;
    no norms, no rotation, no cache, no scoring and no attention.

    Args:
        attention: the module.
        hidden: [1, rows, hidden].
    """
    indexer, rows, heads = attention.indexer, hidden.shape[1], attention.num_heads
    nope = attention.qk_nope_head_dim
    q_c = attention.q_a_proj(hidden)
    q = attention.q_b_proj(q_c).view(rows, heads, attention.qk_head_dim).transpose(0, 1)
    attention.kv_a_proj_with_mqa(hidden)
    indexer.wq_b(q_c)
    indexer.wk(hidden)
    indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype))
    by_head = attention.kv_b_proj.weight.view(heads, -1, attention.kv_lora_rank)
    latent = torch.bmm(q[..., :nope], by_head[:, :nope])
    out = torch.bmm(latent, by_head[:, nope:].transpose(1, 2))
    result: Tensor = attention.o_proj(out.transpose(0, 1).reshape(1, rows, -1))
    return result
