"""Triton's interpreter with right numbers for bfloat16 and fp8.

With ``TRITON_INTERPRET=1`` kernels run on CPU tensors. There, Triton 3.6 to 3.9 keep bfloat16 and
fp8 as integers of their bits: products and comparisons take the bits for numbers, and casts do not
round to even. No error is raised. ``interpreter`` puts that right for as long as it is entered:
casts round to nearest even, fp8 saturates as the hardware's conversion does, and arithmetic and
dots decode their operands first. Everything else is left to Triton.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..ops.libraries import installed, interpreted

_NARROW = {
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}

Array = Any
Handle = Any


@contextlib.contextmanager
def interpreter() -> Iterator[None]:
    """Correct Triton's interpreter inside the ``with`` block; nothing without ``TRITON_INTERPRET``.

    Numpy's product of small matrices is several times faster on one thread: where the variable
    ``OPENBLAS_NUM_THREADS`` is to help, it must be set before numpy is first imported.
    """
    if not (interpreted() and installed("triton")):
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder

    before = {name: vars(InterpreterBuilder)[name] for name in _METHODS}
    if isinstance(before["create_dot"], functools.partialmethod):
        # An outer block corrects it, and ends later.
        yield
        return
    for name, method in _METHODS.items():
        setattr(InterpreterBuilder, name, functools.partialmethod(method, before[name]))
    try:
        yield
    finally:
        for name, original in before.items():
            setattr(InterpreterBuilder, name, original)


def _narrow(dtype: Any) -> torch.dtype | None:
    return _NARROW.get(str(dtype.scalar))


def _values(handle: Handle) -> Array:
    """The numbers of a handle, as float32 where Triton keeps their bits."""
    dtype = _narrow(handle.dtype)
    if dtype is None:
        return handle.data
    bits = torch.from_numpy(handle.data.copy())
    return bits.view(dtype).float().numpy()


def _rounded(values: Array, dtype: Any) -> Handle:
    """A handle of ``dtype`` that holds ``values``, rounded to nearest even."""
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    scalar = dtype.scalar
    narrow = _narrow(scalar)
    if narrow is None:
        return TensorHandle(values.astype(_get_np_dtype(scalar)), scalar)
    wide = torch.from_numpy(values.astype("float32"))
    if narrow != torch.bfloat16:
        # A NaN passes through clamp.
        largest = torch.finfo(narrow).max
        wide = wide.clamp(-largest, largest)
    integer = torch.uint16 if narrow == torch.bfloat16 else torch.uint8
    return TensorHandle(wide.to(narrow).view(integer).numpy(), scalar)


def _cast(builder: Any, original: Callable[..., Handle], source: Handle, to: Any) -> Handle:
    if _narrow(source.dtype) is None and _narrow(to) is None:
        return original(builder, source, to)
    return _rounded(_values(source), to)


def _float_cast(
    builder: Any, original: Callable[..., Handle], source: Handle, to: Any, rounding: Any
) -> Handle:
    from triton._C.libtriton import ir

    if rounding not in (None, ir.ROUNDING_MODE.RTNE):
        return original(builder, source, to, rounding)
    return _rounded(_values(source), to)


def _unary(builder: Any, original: Callable[..., Handle], x: Handle, op: Any) -> Handle:
    if _narrow(x.dtype) is None:
        return original(builder, x, op)
    return _rounded(op(_values(x)), x.dtype)


def _binary(builder: Any, original: Callable[..., Handle], a: Handle, b: Handle, op: Any) -> Handle:
    if _narrow(a.dtype) is None:
        return original(builder, a, b, op)
    from triton.runtime.interpreter import TensorHandle

    result = op(_values(a), _values(b))
    # Of a comparison Triton keeps the operand's type here, and the caller gives the right one.
    return (
        TensorHandle(result, a.dtype.scalar) if result.dtype == bool else _rounded(result, a.dtype)
    )


def _fma(builder: Any, original: Callable[..., Handle], a: Handle, b: Handle, c: Handle) -> Handle:
    if _narrow(c.dtype) is None:
        return original(builder, a, b, c)
    return _rounded(_values(a) * _values(b) + _values(c), c.dtype)


def _rsqrt(builder: Any, original: Callable[..., Handle], x: Handle) -> Handle:
    if _narrow(x.dtype) is None:
        return original(builder, x)
    return _rounded(1 / _values(x) ** 0.5, x.dtype)


def _dot(
    builder: Any, original: Callable[..., Handle], a: Handle, b: Handle, acc: Handle, *options: Any
) -> Handle:
    if _narrow(a.dtype) is None and _narrow(b.dtype) is None:
        return original(builder, a, b, acc, *options)
    return _rounded(_values(a) @ _values(b) + acc.data, acc.dtype)


_METHODS: dict[str, Callable[..., Handle]] = {
    "cast_impl": _cast,
    "create_fp_to_fp": _float_cast,
    "unary_op": _unary,
    "binary_op": _binary,
    "create_fma": _fma,
    "create_rsqrt": _rsqrt,
    "create_dot": _dot,
}
