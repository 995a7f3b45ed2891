"""Tiny transformers models of both DSA families, with weights that make selections matter."""

from __future__ import annotations

import torch
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedModel,
)

TOPK = 16
VOCAB = 128
FAMILIES = ("deepseek_v32", "glm_moe_dsa")

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": TOPK,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def glm_config(**changes: object) -> GlmMoeDsaConfig:
    """GLM-5.2 in small: two index groups, the second one layer long."""
    settings = {"indexer_types": ["full", "full", "shared", "full"], **_SIZES, **changes}
    return GlmMoeDsaConfig(**settings)


def deepseek_config(**changes: object) -> DeepseekV32Config:
    """DeepSeek-V3.2 in small: an indexer in each layer, yarn RoPE."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    settings = {"rope_parameters": yarn, **_SIZES, "num_hidden_layers": 3, **changes}
    return DeepseekV32Config(**settings)


def tiny_model(family: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A float32 model of ``family`` in eval mode, the same one for the same seed.

    Weights have unit gain, so that scores and attention weights spread: a wrong selection is then a
    wrong logit.
    """
    torch.manual_seed(seed)
    if family == "glm_moe_dsa":
        model: PreTrainedModel = GlmMoeDsaForCausalLM(glm_config(**changes))
    else:
        model = DeepseekV32ForCausalLM(deepseek_config(**changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            elif name.endswith("norm.bias"):
                parameter.uniform_(-0.5, 0.5)
            elif name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
        model.model.embed_tokens.weight.normal_(0.0, 1.0)
    return model.eval()


def prompt(batch: int, length: int, seed: int = 39) -> torch.Tensor:
    """[batch, length] int64 token ids, none of them the pad token; a part of one [2, 64] prompt.

    With 8 index heads one key in 256 scores exactly 0, and ``torch.topk`` breaks such ties as it
    likes. The seed was chosen so that no row of that prompt has a tie at K, padded or not.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (2, 64), generator=generator)[:batch, :length].contiguous()


def left_padding(length: int, *pads: int) -> torch.Tensor:
    """[len(pads), length] int64, 0 at the first ``pads[b]`` places of row b and 1 after them."""
    return (torch.arange(length) >= torch.tensor(pads)[:, None]).long()
