"""The few verbs with which passes edit graphs.

Invariant of every verb: a new node has ``meta["val"]`` from its op's fake, the provenance of the
node that it stands for, and its own ``eager_input_vals``; it never inherits another node's metadata
wholesale, which makes lowering read strides of operands that are not there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ._torch_compat import OpOverload, fake_mode_of, is_erased, neutral_modes
from ._traces import Renew, Traces

Argument: TypeAlias = Any

# The name of the node that a pass put a new node in place of; only new nodes have it.
ORIGIN = "dsafx_origin"
# The names of the nodes whose values a node gives since ``replace``.
STANDS_FOR = "dsafx_stands_for"

_PROVENANCE = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom", "from_node")

_SELECTIONS = frozenset(
    {
        "causal_positions",
        "index_select",
        "index_select_paged",
        "index_select_partial",
        "merge_selection",
        "select_topk",
    }
)

aten = torch.ops.aten
VIEWS = frozenset(
    {
        aten.alias.default,
        aten.as_strided.default,
        aten.clone.default,
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.reshape.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten._unsafe_view.default,
        operator.getitem,
    }
)


def is_ours(node: fx.Node) -> bool:
    """Whether a node calls an op of this package."""
    return (
        node.op == "call_function"
        and isinstance(node.target, OpOverload)
        and node.target.namespace == "dsafx"
    )


def selects(node: fx.Node) -> bool:
    """Whether a node calls an op that answers with selected positions."""
    return is_ours(node) and node.target._opname in _SELECTIONS  # type: ignore[union-attr]


def calls(graph: fx.Graph, *targets: Any) -> list[fx.Node]:
    """The calls of ``targets`` in program order, safe to edit while iterating."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


def arguments(node: fx.Node) -> dict[str, Argument]:
    """Arguments of an op call by the names in its schema, omitted defaults included."""
    target = node.target
    if not isinstance(target, OpOverload):
        raise TypeError(f"{node.name} does not call an op but {target}")
    found: dict[str, Argument] = {}
    for position, parameter in enumerate(target._schema.arguments):
        if position < len(node.args):
            found[parameter.name] = node.args[position]
        elif parameter.name in node.kwargs:
            found[parameter.name] = node.kwargs[parameter.name]
        elif parameter.has_default_value():
            found[parameter.name] = parameter.default_value
        else:
            raise ValueError(f"{node.name} lacks the argument {parameter.name}")
    return found


def value_of(argument: Argument) -> Any:
    """The fake tensor, size or constant that an argument stands for."""
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def values_of(tree: Any) -> Any:
    """``value_of`` of every leaf of a nested argument."""
    return fx.node.map_arg(tree, value_of)


def emit(
    graph: fx.Graph, target: Callable[..., Any], *args: Argument, origin: fx.Node | None = None
) -> fx.Node:
    """Add a call at the graph's insertion point, with the value that the op's fake gives.

    Args:
        graph: the graph, inside ``graph.inserting_before(...)``.
        target: an op overload, or a function such as ``operator.getitem``.
        args: nodes and constants.
        origin: the node that the new one stands for; gives the provenance.
    """
    name = target._opname if isinstance(target, OpOverload) else None
    node = graph.create_node("call_function", target, args, name=name)
    values = values_of(args)
    with neutral_modes(fake_mode_of(graph)):
        node.meta["val"] = target(*values)
    if isinstance(target, OpOverload):
        node.meta["eager_input_vals"] = (values, {})
    if origin is not None:
        _set_provenance(node, origin)
    return node


def inline(
    graph: fx.Graph,
    node: fx.Node,
    function: Callable[..., Any],
    args: Sequence[Argument],
    traces: Traces | None = None,
) -> Any:
    """Insert the ATen graph of ``function(*args)`` before ``node`` and return its outputs as nodes.

    Args:
        graph: the graph of ``node``.
        node: gives the place and the provenance; stays as it is.
        function: plain functional PyTorch, which may call ops of this package.
        args: nodes and constants; only nodes become inputs of the trace.
        traces: earlier traces, used again where they are the same; keeps this one.

    Raises:
        ValueError: the function writes to a tensor or holds a tensor constant.
    """
    traces = Traces() if traces is None else traces
    traced, renew = traces.of(function, args, fake_mode_of(graph))
    inputs = [leaf for leaf in pytree.tree_leaves(tuple(args)) if isinstance(leaf, fx.Node)]
    copies: dict[fx.Node, Any] = dict(
        zip((each for each in traced.nodes if each.op == "placeholder"), inputs, strict=True)
    )
    outputs: Any = None
    for each in traced.nodes:
        if each.op == "output":
            outputs = fx.node.map_arg(each.args[0], copies.__getitem__)
        elif each.op == "call_function":
            if isinstance(each.target, OpOverload) and each.target._schema.is_mutable:
                raise ValueError(f"{function} cannot be inlined: it writes with {each.target}")
            with graph.inserting_before(node):
                copies[each] = _copy(graph, each, copies, renew, node)
        elif each.op != "placeholder":
            raise ValueError(f"{function} cannot be inlined: it holds the constant {each.target}")
    return outputs


