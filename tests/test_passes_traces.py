"""Functions that are traced once for many places give the nodes that tracing each time gives."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from _graphs import Layer, evaluate, guarding_context, prompt, trace
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from dsafx import ops
from dsafx.passes import _traces
from dsafx.passes._report import PassContext, PassOptions
from dsafx.passes._torch_compat import FakeTensorMode, fake_mode_of, hint, storage_key, symbols_of
from dsafx.passes._traces import Renew, Traces
from dsafx.passes.lower import lower_pass
from dsafx.passes.pipeline import Pipeline
from dsafx.passes.resolve_route import resolve_route_pass

LAYER = Layer()
NAMES = [name for name, _ in LAYER.named_parameters()]


class Forgetful(Traces):
    """Traces anew each time."""

    def of(
        self, function: Callable[..., Any], args: Any, mode: FakeTensorMode
    ) -> tuple[fx.Graph, Renew]:
        return Traces().of(function, args, mode)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that were traced so far."""
    made: list[Any] = []

    def counting(function: Any, values: Any, mode: Any) -> fx.Graph:
        made.append(function)
        return tracer(function, values, mode)

    tracer = _traces.trace
    monkeypatch.setattr(_traces, "trace", counting)
    return made


def described(graph: fx.Graph) -> list[Any]:
    """All of a graph, with storages numbered in the order in which they are met."""
    storages: dict[Hashable, int] = {}

    def of(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, torch.Tensor):
            shown = (value.shape, value.stride(), value.storage_offset())
            flags = (value.dtype, value.device, value.requires_grad, value.is_contiguous())
            number = storages.setdefault(storage_key(value), len(storages))
            # By the example inputs, because what an op allocates is written in several ways.
            size = hint(value.untyped_storage().nbytes())
            return (type(value), number, size, str(shown), flags)
        if isinstance(value, (tuple, list)):
            return [type(value), *map(of, value)]
        if isinstance(value, dict):
            return {key: of(each) for key, each in value.items()}
        return (type(value), str(value))

    fields = ("name", "op", "target", "args", "kwargs", "meta")
    return [
        [getattr(node, name) if name == "target" else of(getattr(node, name)) for name in fields]
        for node in graph.nodes
    ]


