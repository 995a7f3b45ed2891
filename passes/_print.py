"""Graphs as short, stable text: one line a node, no paths, symbols in order of appearance."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
from torch import fx

from ._torch_compat import HigherOrderOperator, OpOverload, symbols_of

_LONGEST_STRING = 24
_SYMBOL = re.compile(r"\b[a-z]+\d+\b")


class _Symbols:
    """Names of symbolic sizes that do not depend on where the symbols came from."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def text(self, size: int | torch.SymInt) -> str:
        if not isinstance(size, torch.SymInt):
            return str(size)
        for symbol in symbols_of(size):
            self._names.setdefault(symbol, f"{symbol[0]}{len(self._names)}")
        return _SYMBOL.sub(lambda m: self._names.get(m[0], m[0]), str(size.node.expr))


def graph_text(graph: fx.Graph, *, shapes: bool = False, ends: bool = True) -> str:
    """The text of a graph, such as ``mm: aten.mm(x, weight)`` a line.

    Args:
        graph: any graph of op calls.
        shapes: add the dtype and shape of each value, such as ``f32[s0, 64]``.
        ends: also show the graph's inputs and outputs, a line each.
    """
    symbols = _Symbols()
    inputs: list[str] = []
    lines: list[str] = []
    for node in graph.nodes:
        shape = _value_text(node.meta.get("val"), symbols) if shapes else ""
        if node.op == "placeholder":
            inputs.append(f"{node.name}: {shape}" if shape else node.name)
        elif node.op == "output":
            if ends:
                lines.append(f"output: {_argument_text(node.args[0], symbols)}")
        else:
            call = f"{_target_text(node)}({_arguments_text(node, symbols)})"
            lines.append(f"{node.name}: {call} -> {shape}" if shape else f"{node.name}: {call}")
    if ends:
        lines.insert(0, f"inputs: {', '.join(inputs)}")
    return "\n".join(lines)


def _target_text(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, OpOverload):
        return f"{target.namespace}.{target._opname}"
    if isinstance(target, HigherOrderOperator):
        return str(target._name)
    if isinstance(target, str):
        return f"{node.op}[{target}]"
    return target.__name__


def _arguments_text(node: fx.Node, symbols: _Symbols) -> str:
    positional = [_argument_text(argument, symbols) for argument in node.args]
    named = [f"{key}={_argument_text(value, symbols)}" for key, value in node.kwargs.items()]
    return ", ".join(positional + named)


def _argument_text(argument: Any, symbols: _Symbols) -> str:
    if isinstance(argument, fx.Node):
        return argument.name
    if isinstance(argument, (tuple, list)):
        inside = ", ".join(_argument_text(each, symbols) for each in argument)
        return f"[{inside}]"
    if isinstance(argument, torch.SymInt):
        return symbols.text(argument)
    if argument == sys.maxsize:
        return "end"
    if isinstance(argument, torch.dtype):
        return str(argument).removeprefix("torch.")
    if isinstance(argument, OpOverload):
        return f"{argument.namespace}.{argument._opname}"
    if isinstance(argument, str):
        return repr(argument) if len(argument) <= _LONGEST_STRING else "'...'"
    return str(argument)


_SHORT_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "b8",
}


def _value_text(value: Any, symbols: _Symbols) -> str:
    if isinstance(value, torch.Tensor):
        dtype = _SHORT_DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(symbols.text(size) for size in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_value_text(each, symbols) for each in value)})"
    if isinstance(value, (int, torch.SymInt)):
        return symbols.text(value)
    return ""
