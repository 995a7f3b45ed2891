"""Graphs that a fault breaks behind the passes, and what the verifier says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from _graphs import node_named
from torch import fx

from dsafx.passes._report import PassContext, PassOptions, PassReport
from dsafx.passes.pipeline import PASSES, Pipeline
from dsafx.passes.verify import VerificationError

Fault = Callable[[fx.Graph], Any]


def with_fault(fault: Fault) -> tuple[Any, ...]:
    """The pipeline's passes with one that breaks the graph before it is verified."""

    def fault_pass(graph: fx.Graph, context: PassContext) -> PassReport:
        fault(graph)
        return PassReport("fault")

    return (*PASSES[:-1], fault_pass, PASSES[-1])


def problem(graph: fx.Graph, fault: Fault, *, inference: bool = True, **options: Any) -> str:
    """What a strict pipeline says of a graph that a fault has broken."""
    with pytest.raises(VerificationError) as raised:
        Pipeline(PassOptions(strict=True, **options), with_fault(fault))(graph, inference)
    return str(raised.value)


def rewire(graph: fx.Graph, name: str, operand: str, source: Any) -> None:
    node = node_named(graph, name)
    parameters = [parameter.name for parameter in node.target._schema.arguments]
    node.update_arg(parameters.index(operand), source)


def placeholder(graph: fx.Graph, number: int) -> fx.Node:
    return [node for node in graph.nodes if node.op == "placeholder"][number]
