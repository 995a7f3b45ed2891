"""What the ops do inside: every ATen call and the largest tensor, also in the bodies of our ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class Inside(TorchDispatchMode):
    """Names of the ops that run, and the largest tensor that one of them returns.

    A mode is off while it handles a call, so the body of an op of ours is entered with it on again;
    otherwise it would see that op and nothing that it does.

    Attributes:
        names: ``aten::mm`` and the like.
        elements, bytes: of the largest tensor; ``bytes`` counts its whole storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.elements = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().partition(".")[0])
        if func.namespace == "dsafx":
            with self:
                return func.redispatch(_CPU, *args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
                if value.untyped_storage().data_ptr() not in known:
                    self.bytes = max(self.bytes, value.untyped_storage().nbytes())
        return out
