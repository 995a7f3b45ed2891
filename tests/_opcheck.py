"""What every op is put through: opcheck, symbolic lengths, gradients compiled and eager."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("contiguous", "sliced", "transposed")


def arrange(x: Tensor, layout: str) -> Tensor:
    """``x`` with the same values in other strides: one of ``LAYOUTS``."""
    if layout == "sliced":
        wider = torch.full((*x.shape[:-1], x.shape[-1] + 3), 7, dtype=x.dtype)
        wider[..., 1:-2] = x
        return wider[..., 1:-2]
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return x


def opcheck_all(op: Any, samples: Iterable[tuple[Any, ...]]) -> None:
    """Run every default utility of ``torch.library.opcheck`` on each tuple of arguments."""
    for args in samples:
        torch.library.opcheck(op, args)


def one_graph_for_lengths(
    fn: Callable[..., Any],
    make_args: Callable[[int], tuple[Any, ...]],
    lengths: Sequence[int],
    backend: str = "aot_eager",
) -> None:
    """Assert that one dynamic graph, without breaks, serves all ``lengths`` and equals eager.

    Lengths 0 and 1 are left out by the caller: Dynamo specialises on them by design.
    """
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend, dynamic=True, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in lengths:
            args = make_args(length)
            torch.testing.assert_close(compiled(*args), fn(*args), rtol=0, atol=0, equal_nan=True)


def compiled_gradients_equal_eager(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Assert that outputs and gradients under ``aot_eager`` are those of eager, bit for bit."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
    expected, actual = _run(fn, args), _run(compiled, args)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def _run(
    fn: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
    args = tuple(
        arg.detach().clone().requires_grad_(arg.requires_grad) if isinstance(arg, Tensor) else arg
        for arg in args
    )
    result = fn(*args)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    loss = sum(out.double().mul(k + 1).square().sum() for k, out in enumerate(outputs))
    wanted = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    return outputs, torch.autograd.grad(loss, wanted)
