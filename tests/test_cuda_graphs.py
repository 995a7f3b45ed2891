"""How a step is recorded as a CUDA graph, with stand-ins for what needs a device."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from dsafx import ops
from dsafx.models._cuda_graphs import CUDAGraphs
from dsafx.ops import providers


def test_a_provider_that_reads_the_device_is_not_captured_in_a_cuda_graph():
    with (
        ops.use_provider("reference"),
        pytest.raises(NotImplementedError, match="the provider reference reads values"),
    ):
        CUDAGraphs(torch.device("cuda"))(lambda: torch.ones(1))


def test_cuda_graphs_warm_up_beside_the_recording_and_share_one_pool(
    monkeypatch: pytest.MonkeyPatch,
):
    events: list[object] = []

    class Stream:
        def wait_stream(self, other: object) -> None:
            events.append("wait")

    class Graph:
        def pool(self) -> str:
            return "pool"

        def replay(self) -> None:
            events.append("replay")

    @contextlib.contextmanager
    def inside(name: str, *args: object, pool: object = None):
        events.append((name, pool))
        yield
        events.append(f"end of {name}")

    def run() -> Tensor:
        events.append("run")
        return torch.ones(1)

    safe = next(each for each in providers.PROVIDERS if each.name == "triton")
    monkeypatch.setattr(providers, "dispatch", lambda device_type: safe)
    for name, value in (
        ("device", lambda device: contextlib.nullcontext()),
        ("current_stream", Stream),
        ("Stream", Stream),
        ("stream", lambda stream: inside("stream")),
        ("CUDAGraph", Graph),
        ("graph", lambda graph, pool: inside("graph", pool=pool)),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    capture = CUDAGraphs(torch.device("cuda"))
    for pool in (None, "pool"):
        events.clear()
        replay, outputs = capture(run)
        assert events == [
            "wait", ("stream", None), "run", "end of stream", "wait",
            ("graph", pool), "run", "end of graph",
        ]  # fmt: skip
        assert isinstance(outputs, Tensor)
        replay()
        assert events[-1] == "replay"
