"""One attention layer of transformers as it is, under ``backend="dsafx"`` against Inductor."""

from __future__ import annotations

from typing import Any

import _peers as peers
import torch
from _families import angles, attention_of
from _filled_cache import FilledCache
from _setting import Prepared, Setting
from torch import Tensor, nn
from transformers import PreTrainedModel, StaticCache
from transformers.masking_utils import create_causal_mask

from dsafx.passes import collect


class Attention(nn.Module):
    """The attention of a model of one layer, with the mask and the angles that the model makes.

    They are made inside, so that the compiled graph holds what a compiled model's graph holds.
    """

    def __init__(self, model: PreTrainedModel, cache: StaticCache | None) -> None:
        super().__init__()
        self.model = model
        self.cache = cache

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """[1, T, hidden] of [1, T, hidden] at ``positions`` [1, T]."""
        mask = create_causal_mask(
            config=self.model.config,
            inputs_embeds=hidden,
            attention_mask=None,
            cache=self.cache,
            position_ids=positions if self.cache is not None else None,
            allow_is_causal_skip=False,
        )
        turns = angles(self.model, hidden, positions)
        out: Tensor = attention_of(self.model)(hidden, turns, mask, cache=self.cache)[0]
        return out


def _compiled(module: nn.Module, backend: str) -> Any:
    return torch.compile(module, backend=backend, fullgraph=True, dynamic=False)


def _assert_recognised(call: Any, *args: Tensor) -> None:
    """Compile ``call``, and see that the layer was recognised and its rewrite proved."""
    with collect() as reports:
        call(*args)
    found = {report.stage: report for report in reports}
    if found and not found["pre_grad"].of("recognise").matched:
        raise AssertionError(str(found["pre_grad"]))
    if any(report.problem is not None for report in reports):
        raise AssertionError(str(found["post_grad"]))


def _prefill(setting: Setting, real: int) -> Prepared:
    tokens, dims = setting.length(real), setting.dims
    hidden = setting.random(1, tokens, dims.hidden_size)
    positions = torch.arange(tokens)[None]
    layer = Attention(setting.layer.plain, None)
    ours, theirs = _compiled(layer, "dsafx"), _compiled(layer, "inductor")
    _assert_recognised(ours, hidden, positions)
    scores = 4 * tokens * tokens * dims.index_n_heads
    like = dims.qk_head_dim == dims.v_head_dim
    attention = 0 if like else 2 * 4 * dims.num_attention_heads * tokens * tokens
    return Prepared(
        tokens,
        tokens,
        lambda: ours(hidden, positions),
        lambda: theirs(hidden, positions),
        peer_bytes=max(scores, attention),
        comparable=True,
    )


def compiled_prefill(setting: Setting) -> Prepared:
    """A prompt of K tokens."""
    return _prefill(setting, 2048)


def compiled_prefill_long(setting: Setting) -> Prepared:
    """A prompt of 2 K tokens."""
    return _prefill(setting, 4096)


def compiled_decode(setting: Setting) -> Prepared:
    """A decode step that fills the last place of a static cache of 2 K tokens."""
    keys, dims = setting.length(4096), setting.dims
    hidden = setting.random(1, 1, dims.hidden_size)
    positions = torch.tensor([[keys - 1]])
    plain = setting.layer.plain
    steps = {}
    for backend in ("dsafx", "inductor"):
        filled = FilledCache(plain, dims, keys)
        steps[backend] = filled.step(_compiled(Attention(plain, filled.cache), backend))
    _assert_recognised(steps["dsafx"], hidden, positions)
    return Prepared(
        1,
        keys,
        lambda: steps["dsafx"](hidden, positions),
        lambda: steps["inductor"](hidden, positions),
        peer_bytes=setting.dtype.itemsize * dims.expanded(keys),
        others={"ceiling": lambda: peers.projections_and_absorption(setting.attention, hidden)},
        notes={
            "share of the ceiling": ("ceiling", "ours"),
            "the ceiling over transformers": ("peer", "ceiling"),
        },
        comparable=True,
    )
