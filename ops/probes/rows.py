"""Probes of norms, rotations and the indexer's query."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import tolerances
from ..providers import Provider
from .inputs import DTYPE, Judge, Probe, normal, off

Q_LORA, LATENT, ROPE, DIM, HEADS, ROWS_GIVEN = 1536, 512, 64, 128, 32, 3
EPS = 1e-6


def rounded_rows(count: int) -> Judge:
    """The first ``count`` results lie within rounding, measured by the largest value of a row.

    A rotation adds two products, a norm divides by a sum over the row, a Hadamard transform sums
    the row; so that no number is larger than twice the row's largest times its length's error.
    """

    def judge(got: Sequence[Tensor], exact: Sequence[Tensor]) -> str | None:
        for number in range(count):
            right = exact[number].double()
            size = 2 * right.abs().amax(-1, keepdim=True)
            budget = tolerances.value_tolerance(got[number].dtype, right.shape[-1] + 16, size)
            wrong = off(got[number], right, budget)
            if wrong is not None:
                return f"result {number} {wrong}"
        return None

    return judge


def tables() -> tuple[Tensor, Tensor]:
    """cos and sin."""
    steps = torch.logspace(0, -3, ROPE // 2, dtype=torch.float32)
    angle = torch.arange(ROWS_GIVEN, dtype=torch.float32)[:, None] * steps
    return angle.cos(), angle.sin()


def latents() -> tuple[Tensor, ...]:
    """q_c, q_weight, kv_c, kv_weight and k_pe."""
    return (
        normal(ROWS_GIVEN, Q_LORA),
        normal(Q_LORA, seed=1),
        normal(ROWS_GIVEN, LATENT, seed=2),
        normal(LATENT, seed=3),
        normal(ROWS_GIVEN, ROPE, seed=4),
    )


def index_key() -> tuple[Tensor, ...]:
    """index_k, index_weight and index_bias."""
    parameters = (
        normal(DIM, seed=6, dtype=torch.float32),
        normal(DIM, seed=7, dtype=torch.float32),
    )
    return (normal(ROWS_GIVEN, DIM, seed=5), *parameters)


def _rms_norm(provider: Provider) -> list[Probe]:
    return [Probe((*latents()[:2], EPS), rounded_rows(1))]


def _layer_norm(provider: Provider) -> list[Probe]:
    return [Probe((*index_key(), EPS), rounded_rows(1))]


def _rope(provider: Provider) -> list[Probe]:
    x = normal(ROWS_GIVEN, 4, ROPE)
    return [
        Probe((x, *tables(), style), rounded_rows(1))
        for style in ("half", "interleaved", "interleaved_to_half")
    ]


def _norm_rope(provider: Provider) -> list[Probe]:
    return [
        Probe((*latents(), *tables(), EPS, style), rounded_rows(3))
        for style in ("half", "interleaved", "interleaved_to_half")
    ]


def _norm_rope_index(provider: Provider) -> list[Probe]:
    given = (*latents(), *index_key(), *tables(), EPS, "interleaved", EPS)
    return [
        Probe((*given, style, hadamard), rounded_rows(4))
        for style, hadamard in (("half", False), ("interleaved", False), ("half", True))
    ]


def _index_query(provider: Provider) -> list[Probe]:
    q, weights = normal(ROWS_GIVEN, HEADS, DIM), normal(ROWS_GIVEN, HEADS, seed=1)
    found = []
    for style, hadamard in (("half", False), ("interleaved", True)):
        for quantize in (False, True):
            args = q, weights, *tables(), style, quantize, hadamard
            found.append(Probe(args, _products(quantize)))
    return found


def _products(quantize: bool) -> Judge:
    """Query times folded weight: scales may lie in either, as long as they are powers of two."""

    def judge(got: Sequence[Tensor], exact: Sequence[Tensor]) -> str | None:
        found, right = (each[0].double() * each[1].double()[..., None] for each in (got, exact))
        size = right.abs().amax(-1, keepdim=True)
        # Both are rounded to fp8, so that they differ by two roundings where they straddle a tie.
        one = tolerances.unit_roundoff(got[0].dtype) if quantize else 0.0
        budget = 2 * size * one + tolerances.value_tolerance(DTYPE, DIM + 16, 2 * size)
        wrong = off(found, right, budget)
        return None if wrong is None else f"the query {wrong}"

    return judge


ROWS: dict[str, Callable[[Provider], list[Probe]]] = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "rope": _rope,
    "norm_rope": _norm_rope,
    "norm_rope_index": _norm_rope_index,
    "index_query": _index_query,
}
