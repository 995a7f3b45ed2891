"""How far a right result may lie from the exact one: the package's one tolerance policy.

Three rules, used by the tests and by ``dsafx.conformance``:

- **Values** are held to an error budget that is derived from dtype and length, never tuned. A sum
  of ``n`` products in a precision of unit roundoff ``u``, in any order, errs by at most
  ``n * u / (1 - n * u)`` times the sum of the absolute products (Higham, *Accuracy and Stability
  of Numerical Algorithms*, 3.1); one rounding to the output dtype adds its unit roundoff.
- **Selections** are compared as sets with a score margin. A key may be taken for another only if
  their exact scores differ by less than the errors of both. Where the inputs make every score
  exact, the margin is 0 and the lowest position wins a tie.
- **fp8** queries or keys move scores by more than any such margin, so a selection made of them
  owes a bounded share of the exact one, on generic data: ``least_recall``.

Sums are accumulated in float32, or float64 for float64 inputs (contract C10, C18), whatever the
dtype of the operands: products of bf16 or fp16 numbers are exact there.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

_FP8_LOSS = 0.024

_Magnitude = TypeVar("_Magnitude", float, Tensor)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding a number to ``dtype``: half its machine epsilon."""
    return torch.finfo(dtype).eps / 2


def sum_error(dtype: torch.dtype, length: int) -> float:
    """Largest error of a sum of ``length`` products, relative to the sum of their magnitudes.

    Raises:
        ValueError: ``length`` is negative, or so large that the bound says nothing.
    """
    u = unit_roundoff(torch.float64 if dtype == torch.float64 else torch.float32)
    if length < 0 or length * u >= 1:
        raise ValueError(f"length must be between 0 and {int(1 / u) - 1}, got {length}")
    return length * u / (1 - length * u)


def value_tolerance(dtype: torch.dtype, length: int, magnitude: _Magnitude) -> _Magnitude:
    """Largest error of a sum of ``length`` products that is rounded once to ``dtype``.

    Args:
        dtype: of the result.
        length: how many products.
        magnitude: the sum of the products' magnitudes, or a bound on it.

    Returns:
        An absolute tolerance, of the shape of ``magnitude``.
    """
    return magnitude * (sum_error(dtype, length) + unit_roundoff(dtype))


def score_magnitude(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """[T, S] float64: ``sum_h |w[t, h]| * |q[t, h]| * |k[s]|``, which bounds every partial sum."""
    queries: Tensor = weights.double().abs() * torch.linalg.vector_norm(q.double(), dim=-1)
    keys: Tensor = torch.linalg.vector_norm(k.double(), dim=-1)
    return queries.sum(dim=-1)[:, None] * keys


def score_tolerance(
    dtype: torch.dtype, heads: int, head_dim: int, magnitude: _Magnitude
) -> _Magnitude:
    """Largest error of an index score (contract, "The function").

    A dot errs by the rounding of ``head_dim`` products, ReLU does not enlarge an error, the weight
    multiplies it and the sum over ``heads`` adds its own roundings. Score outputs are float32.
    Queries and keys that a kernel itself rounds to fp8 each add the unit roundoff of that.

    Args:
        dtype: of the queries, or the fp8 dtype that a kernel rounds them to. float64 is scored in
            float64, all others in float32.
        heads, head_dim: H and D.
        magnitude: ``score_magnitude``, or a bound on it.
    """
    operands = 2.1 * unit_roundoff(dtype) if dtype in FP8_DTYPES else 0.0
    return magnitude * (operands + sum_error(dtype, heads + head_dim + 1))


def selection_margin(
    dtype: torch.dtype, heads: int, head_dim: int, magnitude: _Magnitude
) -> _Magnitude:
    """How much lower the exact score of a selected key may be than that of one left out.

    Each of the two scores may err by ``score_tolerance``. The arguments are the same; a
    ``magnitude`` must bound that of both keys.
    """
    return 2 * score_tolerance(dtype, heads, head_dim, magnitude)


def lse_tolerance(
    dtype: torch.dtype, width: int, lanes: int, logit: _Magnitude, lse: _Magnitude
) -> _Magnitude:
    """Largest error of a log-sum-exp of attention.

    A common error of the logits passes into it unchanged; the sum over ``lanes`` and the
    functions ``exp`` and ``log`` add relative errors, which the logarithm turns into absolute ones;
    subtracting and adding back the maximum rounds at the size of the logits and of the result.
    Kernels for 16-bit inputs take a faster ``exp`` (PyTorch's own do on a CPU): it may err by a
    sixteenth of the rounding of a probability to ``dtype``, which ``attention_tolerance`` allows.

    Args:
        dtype: of query and keys.
        width: how many products make a logit.
        lanes: how many keys a row attends to.
        logit: a bound on ``scale * |q| * |k|``.
        lse: the exact result's magnitude.
    """
    fast_exp = unit_roundoff(dtype) / 16 if dtype.itemsize == 2 else 0.0
    return logit * sum_error(dtype, width + 4) + (lse + 1) * sum_error(dtype, lanes + 8) + fast_exp


def attention_tolerance(
    dtype: torch.dtype, width: int, lanes: int, logit: _Magnitude, value: _Magnitude
) -> _Magnitude:
    """Largest error of an attention output.

    An error ``d`` of every logit changes each probability by a factor of at most ``exp(2 * d)``.
    Probabilities sum to one, so their errors reach the output times the largest value. A kernel
    may round the probabilities to ``dtype`` before it multiplies the values, as matrix units
    require, and their sum and the output are rounded as well.

    Args:
        dtype: of query, keys and output.
        width: how many products make a logit.
        lanes: how many keys a row attends to.
        logit: a bound on ``scale * |q| * |k|``.
        value: a bound on the magnitude of a value.
    """
    probabilities = 2 * logit * sum_error(dtype, width + 4) + unit_roundoff(dtype)
    return value_tolerance(dtype, lanes + 8, value) + value * probabilities


def least_recall(dtype: torch.dtype, lanes: int) -> float:
    """The share of the exact selection that a selection from ``dtype`` queries or keys must find.

    1 where the margin decides (floating point of 16 bits and more). For fp8, at most 0.95: e4m3
    with a scale per row moves a product by at most 2**-4 of itself, about 2.6 % on average, so that
    a score of 64 or more products of generic data moves by about 2.6 % of the spread of all scores.
    Selecting an eighth of the keys, queries and keys both rounded, that exchanges about
    ``phi(z) * 0.026 * 0.56`` of all keys around the threshold z = 1.15, which is 2.4 % of the
    selected ones; 5 % is twice that. Of few lanes, four standard deviations of their count may be
    lost beyond the 2.4 %.

    Args:
        dtype: of queries or keys, the coarser of both.
        lanes: how many keys are selected, over all rows together; at least 1.
    """
    if dtype not in FP8_DTYPES:
        return 1.0
    return 1.0 - min(1.0, max(0.05, _FP8_LOSS + 4 * math.sqrt(_FP8_LOSS / lanes)))
