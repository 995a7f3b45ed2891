"""Steps of a whole layer: a decode step by ops over paged caches, and a prompt through a layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from _gpu_setting import EPS, INDEX_STYLE, STYLE, Scene
from torch import Tensor
from torch.nn import functional as F

from dsafx import ops, routing
from dsafx.models.config import DSAConfig
from dsafx.models.layer import DSAAttention

_LAYOUT, _SCALES = "bf16", "ue8m0"
_INDEX_STYLES = {"interleaved": "interleaved_to_half", "half": "half"}


def decode_step(scene: Scene) -> Callable[[], Tensor]:
    """One layer's decode step as an engine captures it, from the latents to the heads' outputs.

    It reads no length on the host: all that the batch holds is in device tensors.
    """
    dims, pages = scene.dims, scene.pages
    heads, index_heads, dim = dims.num_attention_heads, dims.index_n_heads, dims.index_head_dim
    cache, index_cache = scene.mla_cache(_LAYOUT), scene.index_cache()
    q_c, kv_c = (scene.random(scene.tokens, x) for x in (dims.q_lora_rank, dims.kv_lora_rank))
    k_pe, index_k = (scene.random(scene.tokens, x) for x in (dims.qk_rope_head_dim, dim))
    q_norm, kv_norm = (scene.random(x) for x in (dims.q_lora_rank, dims.kv_lora_rank))
    k_norm, k_bias = scene.random(dim), scene.random(dim)
    (cos, sin), raw = scene.angles, scene.floats(scene.tokens, index_heads)
    shrink = dims.q_lora_rank**-0.5
    project = scene.random(heads * dims.qk_head_dim, dims.q_lora_rank) * shrink
    index_project = scene.random(index_heads * dim, dims.q_lora_rank) * shrink
    up = scene.random(heads * (dims.qk_nope_head_dim + dims.v_head_dim), dims.kv_lora_rank)
    layer = routing.LayerCapabilities(dense_mha=True, masked_mha=True)
    spec = routing.encode_spec(layer, routing.RouteConfig())
    style = INDEX_STYLE[scene.case.family]
    rows = (pages.table, pages.row_request, pages.lens)

    def step() -> Tensor:
        normed, _, _, _ = ops.norm_rope_index_write(
            q_c,
            q_norm,
            kv_c,
            kv_norm,
            k_pe,
            index_k,
            k_norm,
            k_bias,
            cos,
            sin,
            cache,
            pages.slots,
            index_cache,
            pages.slots,
            EPS,
            STYLE,
            EPS,
            style,
            _LAYOUT,
            _SCALES,
        )
        index_q = F.linear(normed, index_project).unflatten(-1, (index_heads, dim))
        index_q, weights = ops.index_query(index_q, raw, cos, sin, style, False)
        indices = ops.index_select_paged(
            index_q, index_cache, weights, *rows, scene.keys, dims.index_topk, _SCALES
        )
        q = F.linear(normed, project).unflatten(-1, (heads, dims.qk_head_dim))
        q_nope, q_pe = q.split([dims.qk_nope_head_dim, dims.qk_rope_head_dim], dim=-1)
        out, _ = ops.mla_attention_paged(
            q_nope,
            ops.rope(q_pe, cos, sin, STYLE),
            cache,
            up,
            indices,
            *rows,
            scene.keys,
            scene.each,
            dims.index_topk,
            dims.scale,
            spec,
            _LAYOUT,
            captured=True,
        )
        return out

    return step


class Prompt:
    """A layer of the package, and a prompt that it writes to caches of its own length."""

    def __init__(self, scene: Scene) -> None:
        dims, device, tokens = scene.dims, scene.machine.device, scene.tokens
        with device:
            self.layer = DSAAttention(_config(scene)).to(scene.dtype).requires_grad_(False)
        self.run: Callable[..., object] = self.layer
        self.hidden = scene.random(tokens, dims.hidden_size)
        self.angles = scene.angles
        self.interval = scene.interval
        self.caches = {
            "kv_c_cache": torch.zeros_like(scene.random(tokens, dims.kv_lora_rank)),
            "k_pe_cache": torch.zeros_like(scene.random(tokens, dims.qk_rope_head_dim)),
            "index_k_cache": torch.zeros_like(scene.random(tokens, dims.index_head_dim)),
        }
        self.positions = torch.arange(tokens, device=device)

    def __call__(self) -> object:
        tokens = self.hidden.shape[0]
        return self.run(
            self.hidden,
            *self.angles,
            *self.interval,
            tokens,
            tokens,
            **self.caches,
            write_positions=self.positions,
        )

    @property
    def written(self) -> bool:
        """Whether the index key of every token is in its cache."""
        return bool((self.caches["index_k_cache"] != 0).any(dim=1).all())

    @property
    def projection(self) -> list[int]:
        """Shape of the weight that makes the indexer's query."""
        assert self.layer.indexer is not None
        return list(self.layer.indexer.wq_b.weight.shape)


def _config(scene: Scene) -> DSAConfig:
    dims = scene.dims
    return DSAConfig(
        model_type="deepseek_v32",
        hidden_size=dims.hidden_size,
        num_heads=dims.num_attention_heads,
        q_lora_rank=dims.q_lora_rank,
        kv_lora_rank=dims.kv_lora_rank,
        qk_nope_head_dim=dims.qk_nope_head_dim,
        qk_rope_head_dim=dims.qk_rope_head_dim,
        v_head_dim=dims.v_head_dim,
        index_num_heads=dims.index_n_heads,
        index_head_dim=dims.index_head_dim,
        topk=dims.index_topk,
        schedule=("full",),
        mla_rope_style="interleaved_to_half",
        index_rope_style=_INDEX_STYLES[INDEX_STYLE[scene.case.family]],
        rope_theta=10_000.0,
        softmax_scale=dims.scale,
        index_weight_scale=(dims.index_n_heads * dims.index_head_dim) ** -0.5,
    )
