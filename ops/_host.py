"""What a call into an installed kernel library stands on: its functions, the device, the stream.

Adapters get one ``Host`` as an argument and ask nothing else of the machine, so that a test can put
a recorder in its place.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ._architecture import cuda_architecture

Made = TypeVar("Made")


@dataclass(frozen=True)
class Host:
    """Questions to the machine, as functions.

    available: whether there is a CUDA device; asked before everything else, since helpers of the
        libraries raise without one.
    function: the function or class that a dotted name such as "flashinfer.merge_state" means; the
        library is imported by the first call. Raises ImportError or AttributeError.
    version: of the library, as numbers: (0, 7, 2) for 0.7.2.post1.
    architecture: compute capability times ten of a device, families joined.
    capturing: whether the current stream is recording a CUDA graph.
    stream: a number for the current stream of a device.
    kept: what was made for one device and stream, see ``per_stream``.
    """

    available: Callable[[], bool]
    function: Callable[[str], Any]
    version: Callable[[], tuple[int, ...]]
    architecture: Callable[[torch.device], int]
    capturing: Callable[[], bool]
    stream: Callable[[torch.device], int]
    kept: dict[Hashable, Any] = field(default_factory=dict)

    def per_stream(self, device: torch.device, name: Hashable, make: Callable[[], Made]) -> Made:
        """What ``make`` returned for this ``name``, device and current stream, made once.

        Two streams never share it: kernels that run side by side would write to one workspace. A
        CUDA graph that is being recorded gets its own each time, from the memory of the graph.
        """
        if self.capturing():
            return make()
        key = (name, device, self.stream(device))
        if key not in self.kept:
            self.kept[key] = make()
        made: Made = self.kept[key]
        return made

    def lacks(self, *names: str) -> str | None:
        """None where the library has all these functions, else the reason why not."""
        for name in names:
            try:
                self.function(name)
            except (ImportError, AttributeError, RuntimeError, OSError) as error:
                return f"{name} is not there: {error}"
        return None


def cuda_host(distribution: str) -> Host:
    """The machine itself; ``distribution`` is the library's name as installed."""
    return Host(
        available=functools.cache(torch.cuda.is_available),
        function=functools.cache(_function),
        version=functools.cache(lambda: version_numbers(importlib.metadata.version(distribution))),
        architecture=cuda_architecture,
        capturing=torch.cuda.is_current_stream_capturing,
        stream=lambda device: torch.cuda.current_stream(device).cuda_stream,
    )


def version_numbers(text: str) -> tuple[int, ...]:
    """(0, 7, 2) of "0.7.2.post1": the numbers before anything else."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(number) for number in found[0].split(".")) if found else ()


def _function(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
