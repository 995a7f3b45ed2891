"""The poison allocator: what it fills, what it leaves alone, and that it goes away again."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dsafx import ops
from dsafx.conformance import poison

STALE = 2_000_000_000


@pytest.mark.parametrize(
    "allocate",
    [
        lambda dtype: torch.empty(2, 3, dtype=dtype),
        lambda dtype: torch.empty((2, 3), dtype=dtype),
        lambda dtype: torch.empty_like(torch.zeros(2, 3, dtype=dtype)),
        lambda dtype: torch.empty_strided((2, 3), (1, 2), dtype=dtype),
        lambda dtype: torch.empty_permuted((2, 3), (1, 0), dtype=dtype),
        lambda dtype: torch.zeros(1).new_empty((2, 3), dtype=dtype),
        lambda dtype: torch.zeros(1).new_empty_strided((2, 3), (3, 1), dtype=dtype),
    ],
)
def test_every_way_to_fresh_memory_is_poisoned(allocate: Callable[..., torch.Tensor]):
    with poison():
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            assert bool(allocate(dtype).isnan().all())
        for dtype in (torch.int32, torch.int64):
            assert allocate(dtype).tolist() == [[STALE] * 3] * 2
        assert allocate(torch.uint8).tolist() == [[255] * 3] * 2
        assert allocate(torch.bool).all()
        assert allocate(torch.float8_e4m3fn).float().isnan().all()


def test_outside_the_block_the_allocators_are_the_original_ones():
    before = torch.empty, torch.empty_like, torch.Tensor.new_empty
    with contextlib.suppress(KeyError), poison():
        assert torch.empty is not before[0]
        raise KeyError
    assert (torch.empty, torch.empty_like, torch.Tensor.new_empty) == before


def test_blocks_nest():
    with poison():
        with poison():
            pass
        assert torch.empty(3).isnan().all()


def test_memory_is_poisoned_after_modes_of_two_threads_overlapped():
    entered, left = threading.Event(), threading.Event()

    def overlap():
        with FakeTensorMode():
            entered.set()
            left.wait(60)

    other = threading.Thread(target=overlap)
    with FakeTensorMode():
        other.start()
        assert entered.wait(60)
    left.set()
    other.join()
    with poison():
        assert torch.empty(3).isnan().all()


def test_other_factories_are_left_alone():
    with poison():
        assert torch.zeros(2).tolist() == [0, 0]
        assert torch.empty(0).shape == (0,)
        assert torch.empty(3, device="meta").device.type == "meta"


def test_a_parameter_without_values_can_be_made():
    with poison():
        assert torch.empty(3, requires_grad=True).grad_fn is None
        layer = torch.nn.Linear(3, 2)
    assert layer.weight.isfinite().all()


def test_fake_tensors_and_traced_graphs_stay_as_they_are():
    def fresh(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x).copy_(x)

    with poison():
        with FakeTensorMode():
            assert torch.empty(3).shape == (3,)
        for mode in ("real", "fake", "symbolic"):
            graph = make_fx(fresh, tracing_mode=mode)(torch.ones(3)).graph
            called = [node.target for node in graph.nodes if node.op == "call_function"]
            assert called == [torch.ops.aten.empty_like.default, torch.ops.aten.copy_.default]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_code_is_the_same_graph_with_the_same_result(backend: str):
    graphs: list[int] = []

    def fresh(x: torch.Tensor) -> torch.Tensor:
        made = torch.empty(x.shape[0] + 1)
        made[1:] = x.new_empty(x.shape).copy_(x) * 2
        made[0] = 1
        return made

    def count(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(len(gm.graph.find_nodes(op="call_method", target="fill_")))
        return gm.forward

    with poison():
        torch.compile(fresh, backend=count, fullgraph=True)(torch.ones(2))
        compiled = torch.compile(fresh, backend=backend, fullgraph=True)
        assert compiled(torch.ones(2)).tolist() == [1, 2, 2]
    assert graphs == [0]


def test_an_op_that_leaves_memory_unwritten_is_seen_and_opcheck_still_works():
    q, k, weights = torch.randn(4, 2, 8), torch.randn(9, 8), torch.randn(4, 2)
    ends = torch.tensor([0, 3, 6, 9], dtype=torch.int32)
    args = (q, k, weights, 0 * ends, ends, 9, 4)
    with poison():
        torch.library.opcheck(torch.ops.dsafx.index_select.default, args)
        assert torch.equal(torch.ops.dsafx.index_select(*args), ops.index_select(*args))


FIRST_POISONED = """
import torch
from dsafx.conformance import poison

for _ in range(2):
    with poison(), torch.device("meta"):
        assert torch.empty(2).is_meta and torch.empty_strided((2,), (1,)).is_meta
with torch.device("meta"):
    assert torch.empty(2).is_meta
assert torch.empty in torch.overrides.get_ignored_functions()
assert torch.empty_like in torch.overrides.get_testing_overrides()
"""


def test_what_torch_learns_of_its_functions_in_the_block_is_right_after_it():
    script = [sys.executable, "-c", FIRST_POISONED]
    done = subprocess.run(script, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )


def test_the_option_poisons_tests_and_their_fixtures(tmp_path: Path):
    (tmp_path / "test_memory.py").write_text(
        "import pytest, torch\n"
        "@pytest.fixture\n"
        "def fresh():\n"
        "    return torch.empty(3)\n"
        "def test_fresh(fresh):\n"
        "    assert fresh.isnan().all() and torch.empty(3).isnan().all()\n"
    )
    assert "1 passed" in run_pytest(tmp_path, "--dsafx-poison").stdout


def test_the_kit_runs_by_its_module_name_from_any_folder(tmp_path: Path):
    result = run_pytest(
        tmp_path,
        "--pyargs",
        "dsafx.conformance",
        "--dsafx-provider=reference",
        "--dsafx-size=small",
        "-k",
        "plateau or 65",
    )
    assert "1 passed, 1 skipped" in result.stdout, result.stdout + result.stderr
