"""The two model families and their real attention dimensions; nothing here needs transformers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Family(StrEnum):
    """A model family, by the name the command line takes."""

    GLM = "glm"
    DEEPSEEK = "deepseek"

    @property
    def label(self) -> str:
        """How a reader knows the family."""
        return {Family.GLM: "GLM-5.2", Family.DEEPSEEK: "DeepSeek-V3.2"}[self]


@dataclass(frozen=True)
class Dims:
    """Dimensions of one attention layer, under the names that transformers gives them."""

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int

    @property
    def qk_head_dim(self) -> int:
        """Width of an expanded query or key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Width of an absorbed query and of a row of the cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return float(self.qk_head_dim**-0.5)

    def expanded(self, tokens: int) -> int:
        """Numbers in the expanded keys and values of ``tokens``, and in what they are copied to."""
        return 2 * tokens * self.num_attention_heads * (self.qk_head_dim + self.v_head_dim)


REAL = {
    Family.GLM: Dims(6144, 64, 2048, 512, 192, 64, 256, 32, 128, 2048),
    Family.DEEPSEEK: Dims(7168, 128, 1536, 512, 128, 64, 128, 64, 128, 2048),
}
