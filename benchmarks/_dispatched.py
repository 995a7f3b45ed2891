"""Which operators a call reaches, inside this package's ops too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from _measure import Call
from torch.utils._python_dispatch import TorchDispatchMode

from dsafx import ops

_PRODUCTS = frozenset({"mm", "bmm", "addmm", "addbmm", "baddbmm", "matmul", "linear", "einsum"})
_SELECTIONS = frozenset({"topk", "sort", "argsort", "kthvalue"})


def assert_neither_gemm_nor_topk(call: Call) -> None:
    """Run ``call``, and raise ``AssertionError`` if it dispatches a matrix product or a top-k.

    It runs without compiled kernels, whose products go past the dispatcher.
    """
    with ops.options(compiled_kernels=False), _Seen() as seen:
        call()
    work = sorted(seen.names & (_PRODUCTS | _SELECTIONS))
    if work:
        raise AssertionError(f"neither GEMM nor top-k may be dispatched, got {', '.join(work)}")


class _Seen(TorchDispatchMode):
    """Keeps the name of every operator.

    A mode is off while it handles an operator, so what a custom op does inside is invisible unless
    its body is entered with the mode on again.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        namespace, _, name = func.name().partition("::")
        self.names.add(name.partition(".")[0].removesuffix("_"))
        if namespace != "dsafx":
            return func(*args, **(kwargs or {}))
        body = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
        with self:
            return func.redispatch(body, *args, **(kwargs or {}))
