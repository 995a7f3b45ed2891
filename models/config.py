"""One frozen description of a DSA model, with every quirk of its config file resolved here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..ops import routing
from ._families import Family, family

ROPE_STYLES = ("half", "interleaved", "interleaved_to_half")

_MLA_ROPE_STYLE = "interleaved_to_half"

# The model classes build the norms of the attention with their default, not with `rms_norm_eps`.
_NORM_EPS = 1e-6


class HasToDict(Protocol):
    """What is needed of a transformers config object."""

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class DSAConfig:
    """Sizes, schedule and numerics of a DSA model.

    Attributes:
        num_heads: of the attention; on a rank of ``for_ranks``, those of that rank.
        schedule: for each layer "full" (it owns an indexer) or "shared" (it takes the selection of
            the nearest full layer before it).
        mla_rope_style, index_rope_style: how the dims of a pair lie in the rotated part of the
            attention's and of the indexer's queries and keys; one of ``ROPE_STYLES``.
        softmax_scale: of the attention, the squared yarn factor included.
        index_weight_scale: what the indexer's weights are multiplied with, ``D^-0.5 * H^-0.5``.
        norm_eps, index_norm_eps: of the latents' RMSNorms and of the index key's LayerNorm.
    """

    model_type: str
    hidden_size: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_num_heads: int
    index_head_dim: int
    topk: int
    schedule: tuple[str, ...]
    mla_rope_style: str
    index_rope_style: str
    rope_theta: float
    softmax_scale: float
    index_weight_scale: float
    norm_eps: float = _NORM_EPS
    index_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_dropout: float = 0.0

    @property
    def num_layers(self) -> int:
        """Number of decoder layers, draft (MTP) layers not counted."""
        return len(self.schedule)

    def is_followed(self, layer_idx: int) -> bool:
        """Whether the next layer takes the selection that layer ``layer_idx`` works with."""
        return layer_idx + 1 < self.num_layers and self.schedule[layer_idx + 1] == "shared"

    def for_ranks(self, ranks: int) -> DSAConfig:
        """The model as one of ``ranks`` that share its heads sees it (tensor parallelism).

        Raises:
            ValueError: the ranks cannot hold the same number of heads.
        """
        if ranks < 1 or self.num_heads % ranks:
            raise ValueError(
                f"num_heads must be a multiple of the number of ranks that share the heads, got"
                f" {self.num_heads} heads and {ranks} ranks"
            )
        return self if ranks == 1 else replace(self, num_heads=self.num_heads // ranks)

    def route_spec(
        self,
        layer: routing.LayerCapabilities,
        kernels: routing.KernelCapabilities,
        config: routing.RouteConfig,
    ) -> routing.RouteSpec:
        """The facts about a layer that ``routing.decide`` asks for."""
        return routing.RouteSpec(
            layer=layer,
            kernels=kernels,
            config=config,
            topk=self.topk,
            num_heads=self.num_heads,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            kv_lora_rank=self.kv_lora_rank,
        )

    @classmethod
    def from_transformers(
        cls, config: HasToDict | Mapping[str, Any], *, index_rope_style: str | None = None
    ) -> DSAConfig:
        """Read a transformers config object, or the mapping of a ``config.json``.

        Args:
            config: of model type ``axk2``, ``deepseek_v32`` or ``glm_moe_dsa``.
            index_rope_style: in place of the model type's own.

        Raises:
            ValueError: an unknown model type, a missing key, two values of ``rope_theta`` that
                differ, an unknown RoPE style, a schedule that starts on a shared layer.
            NotImplementedError: a model type that selects keys in another way, with the reason.
        """
        raw = config if isinstance(config, Mapping) else config.to_dict()
        model_type = raw.get("model_type")
        of_type = family(model_type)
        style = of_type.index_rope_style if index_rope_style is None else index_rope_style
        if style not in ROPE_STYLES:
            accepted = ", ".join(ROPE_STYLES)
            raise ValueError(f"index_rope_style must be one of {accepted}, got {style!r}")
        rope = _rope_parameters(raw)
        nope_dim, rope_dim = _size(raw, "qk_nope_head_dim"), _size(raw, "qk_rope_head_dim")
        index_num_heads, index_head_dim = _size(raw, "index_n_heads"), _size(raw, "index_head_dim")
        return cls(
            model_type=str(model_type),
            hidden_size=_size(raw, "hidden_size"),
            num_heads=_size(raw, "num_attention_heads"),
            q_lora_rank=_size(raw, "q_lora_rank"),
            kv_lora_rank=_size(raw, "kv_lora_rank"),
            qk_nope_head_dim=nope_dim,
            qk_rope_head_dim=rope_dim,
            v_head_dim=_size(raw, "v_head_dim"),
            index_num_heads=index_num_heads,
            index_head_dim=index_head_dim,
            topk=_size(raw, "index_topk"),
            schedule=_schedule(raw, of_type),
            mla_rope_style=_MLA_ROPE_STYLE,
            index_rope_style=style,
            rope_theta=_rope_theta(raw, rope),
            softmax_scale=(nope_dim + rope_dim) ** -0.5 * _yarn_factor(rope) ** 2,
            index_weight_scale=index_head_dim**-0.5 * index_num_heads**-0.5,
            attention_bias=bool(raw.get("attention_bias", False)),
            attention_dropout=float(raw.get("attention_dropout", 0.0)),
        )


def _size(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if value is None:
        raise ValueError(f"the config has no {key}")
    if int(value) < 1:
        raise ValueError(f"{key} must be at least 1, got {value}")
    return int(value)


def _schedule(raw: Mapping[str, Any], of_type: Family) -> tuple[str, ...]:
    num_layers = _size(raw, "num_hidden_layers")
    if not of_type.shares_selection:
        return routing.index_schedule(num_layers)
    offset = raw.get("index_skip_topk_offset")
    return routing.index_schedule(
        num_layers,
        indexer_types=raw.get("indexer_types"),
        pattern=raw.get("index_topk_pattern"),
        index_topk_freq=raw.get("index_topk_freq"),
        index_skip_topk_offset=2 if offset is None else offset,
    )


def _rope_parameters(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The nested RoPE parameters under their new name or, in older files, the old one."""
    rope: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return rope


def _rope_theta(raw: Mapping[str, Any], rope: Mapping[str, Any]) -> float:
    given = {
        "rope_theta": raw.get("rope_theta"),
        "rope_parameters.rope_theta": rope.get("rope_theta"),
    }
    values = {name: float(value) for name, value in given.items() if value is not None}
    if len(set(values.values())) > 1:
        pairs = " and ".join(f"{name} = {value:g}" for name, value in values.items())
        raise ValueError(f"the config gives two values of rope_theta that differ: {pairs}")
    # The default of both model classes.
    return next(iter(values.values()), 10000.0)


def _yarn_factor(rope: Mapping[str, Any]) -> float:
    """What yarn multiplies queries and keys with: ``0.1 * mscale_all_dim * ln(factor) + 1``."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    mscale = rope.get("mscale_all_dim") or 0.0
    if kind == "default" or not mscale or rope["factor"] <= 1:
        return 1.0
    return 0.1 * mscale * math.log(rope["factor"]) + 1.0
