"""Gradients of every attention op: of its formula in float64, and of its kernels against that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from _attention_operands import INTERVALS, selection
from _inside import Inside
from _reference import causal_intervals, int32
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsafx import ops, routing
from dsafx.ops.cpu.attention import ATTENTION

HEADS, LATENT, ROPE, NOPE, VALUE = 3, 16, 4, 6, 6
SCALE = 0.3
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
EVERYTHING = routing.LayerCapabilities(dense_mha=True, masked_mha=True)


def shapes(op: str, rows: int, keys: int) -> list[tuple[int, ...]]:
    """Of the operands of ``op`` that have gradients, in order."""
    joined, latents = NOPE + ROPE, LATENT + ROPE
    return {
        "dense_mha": [(rows, HEADS, joined), (keys, HEADS, joined), (keys, HEADS, VALUE)],
        "sparse_mqa": [(rows, HEADS, latents), (keys, latents)],
        "sparse_mla": [(rows, HEADS, LATENT), (rows, HEADS, ROPE), (keys, LATENT), (keys, ROPE)],
        "dense_mha apart": [
            *[(rows, HEADS, NOPE), (keys, HEADS, NOPE), (keys, HEADS, VALUE)],
            *[(rows, HEADS, ROPE), (keys, ROPE)],
        ],
    }[op.replace("masked", "dense")]


OPS = [
    *("dense_mha", "dense_mha apart", "masked_mha", "masked_mha apart", "sparse_mqa"),
    "sparse_mla",
]


def attend(
    op: str, tensors: list[Tensor], indices: Tensor, ks: Tensor, ke: Tensor, lse: bool = True
) -> tuple[Tensor, Tensor]:
    """out and lse of ``op`` on operands of ``shapes``."""
    if op == "sparse_mqa":
        return ops.sparse_mqa(*tensors, indices, ks, SCALE, LATENT, lse)
    if op == "sparse_mla":
        return ops.sparse_mla(*tensors, indices, ks, SCALE, lse)
    joined, pe = tensors[:3], tensors[3:]
    if op.startswith("dense_mha"):
        return ops.dense_mha(*joined, ks, ke, tensors[1].shape[0], SCALE, None, lse, *pe)
    return ops.masked_mha(*joined, indices, ks, ke, SCALE, lse, *pe)


def random(op: str, rows: int, keys: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes(op, rows, keys)]


def gradients(
    run: Callable[[list[Tensor]], tuple[Tensor, Tensor]],
    tensors: list[Tensor],
    poisoned: Tensor | None = None,
) -> list[Tensor]:
    """Of all ``tensors``, for the same random gradients of out and lse at each call.

    These are NaN in the rows that ``poisoned`` names.
    """
    inputs = [x.detach().requires_grad_() for x in tensors]
    out, lse = run(inputs)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in (out, lse)]
    if poisoned is not None:
        for grad in grads:
            grad[poisoned] = float("nan")
    return list(torch.autograd.grad((out, lse), inputs, grads))


def check_kernel(
    op: str, tensors: list[Tensor], indices: Tensor, ks: Tensor, ke: Tensor, lse: bool = True
) -> None:
    """Gradients of what runs here against those of the reference in float64."""

    def run(inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        return attend(op, inputs, indices, ks, ke, lse)

    tolerance = TOLERANCE[tensors[0].dtype]
    expected = gradients(run, [x.double() for x in tensors])
    for ours, exact, operand in zip(gradients(run, tensors), expected, tensors, strict=True):
        assert (ours.shape, ours.dtype) == (operand.shape, operand.dtype)
        torch.testing.assert_close(ours.double(), exact, atol=tolerance, rtol=tolerance)


# Empty lanes before, between and after keys; rows 2 and 4 select nothing, row 4 sees nothing.
KS, KE = int32(0, 0, 0, 4, 5), int32(2, 4, 4, 7, 5)
HOLES = int32(1, -1, 0, -1, 3, 0, -1, -1, -1, 2, -1, -1, -1, -1, -1).view(5, 3)


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_those_of_the_formula_with_empty_lanes_and_empty_rows(op: str):
    tensors = [x.requires_grad_() for x in random(op, 5, 7, torch.float64)]
    seen = [0, 1, 2, 3] if op.startswith("dense") else [0, 1, 3]

    def finite(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attend(op, list(tensors), HOLES, KS, KE)
        return out, lse[seen]

    assert torch.autograd.gradcheck(finite, tensors, fast_mode=True)


@pytest.mark.parametrize(("mode", "topk"), [("dense", 8), ("masked", 3), ("sparse", 3)])
def test_gradients_of_each_route_are_those_of_the_formula(mode: str, topk: int):
    ks, ke = causal_intervals([5, 2])
    run = routed(selection(ks, ke, topk), ks, ke, topk, mode)
    operands = [x.requires_grad_() for x in routed_operands(7, torch.float64)]
    assert torch.autograd.gradcheck(lambda *x: run(list(x)), operands, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("op", OPS)
def test_an_empty_row_and_a_key_that_nobody_reads_have_a_gradient_of_zero(
    op: str, dtype: torch.dtype
):
    tensors = random(op, 5, 7, dtype)
    grads = gradients(lambda x: attend(op, x, HOLES, KS, KE), tensors)
    empty = [4] if op.startswith("dense") else [2, 4]
    read = [0, 1, 2, 3, 4, 5, 6] if op.startswith("dense") else [0, 1, 3, 6]
    for grad in grads:
        assert grad.isfinite().all()
        if grad.shape[0] == 5:
            assert grad[empty].eq(0).all()
            assert grad[[0, 1, 3]].ne(0).any(dim=-1).all()
        else:
            unread = [key for key in range(7) if key not in read]
            assert grad[unread].eq(0).all()
            assert grad[read].ne(0).any(dim=-1).all()


def test_each_attention_kernel_has_a_kernel_for_its_gradient():
    forward = {name for name in ATTENTION if not name.endswith("_backward")}
    assert set(ATTENTION) == forward | {f"{name}_backward" for name in forward}


@pytest.mark.parametrize("name", INTERVALS)
@pytest.mark.parametrize("op", OPS)
def test_kernels_give_the_gradients_of_the_reference(op: str, name: str):
    ks, ke = INTERVALS[name]
    tensors = random(op, ks.shape[0], 61, torch.float32)
    for topk in (7, 61):
        check_kernel(op, tensors, selection(ks, ke, topk), ks, ke)
    check_kernel(op, tensors, ops.causal_positions(ks, ke, 61, 61), ks, ke, lse=False)


@pytest.mark.parametrize("workspace", [1, 20_000])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("op", OPS)
def test_every_dtype_and_workspace_gives_the_gradients_of_the_reference(
    op: str, dtype: torch.dtype, workspace: int
):
    ks, ke = causal_intervals([21, 4], cached=3)
    with ops.options(workspace_bytes=workspace):
        check_kernel(op, random(op, 25, 31, dtype), selection(ks, ke, 6), ks, ke)


@pytest.mark.parametrize("op", OPS)
def test_non_contiguous_operands_give_the_gradients_of_the_reference(op: str):
    ks, ke = causal_intervals([20, 5], cached=2)
    indices = selection(ks, ke, 12).t().contiguous().t()[:, ::2]
    wide = [torch.randn(*shape[:-1], 2 * shape[-1]) for shape in shapes(op, 25, 29)]
    check_kernel(op, [x[..., ::2] for x in wide], indices, ks, ke)
    turned = [
        torch.randn(*reversed(shape)).permute(*reversed(range(len(shape))))
        for shape in shapes(op, 25, 29)
    ]
    check_kernel(op, turned, indices, ks, ke)


@pytest.mark.parametrize("provider", ["cpu", "reference"])
@pytest.mark.parametrize("name", INTERVALS)
@pytest.mark.parametrize("op", OPS)
def test_what_no_row_reads_may_hold_anything(op: str, name: str, provider: str):
    """Memory around the keys of requests, the query of an empty row, and what flows back to it."""
    ks, ke = INTERVALS[name]
    rows = ks.shape[0]
    indices = selection(ks, ke, 3)
    indices[: rows // 3] = -1
    position = torch.arange(61)
    reads = torch.zeros(rows, 61, dtype=torch.bool)
    if op.startswith("dense"):
        reads = (ks[:, None] <= position) & (position < ke[:, None])
    else:
        row, lane = (indices >= 0).nonzero(as_tuple=True)
        reads[row, (indices + ks[:, None])[row, lane].long()] = True
    blind, unread = ~reads.any(dim=1), ~reads.any(dim=0)
    clean = random(op, rows, 61, torch.float32)
    poisoned = [x.clone() for x in clean]
    for x in poisoned:
        x[blind if x.shape[0] == rows else unread] = float("nan")

    def run(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        return attend(op, tensors, indices, ks, ke)

    with ops.use_provider(provider):
        expected, actual = gradients(run, clean), gradients(run, poisoned, blind)
    torch.testing.assert_close(actual, expected, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_deterministic(op: str):
    ks, ke = causal_intervals([30, 9], cached=2)
    tensors, indices = random(op, 39, 43, torch.float32), selection(ks, ke, 8)
    first = gradients(lambda x: attend(op, x, indices, ks, ke), tensors)
    for _ in range(5):
        again = gradients(lambda x: attend(op, x, indices, ks, ke), tensors)
        assert all(map(torch.equal, first, again))


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 24), st.integers(0, 1)), max_size=30),
    st.integers(1, 12),
)
def test_any_intervals_give_the_gradients_of_the_reference(
    lines: list[tuple[int, int, int]], topk: int
):
    """A row starts and ends somewhere, or continues the one before."""
    starts: list[int] = []
    ends: list[int] = []
    for start, end, continues in lines:
        follow = continues and ends and ends[-1] < 24
        starts.append(starts[-1] if follow else start)
        ends.append(ends[-1] + 1 if follow else end)
    ks, ke = int32(*starts), int32(*ends)
    indices = selection(ks, ke, topk)
    for op in ("dense_mha apart", "masked_mha apart", "sparse_mla"):
        check_kernel(op, random(op, len(lines), 24, torch.float32), indices, ks, ke)


@pytest.mark.parametrize("provider", ["cpu", "reference"])
@pytest.mark.parametrize("op", OPS)
def test_no_tensor_but_a_gradient_exceeds_the_workspace(op: str, provider: str):
    ks, ke = causal_intervals([400])
    indices, tensors = selection(ks, ke, 40), random(op, 400, 400, torch.float32)
    largest_gradient = 4 * max(x.numel() for x in tensors)
    budget = 160 << 10
    assert budget > largest_gradient
    with ops.use_provider(provider), ops.options(workspace_bytes=budget), Inside() as largest:
        gradients(lambda x: attend(op, x, indices, ks, ke), tensors)
    assert largest.bytes <= budget
    assert budget < 400 * 400 * 4


@pytest.mark.parametrize("provider", ["cpu", "reference"])
@pytest.mark.parametrize("mode", ["dense", "masked", "sparse"])
def test_a_routed_gradient_holds_nothing_of_the_size_of_the_scores(mode: str, provider: str):
    ks, ke = causal_intervals([400])
    topk = 400 if mode == "dense" else 40
    operands = routed_operands(400, torch.float32)
    largest_gradient = 4 * max(x.numel() for x in operands)
    budget = 160 << 10
    run = routed(selection(ks, ke, topk), ks, ke, topk, mode)
    with ops.use_provider(provider), ops.options(workspace_bytes=budget), Inside() as largest:
        gradients(run, operands)
    assert largest.bytes <= max(budget, 2 * largest_gradient) < 400 * 400 * 4


def routed_operands(rows: int, dtype: torch.dtype) -> list[Tensor]:
    """q_nope, q_pe, kv_c, k_pe and the weight of a layer with as many keys as rows."""
    shape = [(rows, HEADS, NOPE), (rows, HEADS, ROPE), (rows, LATENT), (rows, ROPE)]
    return [torch.randn(each).to(dtype) for each in (*shape, (HEADS * (NOPE + VALUE), LATENT))]


def routed(
    indices: Tensor, ks: Tensor, ke: Tensor, topk: int, mode: str
) -> Callable[[list[Tensor]], tuple[Tensor, Tensor]]:
    """``mla_attention`` on one route."""
    text = routing.encode_spec(EVERYTHING, routing.RouteConfig(mode=mode))
    length = int((ke - ks).max())

    def run(operands: list[Tensor]) -> tuple[Tensor, Tensor]:
        tail = (indices, ks, ke, length, length, topk, SCALE, text)
        return ops.mla_attention(*operands, *tail, return_lse=True)

    return run


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("mode", "topk"), [("dense", 30), ("masked", 6), ("sparse", 6)])
def test_routed_gradients_of_kernels_are_those_of_the_reference(
    mode: str, topk: int, dtype: torch.dtype
):
    ks, ke = causal_intervals([21, 9])
    run = routed(selection(ks, ke, topk), ks, ke, topk, mode)
    operands = routed_operands(30, dtype)
    expected = gradients(run, [x.double() for x in operands])
    for ours, exact in zip(gradients(run, operands), expected, strict=True):
        scale = float(exact.abs().max())
        assert ours.dtype == dtype
        torch.testing.assert_close(
            ours.double(), exact, atol=scale * TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize(("mode", "topk"), [("dense", 30), ("masked", 6), ("sparse", 6)])
def test_a_frozen_weight_has_no_gradient_and_no_work_is_done_for_one(mode: str, topk: int):
    ks, ke = causal_intervals([21, 9])
    run = routed(selection(ks, ke, topk), ks, ke, topk, mode)
    *operands, weight = routed_operands(30, torch.float32)
    expected = gradients(run, [*operands, weight])[:4]
    kernel = {"dense": "dense_mha", "masked": "masked_mha", "sparse": "sparse_mla"}[mode]
    with Inside() as inside:
        actual = gradients(lambda x: run([*x, weight]), operands)
    assert all(map(torch.equal, actual, expected))
    assert f"dsafx::{kernel}_backward" in inside.names
    with Inside() as inside:
        inputs = [x.detach().requires_grad_() for x in operands]
        out, _ = run([*inputs, weight])
        inside.names.clear()
        out.sum().backward()
    assert f"dsafx::{kernel}" not in inside.names


def test_operands_of_unlike_dtypes_have_gradients_of_their_own_dtype():
    ks, ke = causal_intervals([9])
    q_nope, q_pe, kv_c, k_pe, weight = routed_operands(9, torch.float32)
    mixed = [q_nope.bfloat16(), q_pe, kv_c.bfloat16(), k_pe, weight.bfloat16()]
    for mode in ("masked", "sparse"):
        run = routed(selection(ks, ke, 4), ks, ke, 4, mode)
        expected = gradients(run, [x.double() for x in mixed])
        for ours, exact, operand in zip(gradients(run, mixed), expected, mixed, strict=True):
            assert ours.dtype == operand.dtype
            scale = float(exact.abs().max())
            torch.testing.assert_close(ours.double(), exact, atol=1e-2 * scale, rtol=1e-2)