def _copy(
    graph: fx.Graph,
    node: fx.Node,
    copies: dict[fx.Node, Any],
    renew: Renew,
    origin: fx.Node,
) -> fx.Node:
    """A traced node in ``graph``: values of its own, the provenance of ``origin``."""
    copied = graph.create_node(
        "call_function",
        node.target,
        fx.node.map_arg(node.args, copies.__getitem__),
        fx.node.map_arg(node.kwargs, copies.__getitem__),
        name=node.name,
    )
    for key in ("val", "eager_input_vals"):
        if key in node.meta:
            copied.meta[key] = renew(node.meta[key])
    if "tensor_meta" in node.meta:
        copied.meta["tensor_meta"] = node.meta["tensor_meta"]
    _set_provenance(copied, origin)
    return copied


def copy_provenance(node: fx.Node, origin: fx.Node) -> None:
    """Say of a new node where the code of ``origin`` came from."""
    node.meta.update({key: origin.meta[key] for key in _PROVENANCE if key in origin.meta})


def _set_provenance(node: fx.Node, origin: fx.Node) -> None:
    copy_provenance(node, origin)
    node.meta[ORIGIN] = origin.name


def replace(node: fx.Node, outputs: fx.Node | Sequence[fx.Node]) -> None:
    """Let every user of ``node`` read ``outputs`` instead, and erase what became dead by it.

    Args:
        node: returns one tensor, or several that its users take apart by ``operator.getitem``.
        outputs: one node, or one for each output.
    """
    if isinstance(outputs, fx.Node):
        _stand_in(outputs, node)
    else:
        for user in list(node.users):
            if user.target is not operator.getitem:
                raise ValueError(f"{user.name} reads all outputs of {node.name} at once")
            _stand_in(outputs[cast(int, user.args[1])], user)
            node.graph.erase_node(user)
    erase(node)


def _stand_in(new: fx.Node, old: fx.Node) -> None:
    names = (*new.meta.get(STANDS_FOR, ()), *old.meta.get(STANDS_FOR, ()), old.name)
    new.meta[STANDS_FOR] = names
    old.replace_all_uses_with(new)


def erase(*nodes: fx.Node) -> list[str]:
    """Erase nodes that nothing reads, then their producers that nothing reads any more.

    Stops at graph inputs and at everything that writes, has an effect or draws random numbers, so
    that a cache write stays whatever becomes of its readers. Stops at selections too: whether an
    unread one may go is for ``close_selection`` to say. Returns the names of the erased nodes.
    """
    erased: list[str] = []
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if is_erased(node) or node.users or not _is_pure(node):
            continue
        waiting.extend(each for each in node.all_input_nodes if not selects(each))
        node.graph.erase_node(node)
        erased.append(node.name)
    return erased


def _is_pure(node: fx.Node) -> bool:
    if node.op != "call_function" or node.is_impure():
        return False
    return isinstance(node.target, OpOverload) or node.target.__module__ == "_operator"


def hoist(nodes: Iterable[fx.Node], before: fx.Node) -> None:
    """Move what ``nodes`` are computed from, and themselves, above ``before``, in their order.

    Raises:
        ValueError: one of them depends on ``before``.
    """
    late: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node is before:
            raise ValueError(f"an operand depends on {before.name}")
        if before < node and node not in late:
            late.add(node)
            waiting.extend(node.all_input_nodes)
    for node in sorted(late):
        before.prepend(node)


def strip_views(node: fx.Node) -> fx.Node:
    """The node whose values ``node`` shows: through views, copies and picking of outputs."""
    while node.op == "call_function" and node.target in VIEWS:
        source = node.args[0]
        if not isinstance(source, fx.Node):
            break
        node = source
    return node


def restore(graph: fx.Graph, saved: fx.Graph) -> None:
    """Put the nodes of ``saved`` back into ``graph``; inputs stay the nodes that they are."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in reversed(list(graph.nodes)):
        if node.op != "placeholder":
            graph.erase_node(node)
    copies: dict[fx.Node, fx.Node] = {}
    remaining = iter(inputs)
    for node in saved.nodes:
        if node.op == "placeholder":
            copies[node] = next(remaining)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)


def copy_of(graph: fx.Graph) -> fx.Graph:
    """A copy of ``graph`` that later edits do not touch."""
    saved = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = saved.node_copy(node, copies.__getitem__)
    return saved
