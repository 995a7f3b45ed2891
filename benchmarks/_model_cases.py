"""A layer or a small model of transformers, run in the four ways that a user can choose from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from _families import VOCABULARY, Dims, Family, Pair, angles, attention_of, causal_mask
from _filled_cache import FilledCache
from _measure import Call
from torch import Tensor, nn
from transformers import PreTrainedModel

_LAYERS = 2
# Under which these model families look up a prepared mask.
_MASK_KEY = "indexed_attention"


class Subject(StrEnum):
    """A way to run the same weights, by the name the command line takes."""

    EAGER = "eager"
    INDUCTOR = "inductor"
    ENABLE = "enable"
    COMPILE = "compile"

    @property
    def label(self) -> str:
        """How a reader knows it."""
        return {
            Subject.EAGER: "transformers",
            Subject.INDUCTOR: "transformers + Inductor",
            Subject.ENABLE: "dsafx.enable",
            Subject.COMPILE: "enable + compile",
        }[self]

    @property
    def backend(self) -> str | None:
        """What it is compiled with."""
        return {Subject.INDUCTOR: "inductor", Subject.COMPILE: "dsafx"}.get(self)

    @property
    def is_ours(self) -> bool:
        """Whether the model is enabled."""
        return self in (Subject.ENABLE, Subject.COMPILE)


class Scope(StrEnum):
    """What is run: one attention layer, or a model of two layers with as good as no MLP."""

    LAYER = "layer"
    MODEL = "model"


class Phase(StrEnum):
    """A prompt of some length, or one token behind that many cached ones."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Case:
    """What is measured. ``length``: tokens of the prompt, or tokens cached with the new one."""

    family: Family
    scope: Scope
    phase: Phase
    length: int

    def __str__(self) -> str:
        return f"{self.family.label}, {self.scope} {self.phase} {self.length}"

    @property
    def tokens(self) -> int:
        """Query tokens of one call."""
        return self.length if self.phase is Phase.PREFILL else 1

    def peer_bytes(self, dims: Dims, dtype: torch.dtype) -> int:
        """Computed peak of transformers over its inputs.

        The scores of all index heads exist twice while they are scaled; what SDPA computes without
        a fused kernel, where keys and values have unlike widths, exists twice as well.
        """
        heads, pairs = dims.num_attention_heads, self.tokens * self.length
        fused = dims.qk_head_dim == dims.v_head_dim
        probabilities = 0 if fused else 2 * pairs * heads
        scores = 2 * 4 * pairs * dims.index_n_heads
        return max(scores, dtype.itemsize * (dims.expanded(self.length) + probabilities))


def models(family: Family, scope: Scope, dims: Dims, dtype: torch.dtype) -> Pair:
    """The weights of all cases of a scope."""
    return Pair(family, dims, dtype, 1 if scope is Scope.LAYER else _LAYERS)


def prepare(case: Case, subject: Subject, pair: Pair) -> Call:
    """A call that runs ``case`` as ``subject`` does; compiled by its first run."""
    model = pair.enabled if subject.is_ours else pair.plain
    filled = FilledCache(model, pair.dims, case.length) if case.phase is Phase.DECODE else None
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(case.length - case.tokens, case.length)[None]
    module: nn.Module
    args: tuple[Any, ...]
    if case.scope is Scope.LAYER:
        size = (1, case.tokens, pair.dims.hidden_size)
        hidden = torch.randn(size, generator=generator).to(pair.dtype)
        module = _Layer(model, filled)
        mask = causal_mask(model, hidden, None if filled is None else filled.cache)
        args = (hidden, *angles(model, hidden, positions), mask)
    else:
        size = (1, case.tokens)
        module = _Model(model, filled)
        ids = torch.randint(VOCABULARY, size, generator=generator)
        args = (ids, positions, _masks(model, ids[..., None], filled))
    run: Callable[..., Any] = module
    if subject.backend is not None:
        run = torch.compile(module, backend=subject.backend, fullgraph=True, dynamic=False)
    step = run if filled is None else filled.step(run)
    return lambda: step(*args)


class _Layer(nn.Module):
    """The attention of a model of one layer; mask and angles are made once for all layers."""

    def __init__(self, model: PreTrainedModel, filled: FilledCache | None) -> None:
        super().__init__()
        self.attention = attention_of(model)
        self.cache = None if filled is None else filled.cache

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.attention(hidden, (cos, sin), mask, cache=self.cache)[0]
        return out


class _Model(nn.Module):
    """A whole model, called as ``generate`` calls it."""

    def __init__(self, model: PreTrainedModel, filled: FilledCache | None) -> None:
        super().__init__()
        self.model = model
        self.cache = None if filled is None else filled.cache

    def forward(self, ids: Tensor, positions: Tensor, masks: Any) -> Tensor:
        out: Tensor
        if self.cache is None:
            out = self.model(ids, use_cache=False).last_hidden_state
        else:
            out = self.model(
                ids, attention_mask=masks, position_ids=positions, cache=self.cache
            ).last_hidden_state
        return out


def _masks(model: PreTrainedModel, like: Tensor, filled: FilledCache | None) -> Any:
    """What ``generate`` makes ahead of a step with a static cache."""
    return None if filled is None else {_MASK_KEY: causal_mask(model, like, filled.cache)}
