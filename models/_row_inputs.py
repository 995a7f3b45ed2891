"""Static buffers of a captured step: one row a token, and rows that no token fills."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowInput:
    """A tensor of one row a token that differs from batch to batch.

    Attributes:
        shape: of one row; () for a number.
        dtype: of the tensor.
        padding: what stands in rows without a token. They must be empty rows that write nothing:
            equal ``ks`` and ``ke``, length 0, request -1, slot -1; and where each row is written,
            as by ``DSAAttention``, a cache row that nobody sees.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    padding: int | float = 0


class RowBuffers:
    """Room for the inputs of the largest variant; a smaller one reads the first rows.

    Args:
        inputs: by the names that the step reads.
        rows: of the largest variant.
        device: where the step runs.

    Raises:
        ValueError: no inputs.
    """

    def __init__(self, inputs: Mapping[str, RowInput], rows: int, device: torch.device) -> None:
        if not inputs:
            raise ValueError("inputs must name at least one tensor, got none")
        self._inputs = dict(inputs)
        self._buffers = {
            name: torch.full((rows, *each.shape), each.padding, dtype=each.dtype, device=device)
            for name, each in self._inputs.items()
        }

    def first(self, rows: int) -> dict[str, Tensor]:
        """Views of the first ``rows`` rows, always at the same addresses."""
        return {name: buffer[:rows] for name, buffer in self._buffers.items()}

    def check(self, given: Mapping[str, Tensor]) -> int:
        """The tokens of a batch whose tensors fit these buffers in all but their number of rows.

        Raises:
            ValueError: a name that is missing or unknown, a shape or a device that does not fit.
            TypeError: a dtype that does not fit.
        """
        missing = [name for name in self._inputs if name not in given]
        unknown = [name for name in given if name not in self._inputs]
        if missing or unknown:
            got = ", ".join(given) or "none"
            raise ValueError(f"inputs must be {', '.join(self._inputs)}, got {got}")
        tokens: int | None = None
        for name, each in self._inputs.items():
            tensor = given[name]
            if tensor.dim() == 0 or tuple(tensor.shape[1:]) != each.shape:
                wanted = ", ".join(["tokens", *map(str, each.shape)])
                raise ValueError(f"{name} must be [{wanted}], got {tuple(tensor.shape)}")
            tokens = tensor.shape[0] if tokens is None else tokens
            if tensor.shape[0] != tokens:
                first = next(iter(self._inputs))
                raise ValueError(
                    f"{name} must have {tokens} rows, as {first} has, got {tensor.shape[0]}"
                )
            if tensor.dtype != each.dtype:
                raise TypeError(f"{name} must be {each.dtype}, got {tensor.dtype}")
            device = self._buffers[name].device
            if tensor.device != device:
                raise ValueError(f"{name} must be on {device}, got {tensor.device}")
        assert tokens is not None
        return tokens

    def fill(self, given: Mapping[str, Tensor], tokens: int, rows: int) -> None:
        """Copy a batch that ``check`` accepted, and make padding of the other rows up to ``rows``.

        Every row up to ``rows`` is written, so that none of an earlier batch is left in a replay.
        """
        for name, buffer in self._buffers.items():
            buffer[:tokens].copy_(given[name])
            if tokens < rows:
                buffer[tokens:rows].fill_(self._inputs[name].padding)
