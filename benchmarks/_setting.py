"""What a case is made of: a family's tensors, and the calls that are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import torch
from _families import REAL, TINY, Dims, Family, Layer, attention_of
from _measure import Call, Floor
from torch import Tensor

_TOPK = 2048


class DType(StrEnum):
    """A dtype of weights and activations."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(frozen=True)
class Prepared:
    """Calls of one case, on tensors that exist.

    ours: what is measured, and peer: what a user runs today for the same, or None.
    peer_bytes: computed peak of the peer over its inputs; it is not run where that is not free.
    floor: the least work of ``ours``, or None.
    others: further calls that take their turn, by name.
    notes: ratios of interest, a sentence for each (numerator, denominator).
    check: asserts on the result of ``ours``, and says what it asserted.
    comparable: whether both results hold the same values in the same order.
    """

    tokens: int
    keys: int
    ours: Call
    peer: Call | None = None
    peer_bytes: int = 0
    floor: Floor | None = None
    others: Mapping[str, Call] = field(default_factory=dict)
    notes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    check: Callable[[Any], str] | None = None
    comparable: bool = False


class Setting:
    """A family, a dtype, and the tensors that cases make from them."""

    def __init__(self, family: Family, dtype: torch.dtype, quick: bool) -> None:
        self.family = family
        self.dtype = dtype
        self.dims: Dims = (TINY if quick else REAL)[family]

    @cached_property
    def layer(self) -> Layer:
        """The attention layer; made once for all cases."""
        return Layer(self.family, self.dims, self.dtype)

    @property
    def attention(self) -> Any:
        """The layer as transformers runs it."""
        return attention_of(self.layer.plain)

    @property
    def kv_b_weight(self) -> Tensor:
        """[N * (P + V), L]."""
        weight: Tensor = self.attention.kv_b_proj.weight
        return weight

    def length(self, real: int) -> int:
        """A length given for K = 2048, in proportion to this setting's K."""
        return real * self.dims.index_topk // _TOPK

    def random(self, *shape: int) -> Tensor:
        """Normal values of the setting's dtype."""
        return torch.randn(shape).to(self.dtype)

    def index_operands(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, H, D], k [T, D] and weights [T, H] float32, times ``H**-0.5``."""
        heads, dim = self.dims.index_n_heads, self.dims.index_head_dim
        weights = torch.randn(tokens, heads) * heads**-0.5
        return self.random(tokens, heads, dim), self.random(tokens, dim), weights


def causal(tokens: int) -> tuple[Tensor, Tensor]:
    """ks and ke of one prompt."""
    ke = torch.arange(1, tokens + 1, dtype=torch.int32)
    return torch.zeros_like(ke), ke


def causal_mask(tokens: int) -> Tensor:
    """[1, 1, T, T] bool, as transformers' mask factory makes it for SDPA."""
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]


def size_of(*tensors: Tensor) -> int:
    """Bytes of all values together."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)
