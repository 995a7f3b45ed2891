"""Two small checkpoints of the demo: real architectures of transformers, random weights."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GenerationMixin,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedModel,
)

TOPK = 128
SHORT_PROMPT = 96
LONG_PROMPT = 2048
_VOCABULARY = 512

# Every ratio that matters to DSA is kept: K well below the long prompt, rotated and plain dims of
# their own width, more index heads than make exact ties common, and a layer of experts at the end.
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": TOPK,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}

_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


class Family(StrEnum):
    """The model families of the demo, by the name its command line takes."""

    GLM = "glm"
    DEEPSEEK = "deepseek"

    @property
    def label(self) -> str:
        """How a reader knows the family."""
        return {Family.GLM: "GLM-5.2 style", Family.DEEPSEEK: "DeepSeek-V3.2 style"}[self]


def write_checkpoint(family: Family, folder: Path, seed: int) -> None:
    """Save a small model of ``family``, with weights drawn from ``seed``, in ``folder``."""
    torch.manual_seed(seed)
    model: PreTrainedModel
    if family is Family.GLM:
        layers = ["full", "shared", "full"]
        config = GlmMoeDsaConfig(
            **_SIZES,
            num_hidden_layers=len(layers),
            first_k_dense_replace=len(layers) - 1,
            indexer_types=layers,
            rope_parameters={"rope_type": "default", "rope_theta": 8e6},
        )
        model = GlmMoeDsaForCausalLM(config)
    else:
        model = DeepseekV32ForCausalLM(
            DeepseekV32Config(
                **_SIZES, num_hidden_layers=2, first_k_dense_replace=1, rope_parameters=_YARN
            )
        )
    model.save_pretrained(folder)


def load(folder: Path) -> PreTrainedModel:
    """The checkpoint in ``folder``, ready to generate in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    return model


def prompt(length: int, seed: int) -> Tensor:
    """[1, length] int64 random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, _VOCABULARY, (1, length), generator=generator)


def generate(model: PreTrainedModel, tokens: Tensor, new_tokens: int) -> list[int]:
    """The ids that follow ``tokens`` [1, length] greedily, by transformers' own ``generate``."""
    out: Tensor = cast(GenerationMixin, model).generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    following: list[int] = out[0, tokens.shape[1] :].tolist()
    return following
