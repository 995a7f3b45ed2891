"""Graphs as text that no order and no name of nodes can change, to compare two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _uncompiled import passes_only
from torch import fx

from dsafx.passes import PipelineReport, collect, graph_text


def canonical(graph: fx.Graph) -> str:
    """The calls that outputs and writes need, depth first, each named by its op and its turn.

    Outputs come in their order, writes into inputs after them, by the shape of what they write.
    Inputs are named by their first reader, so that two graphs of one text may still take their
    inputs in another order.
    """
    copied = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def visit(node: fx.Node) -> None:
        if node in copies:
            return
        for read in node.all_input_nodes:
            visit(read)
        if node.op == "placeholder":
            made = copied.placeholder(f"input_{sum(n.op == 'placeholder' for n in copies)}")
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            made = copied.create_node(node.op, node.target, args, kwargs)
        made.meta.update(node.meta)
        copies[node] = made

    output = graph.output_node()
    for node in (*output.all_input_nodes, *_writes(graph)):
        visit(node)
    copied.output(fx.node.map_arg(output.args[0], copies.__getitem__))
    return graph_text(copied, ends=False)


def _writes(graph: fx.Graph) -> Iterator[fx.Node]:
    writes = [node for node in graph.nodes if node.op == "call_function" and node.is_impure()]
    return iter(sorted(writes, key=lambda node: str(node.args[0].meta["val"].shape)))


def final_graph(
    function: Callable[..., Any], *args: Any, dynamic: bool = False, **options: Any
) -> tuple[str, Any, PipelineReport]:
    """The canonical graph behind all post-grad passes, the results, and the report."""
    graphs: list[str] = []

    def record(graph: fx.Graph) -> None:
        graphs.append(canonical(graph))

    torch._dynamo.reset()
    compiled = torch.compile(
        function,
        backend=passes_only,
        fullgraph=True,
        dynamic=dynamic,
        options={"strict": True, **options, "post_grad_custom_post_pass": record},
    )
    with torch.no_grad(), collect() as reports:
        results = compiled(*args)
    return graphs[-1], results, reports[-1]
