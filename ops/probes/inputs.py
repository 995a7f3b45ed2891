"""Inputs and judges that the probes of a self-test are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Judge = Callable[[Sequence[Tensor], Sequence[Tensor]], "str | None"]
"""From what a kernel returned and wrote, and what the reference did, to what is wrong, or None."""

DTYPE = torch.bfloat16
"""What kernels are made for."""


@dataclass(frozen=True)
class Probe:
    """One call of an op, and its judge.

    args: of the op's schema in order, tensors on the CPU.
    judge: of the results.
    wide: the reference takes floating tensors as float64, so that its results are exact.
    fallback: only for providers that serve no other probe of the op.
    """

    args: tuple[object, ...]
    judge: Judge
    wide: bool = True
    fallback: bool = False


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> Tensor:
    """Standard normal numbers, the same in every process; the global generator is not used."""
    generator = torch.Generator().manual_seed(0xD5A + seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)


def integers(*shape: int, most: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> Tensor:
    """Whole numbers between ``-most`` and ``most``."""
    generator = torch.Generator().manual_seed(0xD5A + seed)
    return torch.randint(-most, most + 1, shape, generator=generator).to(dtype)


def int32(*values: int) -> Tensor:
    """One dimension of int32."""
    return torch.tensor(values, dtype=torch.int32)


def equal(got: Sequence[Tensor], exact: Sequence[Tensor]) -> str | None:
    """Bit for bit."""
    for number, (found, right) in enumerate(zip(got, exact, strict=True)):
        if found.dtype != right.dtype:
            return f"result {number} is {found.dtype} for {right.dtype}"
        same = found.contiguous().view(torch.uint8) == right.contiguous().view(torch.uint8)
        if not bool(same.all()):
            return f"{int((~same).sum())} of {same.numel()} bytes of result {number} differ"
    return None


def within(*budgets: Tensor | float) -> Judge:
    """Each result lies within its budget of the exact one."""

    def judge(got: Sequence[Tensor], exact: Sequence[Tensor]) -> str | None:
        for number, budget in enumerate(budgets):
            wrong = off(got[number], exact[number], budget)
            if wrong is not None:
                return f"result {number} {wrong}"
        return None

    return judge


def off(found: Tensor, right: Tensor, budget: Tensor | float) -> str | None:
    """How far ``found`` is from ``right`` if that is more than ``budget``, or None."""
    found, right = found.double(), right.double()
    error = torch.where(found == right, 0.0, (found - right).abs())
    wrong = ~(error <= budget)
    if not bool(wrong.any()):
        return None
    if bool(error.isnan().any()):
        return "has NaN where the reference has a number"
    worst = float((error / torch.as_tensor(budget, dtype=torch.float64).clamp(min=1e-30)).max())
    return f"is off by {worst:.3g} times what rounding explains"