def tensors(graph: fx.Graph) -> list[int]:
    """The identities of all values that are tensors."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    return [id(n.meta["val"]) for n in nodes if isinstance(n.meta["val"], Tensor)]


def four_layers(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, *step: Tensor) -> list[Tensor]:
    """Three like layers and one of another length, which share their weights."""
    ks, ke, more_cos, more_sin, more_ks, more_ke, *weights = step
    given = dict(zip(NAMES, weights, strict=True))
    outputs: list[Tensor] = []
    for each, args in (
        (x, (cos, sin, ks, ke)),
        (torch.tanh(x), (cos, sin, ks, ke)),
        (torch.sin(x), (cos, sin, ks, ke)),
        (y, (more_cos, more_sin, more_ks, more_ke)),
    ):
        out, key = torch.func.functional_call(LAYER, given, (each, *args))
        twice = ops.layer_norm(key, given["k_norm"], given["k_norm"], 1e-6)
        apart = ops.layer_norm(key, given["k_norm"], given["k_bias"], 1e-6)
        # The last view of an operand, and two operands that are parts of one tensor.
        parts = ops.rope(key[:, :4], key[:, 4:6], key[:, 6:8], "half")
        outputs += [out, twice, apart, parts, ops.rope(key[:, :4], *args[:2], "half")]
    return outputs


def inputs(first: int, last: int) -> list[Tensor]:
    x, cos, sin, ks, ke = prompt(first)
    y, *others = prompt(last)
    return [x, y, cos, sin, ks, ke, *others, *(each.detach() for each in LAYER.parameters())]


def with_symbolic_rows(args: list[Tensor], count: int) -> list[Tensor]:
    """Fakes of ``args``, in which the rows of the first ``count`` are symbols."""
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def fake(number: int, value: Tensor) -> Tensor:
        dims = [DimDynamic.STATIC] * value.dim()
        dims[0] = DimDynamic.DUCK if number < count else DimDynamic.STATIC
        source = ConstantSource(f"arg{number}")
        context = StatelessSymbolicContext(dynamic_sizes=dims)
        return mode.from_tensor(value, source=source, symbolic_context=context)

    return [fake(number, value) for number, value in enumerate(args)]


def rewritten(length: int, symbolic: bool, context: PassContext) -> fx.Graph:
    args = inputs(length, length + 5)
    if symbolic:
        args = with_symbolic_rows(args, len(args) - len(NAMES))
    graph = trace(four_layers, *args)
    assert resolve_route_pass(graph, context).matched == 4
    lower_pass(graph, context)
    graph.lint()
    rows = next(iter(graph.nodes)).meta["val"].shape[0]
    assert bool(symbols_of(rows)) is symbolic
    return graph


@pytest.mark.parametrize(("length", "symbolic"), [(9, False), (9, True), (40, False)])
def test_nodes_are_those_that_tracing_each_time_gives(
    length: int, symbolic: bool, traced: list[Any]
):
    graph = rewritten(length, symbolic, guarding_context())
    once = len(traced)
    traced.clear()
    anew = rewritten(length, symbolic, guarding_context(traces=Forgetful()))
    # Twelve for the first of the like layers, eight for the other, which has norms without rows.
    assert (once, len(traced)) == (20, 48)
    for ours, theirs in zip(described(graph), described(anew), strict=True):
        assert ours == theirs
    assert len(set(tensors(graph))) == len(tensors(graph))
    args = inputs(length, length + 5)
    results = zip(evaluate(graph, *args), four_layers(*args), strict=True)
    for ours, theirs in results:
        torch.testing.assert_close(ours, theirs)


def nodes_of(function: Callable[..., Any], *args: Any, symbolic: bool = False) -> list[fx.Node]:
    """The nodes whose values ``function`` returns."""
    graph = trace(function, *args, symbolic=symbolic)
    return list(graph.output_node().args[0])


def is_traced_again(first: list[Any], second: list[Any]) -> bool:
    """Whether ``double`` of ``second`` is traced although that of ``first`` was."""
    traces = Traces()
    graphs = [traces.of(double, args, fake_mode_of(args[0].graph))[0] for args in (first, second)]
    return graphs[0] is not graphs[1]


def double(x: Tensor, *others: Any) -> Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, 1.0), (1, True), (0.0, -0.0), ("half", "interleaved"), (None, 0)],
)
def test_unlike_constants_are_traced_apart(first: Any, second: Any):
    x, y = nodes_of(lambda x: (x, x + 1), torch.randn(3))
    assert not is_traced_again([x, first], [y, first])
    assert is_traced_again([x, first], [y, second])


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x[:3, :4],
        lambda x: x[:, :4].t(),
        lambda x: x[:, 1:],
        lambda x: x[:, :4].double(),
        lambda x: x[None, :, :4],
        lambda x: torch.empty_strided((4, 4), (5, 1), device="meta"),
        lambda x: torch.empty_strided((4, 4), (6, 1)),
    ],
)
def test_operands_of_other_metadata_are_traced_apart(other: Callable[[Tensor], Tensor]):
    x, y, z = nodes_of(lambda x: (x[:, :4], x[:, :4], other(x)), torch.randn(4, 5))
    assert not is_traced_again([x], [y])
    assert is_traced_again([x], [z])


def test_another_function_of_the_same_operands_is_traced():
    (x,) = nodes_of(lambda x: (x,), torch.randn(3))
    mode, traces = fake_mode_of(x.graph), Traces()
    assert traces.of(double, [x], mode)[0] is not traces.of(torch.relu, [x], mode)[0]


def test_operands_that_are_one_tensor_or_lie_in_one_are_traced_apart():
    x, y, z, part = nodes_of(lambda x: (x, x + 1, x + 2, x.view(3)), torch.randn(3))
    assert not is_traced_again([x, y], [y, z])
    assert is_traced_again([x, y], [x, x])
    assert is_traced_again([x, y], [x, part])
    assert is_traced_again([x, x], [x, part])


def test_a_size_is_told_by_its_expression():
    def sizes(x: Tensor, y: Tensor) -> list[Any]:
        return [x, x + 1, y, x.shape[0], y.shape[0]]

    x, like, y, of_x, of_y = nodes_of(sizes, torch.randn(3), torch.randn(7), symbolic=True)
    assert not is_traced_again([x, of_x], [like, of_x])
    assert is_traced_again([x], [y])
    assert is_traced_again([x, of_x], [like, of_y])
    assert not is_traced_again([x, 3], [like, 3])
    assert is_traced_again([x, of_x], [x, 3])


def test_what_becomes_known_of_a_size_makes_another_trace():
    (x,) = nodes_of(lambda x: (x,), torch.randn(7), symbolic=True)
    mode, traces = fake_mode_of(x.graph), Traces()
    before, _ = traces.of(double, [x], mode)
    assert traces.of(double, [x], mode)[0] is before
    assert x.meta["val"].shape[0] > 5
    assert traces.of(double, [x], mode)[0] is not before


def test_a_number_that_is_an_input_is_not_a_constant():
    x, number = trace(lambda x, n: x * n, torch.randn(3), 3).find_nodes(op="placeholder")
    number.meta["val"] = 3
    assert is_traced_again([x, number], [x, 3])


def test_an_argument_that_is_not_understood_is_traced_anew():
    x, y = nodes_of(lambda x: (x, x + 1), torch.randn(3))
    assert is_traced_again([x, slice(3)], [y, slice(3)])


def test_two_graphs_share_no_trace():
    first, second = (nodes_of(lambda x: (x,), torch.randn(3)) for _ in range(2))
    assert is_traced_again(first, second)


def test_a_pipeline_traces_once_what_its_layers_share(traced: list[Any]):
    def layers(count: int) -> Callable[..., Tensor]:
        def stack(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            for _ in range(count):
                x = ops.rope(ops.rms_norm(x, weight, 1e-6), cos, sin, "half")
            return x

        return stack

    angle = torch.randn(5, 4)
    args = (torch.randn(5, 8), torch.rand(8), angle.cos(), angle.sin())
    pipeline = Pipeline(PassOptions(strict=True))
    for count in (1, 6):
        traced.clear()
        pipeline(trace(layers(count), *args), True)
        assert len(traced) == 2
