"""Every private torch name that this package uses, for torch 2.11 to 2.15, in one place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch._dynamo.utils
from torch import fx
from torch._functorch._aot_autograd.logging_utils import get_aot_compilation_context
from torch._guards import CompileContext, TracingContext, detect_fake_mode
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "AUTO_FUNCTIONALIZED",
    "POST_GRAD_HOOK",
    "PRE_GRAD_HOOK",
    "FakeTensor",
    "FakeTensorMode",
    "GraphPass",
    "HigherOrderOperator",
    "InferenceAwarePass",
    "OpOverload",
    "append_pass",
    "assumptions_of",
    "cache_hits",
    "compile_id",
    "current_hook",
    "depyf_is_watching",
    "expression_of",
    "fake_like",
    "fake_mode_of",
    "guards_are_live",
    "hint",
    "inductor_keys",
    "is_erased",
    "is_unbacked",
    "mode_options",
    "modes",
    "neutral_modes",
    "passes_in",
    "serializable",
    "shape_env_is_live",
    "show_to_depyf",
    "statically_known_true",
    "storage_key",
    "symbols_of",
    "trace",
    "without_caches",
]

POST_GRAD_HOOK = "post_grad_custom_pre_pass"
PRE_GRAD_HOOK = "pre_grad_custom_pass"
AUTO_FUNCTIONALIZED = (auto_functionalized, auto_functionalized_v2)
Hook: TypeAlias = Callable[..., None] | Sequence[Callable[..., None]] | None

_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
_HOOKS_TAKE_LISTS = _VERSION >= (2, 13)

if TYPE_CHECKING or _VERSION >= (2, 12):
    from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass
else:

    class CustomInferenceAwareGraphPass(CustomGraphPass):
        """A pass that also takes whether the graph is one of inference; `_Chain` tells it."""


class _ByValue:
    """Passes of one class with equal fields are equal.

    Dynamo compares the options of two ``torch.compile`` calls by value, and reuses compiled code
    only where they are equal.
    """

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(type(self))


class GraphPass(_ByValue, CustomGraphPass):
    """A pass for the pre-grad hook."""


class InferenceAwarePass(_ByValue, CustomInferenceAwareGraphPass):
    """A pass for the post-grad hook."""


class _Chain(InferenceAwarePass):
    """Several passes as one object, for the versions whose hooks take one (before torch 2.13)."""

    def __init__(self, passes: Sequence[Callable[..., None]]) -> None:
        self.passes = tuple(passes)

    # The pre-grad hook gives the graph alone, and so do all hooks before torch 2.12.
    def __call__(self, graph: fx.Graph, is_inference: bool | None = None) -> None:
        if is_inference is None:
            is_inference = _compiling_inference()
        for each in self.passes:
            if isinstance(each, CustomInferenceAwareGraphPass):
                each(graph, is_inference)
            else:
                each(graph)

    def uuid(self) -> Any | None:
        """The uuids of all passes, or None, which turns caching off, where one has none."""
        uuids = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.passes]
        return tuple(uuids) if all(uuids) else None


def _compiling_inference() -> bool:
    """Whether the graph that AOTAutograd or AOTInductor compiles now is one of inference."""
    names, *_ = get_aot_compilation_context()
    return V.aot_compilation is True or any(name.endswith("_inference") for name in names)


def passes_in(hook: Hook) -> tuple[Callable[..., None], ...]:
    """The passes that a hook holds: one, several, or none."""
    if hook is None:
        return ()
    if isinstance(hook, _Chain):
        return hook.passes
    return (hook,) if callable(hook) else tuple(hook)


def append_pass(existing: Hook, ours: Callable[..., None]) -> Hook:
    """The value of a hook that runs the passes already there and then ``ours``."""
    passes = [*passes_in(existing), ours]
    if not _HOOKS_TAKE_LISTS:
        return _Chain(passes)
    return passes if len(passes) > 1 else ours


def current_hook(name: str) -> Hook:
    """What the caller's own Inductor configuration has in the pass hook ``name``."""
    from torch._inductor import config

    # A copy of the whole configuration would hold copies of the passes.
    value: Hook = getattr(config, name)
    return value


def inductor_keys() -> list[str]:
    """The names of all Inductor options."""
    from torch._inductor import config

    return list(config.get_config_copy())


def modes() -> list[str]:
    """The modes of ``torch.compile``."""
    from torch._inductor import list_mode_options

    return list(list_mode_options())


