"""The words of a routing decision: facts go in; a route, a selection and a reason come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

Length = Any
"""An integer, or a symbol that the comparison oracle understands."""

Compare = Callable[[Length, Length], bool | None]
"""Answers ``a <= b`` with True, False, or None where it cannot know."""


class Route(Enum):
    """Which kernel computes the attention of a segment; wherever legal, all compute the same."""

    DENSE_MHA = "dense MHA"
    MASKED_MHA = "masked MHA"
    SPARSE_MQA = "top-k MQA"
    DEFER = "decided at run time"


class Selection(Enum):
    """What stands in the indices operand.

    NONE: nothing; no consumer is left, and nothing is produced.
    CLOSED: the closed form, every row short: positions 0, 1, ... without scoring.
    SCORED: data. Rows are scored, save that the selection op still closes each short row by
        itself; or the indices come from elsewhere and are read as they are given.
    """

    NONE = "no selection"
    CLOSED = "selection in closed form"
    SCORED = "selection scored"


class Reason(Enum):
    """Why a route was taken, or a forced one refused."""

    DENSE_CHEAPER = "no row sees more keys than the dense limit, and expanding them costs less"
    DENSE_FORCED = 'mode="dense", and no row sees more keys than the dense limit'
    DENSE_APPROXIMATE = "full attention, which allow_approximate permits above index_topk"
    MASKED_CHEAPER = "a fresh prefill, not too long for masking to cost less"
    MASKED_FORCED = 'mode="masked", and masked MHA is legal'
    MODE_SPARSE = 'mode="sparse"'
    BATCH_INVARIANT = "batch_invariant pins top-k MQA"
    LAYER_WITHOUT_DENSE = "the layer's own class declares no dense MHA"
    LAYER_WITHOUT_MASKED = "the layer's own class declares no masked MHA"
    KERNELS_WITHOUT_DENSE = "the kernels declare no dense MHA"
    KERNELS_WITHOUT_MASKED = "the kernels declare no masked MHA"
    DENSE_OFF = "dense_threshold=0 turns dense MHA off"
    MASK_OPERAND = "a mask operand hides keys that dense MHA would read"
    FOREIGN_SELECTION = "the selection is reused, replayed or supplied, so it must be read"
    SHARDED_KEYS = "keys are sharded over ranks, and the kernel returns no LSE to merge"
    ABOVE_LIMIT = "a row may see more keys than the dense limit"
    WORKSPACE = "the masked kernel's need exceeds the workspace"
    SPARSE_CHEAPER = "absorbing the query and reading the selected keys costs less"
    CAPTURED = "captured without capture_bound, so no length is known"
    CAPTURED_QUERY = "captured, so the query length is unknown; top-k MQA suits the shortest"
    LENGTH_UNKNOWN = "whether a row may see more keys than the dense limit is not known yet"
    COST_UNKNOWN = "which legal route costs less is not known yet"
    WORKSPACE_UNKNOWN = "whether the masked kernel's need fits the workspace is not known yet"


@dataclass(frozen=True)
class Decision:
    """The answer of ``decide``; ``str()`` gives it as a sentence."""

    route: Route
    selection: Selection
    reason: Reason

    def __str__(self) -> str:
        text = f"{self.route.value}, {self.selection.value}: {self.reason.value}."
        return text[0].upper() + text[1:]


@dataclass(frozen=True)
class BatchFacts:
    """Host facts about one segment of a step: its decode rows, or its prefill rows.

    Lengths are those of the longest request, cached prefix included: a maximum, never a mean and
    never the packed sum. Two prompts of 1500 tokens have ``max_kv_len=1500``; 16 new tokens behind
    a cached prefix of 4000 have ``max_kv_len=4016, max_query_len=16``.

    Args:
        max_kv_len: upper bound on the keys that a row of the segment sees.
        max_query_len: most query tokens of one request in the segment. It weighs cost only.
        own_selection: the selection is made in this step for exactly these rows, by this layer or
            its group's leader. False: it is reused, replayed or supplied.
        other_consumers: somebody besides this layer's route reads the selection: a shared layer
            whose route reads it, a draft step, index recording, an output.
        masked: a mask operand narrows the visible interval.
        captured: the step runs inside a captured region, where nothing depends on host lengths.
        capture_bound: most keys a row may see in this captured variant, which the dispatcher
            checks before each replay.
        masked_bytes, workspace_bytes: what the masked kernel needs (when captured: at
            ``capture_bound``) and what it may have.

    Raises:
        ValueError: a negative integer.
    """

    max_kv_len: Length
    max_query_len: Length
    own_selection: bool = True
    other_consumers: bool = False
    masked: bool = False
    captured: bool = False
    capture_bound: int | None = None
    masked_bytes: Length = 0
    workspace_bytes: Length = 256 << 20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int) and value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
