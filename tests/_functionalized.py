"""Graphs of steps that write to caches, as the post-grad passes see them, without a compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_function
from torch._inductor.decomposition import select_decomp_table


def functionalized(function: Callable[..., Any], *args: Any) -> fx.Graph:
    """The inference graph of ``function``: writes are functional, copies into inputs stand last.

    ``function`` runs once on ``args``, which it may change.
    """
    graphs: list[fx.Graph] = []

    def keep(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        graphs.append(gm.graph)
        return gm.forward

    step = aot_function(
        function,
        keep,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    with torch.no_grad():
        step(*args)
    return graphs[0]
