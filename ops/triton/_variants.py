"""What a kernel file says of itself: its tiles, and every form of it that can be launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Tile:
    """How a kernel is cut into programs; one row of a tile table.

    rows: queries or heads of one program.
    columns: keys, or values of a row, of one step of its loop.
    num_warps, num_stages: as Triton takes them.
    hoist: whether what all steps of the loop have in common may be computed before it. That saves
        instructions and takes registers: the assembler of Triton 3.9 keeps each descriptor of a
        matrix in one of its own there, and the largest tiles of sm_90 spill.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    hoist: bool = True


@dataclass(frozen=True)
class Variant:
    """One compiled form of a kernel: what the launcher would ask Triton for.

    name: kernel, tile and dtype, as the report prints it.
    kernel: the ``@triton.jit`` function.
    signature: Triton type of each argument by name; "constexpr" for those in ``constexprs``.
    constexprs: values of the compile-time arguments.
    divisible: the arguments, pointers and strides, that are multiples of 16.
    num_warps, num_stages: launch options.
    matrix: whether the code must hold the architecture's matrix instruction.
    fp8: whether it computes with fp8, which needs sm_89.
    """

    name: str
    kernel: JITFunction
    signature: dict[str, str]
    constexprs: dict[str, object]
    divisible: tuple[str, ...]
    num_warps: int
    num_stages: int
    matrix: bool
    fp8: bool = False


def variant(
    name: str,
    kernel: JITFunction,
    pointers: dict[str, str],
    constexprs: dict[str, object],
    *,
    divisible: tuple[str, ...] = (),
    floats: tuple[str, ...] = (),
    num_warps: int,
    num_stages: int = 3,
    matrix: bool = False,
    fp8: bool = False,
) -> Variant:
    """A ``Variant`` whose arguments are ``pointers``, aligned, ``constexprs``, and int32 ones.

    Args:
        name, kernel, num_warps, num_stages, matrix, fp8: see ``Variant``.
        pointers: element type of each pointer.
        constexprs: compile-time arguments, and those that Triton makes so because they are 1.
        divisible: integer arguments that are multiples of 16.
        floats: arguments that are float32 numbers.
    """
    types = {
        **{each: f"*{element}" for each, element in pointers.items()},
        **dict.fromkeys(constexprs, "constexpr"),
        **dict.fromkeys(floats, "fp32"),
    }
    return Variant(
        name=name,
        kernel=kernel,
        signature={each: types.get(each, "i32") for each in kernel.arg_names},
        constexprs=constexprs,
        divisible=(*pointers, *divisible),
        num_warps=num_warps,
        num_stages=num_stages,
        matrix=matrix,
        fp8=fp8,
    )
