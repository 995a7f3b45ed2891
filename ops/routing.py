"""The routing contract: one decision for eager and compiled code.

A segment's attention can run as dense MHA (expand the latents of all keys), masked MHA (expand
them, attend to the selected ones) or top-k MQA (absorb the query, read the selected latents).
Wherever a route is legal, all compute the same function, so that a wrong choice costs time and
never correctness. ``decide`` is the only place that chooses; its reasons are enumerated, and
``truth_table`` prints what it answers.

    spec = RouteSpec(layer, kernels, config, topk=2048, ...)    what the layer and device can do
    facts = BatchFacts(max_kv_len=1024, max_query_len=1024)     host facts of one segment
    print(decide(spec, facts))                                  route, selection, reason

Nothing here imports torch. Symbolic lengths pass through unread: the comparison is an argument.

| file | what it holds |
|---|---|
| ``_capabilities`` | declarations of layers and kernels: opt-in, not inherited |
| ``_route_spec`` | configuration and dimensions, and the text form that ops carry |
| ``_route_types`` | routes, selections, reasons, batch facts |
| ``_cost`` | the cost model as integer thresholds |
| ``_decide`` | the decision |
| ``_schedule`` | which layers share a selection |
| ``_backends`` | public kernels and their flags, as data |
| ``_truth_table`` | the tables, made by asking ``decide`` |
"""

from __future__ import annotations

from ._backends import Backend, known_backends
from ._capabilities import (
    REQUIRES,
    KernelCapabilities,
    LayerCapabilities,
    check_declaration,
    declared,
    declared_kernels,
)
from ._cost import CostConstants, Thresholds, dense_limit, thresholds
from ._decide import decide, selection_form
from ._route_spec import RouteConfig, RouteSpec, decode_spec, encode_spec
from ._route_types import BatchFacts, Compare, Decision, Length, Reason, Route, Selection
from ._schedule import index_schedule, leaders
from ._truth_table import backend_table, document, truth_table

__all__ = [
    "REQUIRES",
    "Backend",
    "BatchFacts",
    "Compare",
    "CostConstants",
    "Decision",
    "KernelCapabilities",
    "LayerCapabilities",
    "Length",
    "Reason",
    "Route",
    "RouteConfig",
    "RouteSpec",
    "Selection",
    "Thresholds",
    "backend_table",
    "check_declaration",
    "decide",
    "declared",
    "declared_kernels",
    "decode_spec",
    "dense_limit",
    "document",
    "encode_spec",
    "index_schedule",
    "known_backends",
    "leaders",
    "selection_form",
    "thresholds",
    "truth_table",
]
