"""Every private torch name that this package uses, for torch 2.11 to 2.15, in one place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch._dynamo.utils
from torch import fx
from torch._guards import TracingContext, detect_fake_mode
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomInferenceAwareGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

__all__ = [
    "AUTO_FUNCTIONALIZED",
    "POST_GRAD_HOOK",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "InferenceAwarePass",
    "OpOverload",
    "append_pass",
    "current_hook",
    "fake_mode_of",
    "guards_are_live",
    "hint",
    "inductor_keys",
    "is_erased",
    "is_unbacked",
    "log_graph",
    "mode_options",
    "neutral_modes",
    "shape_env_is_live",
    "statically_known_true",
    "symbols_of",
    "trace",
]

POST_GRAD_HOOK = "post_grad_custom_pre_pass"
AUTO_FUNCTIONALIZED = (auto_functionalized, auto_functionalized_v2)
InferenceAwarePass = CustomInferenceAwareGraphPass
Hook: TypeAlias = Callable[..., None] | Sequence[Callable[..., None]] | None

_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
_HOOKS_TAKE_LISTS = _VERSION >= (2, 13)


class _Chain(CustomInferenceAwareGraphPass):
    """Several passes as one object, for the versions whose hooks take one (before torch 2.13)."""

    def __init__(self, passes: Sequence[Callable[..., None]]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: fx.Graph, is_inference: bool) -> None:  # type: ignore[override]
        for each in self.passes:
            if isinstance(each, CustomInferenceAwareGraphPass):
                each(graph, is_inference)
            else:
                each(graph)

    def uuid(self) -> Any | None:
        """The uuids of all passes, or None, which turns caching off, where one has none."""
        uuids = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.passes]
        return tuple(uuids) if all(uuids) else None


def append_pass(existing: Hook, ours: Callable[..., None]) -> Hook:
    """The value of a pass hook that runs the passes already there and then ``ours``."""
    if existing is None:
        before: tuple[Callable[..., None], ...] = ()
    elif isinstance(existing, _Chain):
        before = existing.passes
    elif isinstance(existing, (list, tuple)):
        before = tuple(existing)
    else:
        before = (existing,)  # type: ignore[assignment]
    if not before:
        return ours
    return [*before, ours] if _HOOKS_TAKE_LISTS else _Chain([*before, ours])


def current_hook() -> Hook:
    """What the caller's own Inductor configuration has in the post-grad hook."""
    from torch._inductor import config

    value: Hook = config.post_grad_custom_pre_pass
    return value


def inductor_keys() -> list[str]:
    """The names of all Inductor options."""
    from torch._inductor import config

    return list(config.get_config_copy())


def mode_options(mode: str | None) -> dict[str, Any]:
    """The Inductor options that a ``torch.compile`` mode stands for."""
    if mode is None or mode == "default":
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def is_erased(node: fx.Node) -> bool:
    """Whether a node has left its graph."""
    return bool(node._erased)


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The fake mode of the values in ``graph``."""
    if isinstance(V.fake_mode, FakeTensorMode):
        return V.fake_mode
    values = [node.meta["val"] for node in graph.nodes if "val" in node.meta]
    mode = detect_fake_mode(values)
    if mode is None:
        raise ValueError("the graph has no fake values: trace it under a FakeTensorMode")
    return mode


def shape_env_is_live(mode: FakeTensorMode) -> bool:
    """Whether a guard that is added now will still be seen by whoever checks guards."""
    return mode.shape_env is None or not mode.shape_env.frozen


def guards_are_live(graph: fx.Graph) -> bool:
    """Whether guards on lengths are checked: an ordinary forward compile by Dynamo.

    False under AOT compilation and export, in a lazily compiled backward, and outside of any
    compile.
    """
    if V.aot_compilation is True or TracingContext.try_get() is None:
        return False
    return shape_env_is_live(fake_mode_of(graph))


def symbols_of(value: int | torch.SymInt) -> list[str]:
    """Names of the symbols in a size, in the order in which they are printed."""
    if not isinstance(value, torch.SymInt):
        return []
    text = str(value.node.expr)
    return sorted((str(symbol) for symbol in value.node.expr.free_symbols), key=text.index)


def is_unbacked(value: int | torch.SymInt | torch.SymBool) -> bool:
    """Whether a value depends on data, so that no guard can be put on it."""
    return isinstance(value, (torch.SymInt, torch.SymBool)) and bool(free_unbacked_symbols(value))


def hint(value: int | torch.SymInt) -> int | None:
    """The value of a size in the example inputs, or None where it has none; adds no guard."""
    if not isinstance(value, torch.SymInt):
        return value
    if is_unbacked(value):
        return None
    known = value.node.expr.xreplace(_backed_values(value.node.shape_env))
    return int(known) if known.is_number else None


def _backed_values(shape_env: Any) -> dict[Any, Any]:
    new = _VERSION >= (2, 13)
    values: dict[Any, Any] = shape_env.backed_var_to_val if new else shape_env.var_to_val
    return values


@contextlib.contextmanager
def neutral_modes(mode: FakeTensorMode) -> Iterator[None]:
    """Run ops on fake values, without gradients and without the autocast of the calling code."""
    with mode, torch.no_grad(), torch._C._DisableAutocast():
        yield


def trace(function: Callable[..., Any], values: Sequence[Any], mode: FakeTensorMode) -> fx.Graph:
    """The ATen graph of a plain function on fake values, as Inductor has it before its passes."""
    with neutral_modes(mode):
        traced = make_fx(function, decomposition_table=select_decomp_table())(*values)
    graph: fx.Graph = traced.graph
    # Inductor turned the views of the graph around this one into reshapes before its passes.
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    graph.eliminate_dead_code()
    return graph


def log_graph(log: Callable[..., None], name: str, graph: fx.Graph) -> None:
    """Show a graph to ``log`` and to whatever listens to Dynamo's graph printing, such as depyf.

    The text is made only when somebody reads it.
    """
    if graph.owning_module is not None:
        # Looked up at each call, because listeners replace it.
        show: Callable[..., object] = torch._dynamo.utils.lazy_format_graph_code  # type: ignore[attr-defined]
        log("%s", show(name, graph.owning_module))
