"""Capturing with CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..ops import providers

Outputs: TypeAlias = Tensor | tuple[Tensor | None, ...]

Capture: TypeAlias = Callable[[Callable[[], Outputs]], tuple[Callable[[], object], Outputs]]
"""Records what a function without arguments does to the device.

Gives what replays it, and its results, which each replay writes anew at the same addresses.
"""


class CUDAGraphs:
    """Each call records one ``torch.cuda.CUDAGraph``; all share one pool of memory.

    A graph may thus overwrite what another left, so that results last until the next replay.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Callable[[], object], Outputs]:
        """Run once to compile, test and allocate, and once more to record.

        Raises:
            NotImplementedError: the provider in use reads values of the device.
        """
        provider = providers.dispatch(self._device.type)
        if not provider.graph_safe:
            raise NotImplementedError(
                f"the provider {provider.name} reads values of the device, which a CUDA graph"
                " cannot hold; capture under use_provider of one that does not"
            )
        with torch.cuda.device(self._device):
            # Capture is refused on the default stream, and so are a kernel's first launches in it.
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                run()
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                outputs = run()
        self._pool = graph.pool()
        return graph.replay, outputs
