"""What every test starts from: a fixed seed, a compile cache of this run, no compiled code."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch

from dsafx.conformance import interpreter
from dsafx.ops.libraries import interpreted

if TYPE_CHECKING:
    from _ranks import Ranks

hypothesis.settings.register_profile("dsafx", deadline=None, derandomize=True)
hypothesis.settings.load_profile("dsafx")


def pytest_configure(config: pytest.Config) -> None:
    """Give this run a compile cache of its own, keep it from the network, correct an interpreter.

    A cache of an earlier run would hide the passes, which do not run on a hit; and a pool of
    compile processes for each worker costs more than these small graphs need.
    """
    cache = tempfile.TemporaryDirectory(prefix="dsafx-tests-")
    config.add_cleanup(cache.cleanup)
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    patch.setenv("TORCHINDUCTOR_CACHE_DIR", cache.name)
    patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    patch.setenv("HF_HUB_OFFLINE", "1")
    correct = interpreter()
    correct.__enter__()
    config.add_cleanup(lambda: correct.__exit__(None, None, None))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the large matrices, and Triton's interpreter, to those who ask for them by name."""
    left = {name for name in ("matrix", "triton") if name not in config.option.markexpr}
    if not interpreted():
        left.add("triton")
    unasked = [
        item for item in items if left.intersection(mark.name for mark in item.iter_markers())
    ]
    config.hook.pytest_deselected(items=unasked)
    items[:] = [item for item in items if item not in unasked]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two processes with a process group, started for the first test that wants them."""
    from _ranks import Ranks

    started = Ranks()
    yield started
    started.close()


@pytest.fixture(autouse=True)
def _fixed_start() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
