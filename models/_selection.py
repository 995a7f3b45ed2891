"""Whether a layer's selection is computed at all: the one place of the eager shortcut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..ops import providers, routing
from ..ops._options import current
from ._record import LayerRecord, record, recording
from .config import DSAConfig


@dataclass(frozen=True)
class LayerRouting:
    """What a layer asks ``routing.decide`` with.

    Attributes:
        config: sizes and schedule of the model.
        layer_idx: of the layer in ``config.schedule``.
        capabilities: what the layer's class declares.
        route: mode and limits.
        spec: ``capabilities`` and ``route`` as ``ops.mla_attention`` takes them.
    """

    config: DSAConfig
    layer_idx: int
    capabilities: routing.LayerCapabilities
    route: routing.RouteConfig
    spec: str

    @classmethod
    def of(
        cls, layer: object, config: DSAConfig, layer_idx: int, route: routing.RouteConfig
    ) -> LayerRouting:
        """The routing of ``layer``, by the declaration in its own class body.

        Raises:
            TypeError: it declares a capability without what that needs.
        """
        routing.check_declaration(layer)
        declared = routing.declared(layer)
        return cls(config, layer_idx, declared, route, routing.encode_spec(declared, route))

    def decide(self, step: Step, other_consumers: bool) -> routing.Decision:
        """Route and selection of this layer for ``step``, from host facts."""
        kernels = providers.kernel_capabilities(step.ks.device.type)
        facts = routing.BatchFacts(
            max_kv_len=step.max_kv_len,
            max_query_len=step.max_query_len,
            other_consumers=other_consumers,
            masked=step.masked,
            workspace_bytes=current().workspace_bytes,
        )
        spec = self.config.route_spec(self.capabilities, kernels, self.route)
        return routing.decide(spec, facts)

    def record(self, step: Step, decision: routing.Decision) -> None:
        """Tell ``record_decisions`` about ``decision``."""
        device_type = step.ks.device.type
        provider = providers.dispatch(device_type).name
        record(LayerRecord(self.layer_idx, decision, provider, step.ks.shape[0], step.max_kv_len))


@dataclass(frozen=True)
class Step:
    """The rows of one step, packed.

    Attributes:
        ks, ke: [T] int32, the visible interval of packed keys of each row.
        max_kv_len: host upper bound on ``ke - ks``.
        max_query_len: host upper bound on the query tokens of a request.
        masked: whether a mask operand narrows the intervals.
    """

    ks: Tensor
    ke: Tensor
    max_kv_len: int
    max_query_len: int
    masked: bool = False


def plan(layer: LayerRouting, step: Step, other_consumers: bool) -> routing.Decision | None:
    """What eager code does about ``step``; None in traced code.

    There the passes decide, and a decision taken here would be a guard on the length.

    Args:
        layer, step: what is decided about.
        other_consumers: whether anyone but this layer reads the selection.

    Raises:
        ValueError: a forced mode is illegal. A layer asks before its first write where it can.
    """
    if torch.compiler.is_compiling():
        return None
    decision = layer.decide(step, other_consumers)
    if recording():
        layer.record(step, decision)
    return decision


def note(layer: LayerRouting, make_step: Callable[[], Step], other_consumers: bool) -> None:
    """Put what ``decide`` answers for a step on record, where somebody records eager calls.

    For a layer that has nothing to plan, since its selection was its leader's to decide: the step
    is made for the record alone.
    """
    if not torch.compiler.is_compiling() and recording():
        step = make_step()
        layer.record(step, layer.decide(step, other_consumers))


def select(
    layer: LayerRouting,
    step: Step,
    decision: routing.Decision | None,
    score: Callable[[], Tensor],
) -> Tensor | None:
    """The selection that an index-owning layer hands on, without the work that nobody needs.

    Args:
        layer, step, decision: what ``plan`` was asked and what it answered.
        score: makes the selection, [T, K] int32, from the indexer's query and ``ops.index_select``;
            called for a scored selection, and always where there is no decision.

    Returns:
        [T, K] int32 positions relative to ``ks``, or None where nobody reads a selection.
    """
    if decision is None or decision.selection is routing.Selection.SCORED:
        return score()
    if decision.selection is routing.Selection.NONE:
        return None
    return ops.causal_positions(step.ks, step.ke, step.max_kv_len, layer.config.topk)