def mode_options(mode: str | None) -> dict[str, Any]:
    """The Inductor options that a ``torch.compile`` mode stands for."""
    if mode is None or mode == "default":
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def serializable(compiled: Any) -> Callable[..., Any]:
    """What ``compile_fx`` made, in the form that ``aot_compile`` can save.

    Before torch 2.12 it takes that form from the backend, unless the backend is Inductor itself.
    """
    if _VERSION < (2, 12) and torch._functorch.config.bundled_autograd_cache:
        from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable

        compiled = BundledAOTAutogradSerializableCallable(compiled)
    return cast("Callable[..., Any]", compiled)


def is_erased(node: fx.Node) -> bool:
    """Whether a node has left its graph."""
    return bool(node._erased)


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The fake mode of the values in ``graph``."""
    if isinstance(V.fake_mode, FakeTensorMode):
        return V.fake_mode
    # The first is enough: a graph is traced under one mode, and asking all makes edits quadratic.
    values = (node.meta["val"] for node in graph.nodes if "val" in node.meta)
    mode = detect_fake_mode(next((v for v in values if isinstance(v, FakeTensor)), None))
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


def assumptions_of(mode: FakeTensorMode) -> Hashable:
    """What grows where more becomes known of the symbols of a fake mode."""
    env = mode.shape_env
    if env is None:
        return None
    known = (env.guards, env.replacements, env.divisible)
    return (*map(len, known), env.num_deferred_runtime_asserts)


def expression_of(value: int | torch.SymInt) -> Hashable:
    """The expression in which a size is written; equal only for sizes that are traced alike."""
    return (torch.SymInt, value.node.expr) if isinstance(value, torch.SymInt) else value


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
    known = value.node.expr.xreplace(value.node.shape_env.backed_var_to_val)
    return int(known) if known.is_number else None


def storage_key(value: torch.Tensor) -> Hashable:
    """Equal for tensors that share a storage."""
    return StorageWeakRef(value.untyped_storage())


def fake_like(
    value: FakeTensor, mode: FakeTensorMode, storage: torch.UntypedStorage | None
) -> FakeTensor:
    """A fake tensor with the metadata of ``value``, in ``storage`` or in one of its own.

    Built as the cache of fake tensors builds its answers, which is many times faster than an op.
    """
    place = (value.storage_offset(), value.shape, value.stride())
    own = torch.UntypedStorage(0, device="meta") if storage is None else storage
    env = mode.shape_env
    with (
        torch.no_grad(),
        in_kernel_invocation_manager(mode),
        contextlib.nullcontext() if env is None else env.suppress_guards(),
    ):
        meta = torch.empty((), dtype=value.dtype, device="meta")
        meta.set_(own, *place)
    return FakeTensor(mode, meta, value.device)


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


def compile_id() -> str:
    """The compile that runs now, as torch's own logs name it, such as ``0/1``; ``-`` outside."""
    current = CompileContext.current_compile_id()
    return "-" if current is None else str(current)


def cache_hits() -> int:
    """A number that grows where a graph comes from Inductor's or AOTAutograd's cache."""
    counters = torch._dynamo.utils.counters
    in_inductor: int = counters["inductor"]["fxgraph_cache_hit"]
    in_autograd: int = counters["aot_autograd"]["autograd_cache_hit"]
    return in_inductor + in_autograd


def without_caches() -> AbstractContextManager[None]:
    """Compile without on-disk caches, in the calling thread."""
    patched: AbstractContextManager[None] = torch.compiler.config.patch(  # type: ignore[attr-defined]
        force_disable_caches=True
    )
    return patched


def depyf_is_watching() -> bool:
    """Whether a ``depyf.prepare_debug`` block is open: it replaces a function of FX meanwhile."""
    return torch.fx.graph_module._exec_with_source.__module__.startswith("depyf.")


def show_to_depyf(name: str, graph: fx.Graph, copy: fx.Graph) -> None:
    """Let depyf write ``graph``, of which ``copy`` is a copy, to a file with ``name`` in its name.

    depyf puts code of its own into the module that it prints, and finds its folder by the file that
    the module's code is in: so it gets a new module.
    """
    root = torch.nn.Module() if graph.owning_module is None else graph.owning_module
    # Looked up at each call, because depyf replaces its body.
    show: Callable[..., object] = torch._dynamo.utils.lazy_format_graph_code  # type: ignore[attr-defined]
    show(name, fx.GraphModule(root, copy))
