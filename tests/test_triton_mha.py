"""Attention over expanded keys of the triton provider, in the interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from _attention_operands import INTERVALS, expanded, selection
from _reference import causal_intervals, int32
from torch import Tensor

from dsafx import ops

pytestmark = pytest.mark.triton

SCALE = 0.3
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
KEYS = 61


def by_triton(op, *args) -> tuple[Tensor, Tensor]:
    with ops.use_provider("triton"):
        return op(*args)


def exact(op, q: Tensor, k: Tensor, v: Tensor, *rest) -> tuple[Tensor, Tensor]:
    with ops.use_provider("reference"):
        return op(q.double(), k.double(), v.double(), *rest)


def assert_near(found: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype=torch.float32):
    out, lse = found
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert out.is_contiguous()
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(out.double(), right[0], **tolerance)
    torch.testing.assert_close(lse.double(), right[1], atol=2e-5, rtol=2e-5)


def check_dense(q, k, v, ks, ke, dtype=torch.float32):
    rest = (ks, ke, max(1, k.shape[0]), SCALE)
    right = exact(ops.dense_mha, q, k, v, *rest)
    assert_near(by_triton(ops.dense_mha, q, k, v, *rest), right, dtype)


def check_masked(q, k, v, indices, ks, ke, dtype=torch.float32):
    rest = (indices, ks, ke, SCALE)
    right = exact(ops.masked_mha, q, k, v, *rest)
    assert_near(by_triton(ops.masked_mha, q, k, v, *rest), right, dtype)


@pytest.mark.parametrize("name", INTERVALS)
def test_dense_attention_is_that_of_float64_on_all_kinds_of_intervals(name):
    ks, ke = INTERVALS[name]
    check_dense(*expanded(ks.shape[0], KEYS, heads=2), ks, ke)


@pytest.mark.parametrize("name", INTERVALS)
@pytest.mark.parametrize("topk", [2, 7, KEYS])
def test_masked_attention_is_that_of_float64_on_all_kinds_of_intervals(name, topk):
    ks, ke = INTERVALS[name]
    check_masked(*expanded(ks.shape[0], KEYS, heads=2), selection(ks, ke, topk), ks, ke)


@pytest.mark.parametrize("heads", [1, 3, 8, 16])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_number_of_heads_and_every_dtype_is_that_of_float64(heads, dtype):
    """Rows of up to 204 keys, which is more than three tiles, of which 9 are selected."""
    ks, ke = causal_intervals([4, 3], cached=200)
    q, k, v = expanded(7, 407, heads, dtype=dtype)
    check_dense(q, k, v, ks, ke, dtype)
    check_masked(q, k, v, selection(ks, ke, 9, holes=3), ks, ke, dtype)


@pytest.mark.parametrize(("qk", "v"), [(1, 1), (16, 16), (24, 5), (40, 48), (96, 33), (192, 128)])
def test_head_dims_that_are_no_powers_of_two_are_read_in_two_parts(qk, v):
    ks, ke = causal_intervals([5], cached=60)
    operands = expanded(5, 65, 2, qk, v)
    check_dense(*operands, ks, ke)
    check_masked(*operands, selection(ks, ke, 12), ks, ke)


@pytest.mark.parametrize(("nope", "rope"), [(24, 8), (16, 16), (5, 3)])
def test_rotated_parts_kept_apart_give_what_they_give_joined(nope, rope):
    ks, ke = causal_intervals([5, 2], cached=60)
    q, k, v = expanded(7, 127, 2, nope + rope, 12)
    k_pe = k[:, 0, nope:]
    k = torch.cat([k[..., :nope], k_pe[:, None].expand(-1, 2, -1)], dim=-1)
    indices = selection(ks, ke, 9)
    apart, pe = (q[..., :nope], k[..., :nope], v), (True, q[..., nope:], k_pe)
    found = by_triton(ops.dense_mha, *apart, ks, ke, 127, SCALE, None, *pe)
    assert_near(found, exact(ops.dense_mha, q, k, v, ks, ke, 127, SCALE))
    found = by_triton(ops.masked_mha, *apart, indices, ks, ke, SCALE, *pe)
    assert_near(found, exact(ops.masked_mha, q, k, v, indices, ks, ke, SCALE))


def test_far_apart_requests_and_windows_reach_their_tiles():
    """Full tiles between edges, rows of one block in requests 400 keys apart, long sliding rows."""
    for ks, ke in (
        (int32(2, 2, 500, 500), int32(80, 81, 590, 591)),
        (int32(*range(0, 80, 10)), int32(*range(300, 380, 10))),
        (int32(0, 300, 0), int32(0, 460, 130)),
    ):
        q, k, v = expanded(ks.shape[0], 600, 1)
        unread = torch.ones(600, dtype=torch.bool)
        for first, last in zip(ks.tolist(), ke.tolist(), strict=True):
            unread[first:last] = False
        right = exact(ops.dense_mha, q, k, v, ks, ke, 600, SCALE)
        k = k.masked_fill(unread[:, None, None], torch.nan)
        v = v.masked_fill(unread[:, None, None], torch.nan)
        assert_near(by_triton(ops.dense_mha, q, k, v, ks, ke, 600, SCALE), right)


def test_keys_that_nobody_selects_are_not_read():
    ks, ke = causal_intervals([6], cached=200)
    q, k, v = expanded(6, 206, 2)
    indices = selection(ks, ke, 5)
    indices[2] = -1
    unread = torch.ones(206, dtype=torch.bool)
    unread[(indices + ks[:, None])[indices >= 0].long()] = False
    right = exact(ops.masked_mha, q, k, v, indices, ks, ke, SCALE)
    k = k.masked_fill(unread[:, None, None], torch.nan)
    v = v.masked_fill(unread[:, None, None], torch.nan)
    found = by_triton(ops.masked_mha, q, k, v, indices, ks, ke, SCALE)
    assert_near(found, right)
    assert found[0][2].eq(0).all()
    assert found[1][2].isneginf().all()


def test_positions_outside_the_interval_select_nothing():
    q, k, v = expanded(2, 90, 1)
    ks, ke = int32(3, 40), int32(20, 71)
    indices = torch.tensor([[17, 4, 60, 16], [31, -1, 30, 49]], dtype=torch.int32)
    check_masked(q, k, v, indices, ks, ke)


def test_bits_stay_inside_the_workspace():
    """20 rows are two blocks of 16 rows, one after another in a small budget."""
    from dsafx.ops.triton._mha_launch import row_blocks
    from dsafx.ops.triton._variants import Tile

    ks, ke = causal_intervals([20], cached=580)
    operands, indices = expanded(20, 600, 1, 4, 4), selection(ks, ke, 30)
    tile = Tile(16, 64, 4, 1)
    for budget, blocks in ((1, [16, 4]), (1600, [16, 4]), (2000, [20])):
        with ops.options(workspace_bytes=budget):
            found = list(row_blocks(20, tile, 1000))
            assert [rows.stop - rows.start for rows in found] == blocks
            check_masked(*operands, indices, ks, ke)
            check_dense(*operands, ks, ke)


def test_operands_may_lie_apart():
    ks, ke = causal_intervals([20, 5], cached=2)
    indices = selection(ks, ke, 12).t().contiguous().t()[:, ::2]
    q = torch.randn(10, 3, 25).permute(2, 1, 0)
    k = torch.randn(29, 1, 10).expand(-1, 3, -1)
    v = torch.randn(29, 3, 12)[..., ::2]
    check_dense(q, k, v, ks, ke)
    check_masked(q, k, v, indices, ks, ke)
    check_dense(q, torch.randn(1, 3, 10).expand(29, -1, -1), v, ks, ke)


def test_no_token_no_key_and_no_lane_give_empty_results():
    for tokens, keys in ((0, 5), (2, 0)):
        q, k, v = expanded(tokens, keys)
        ks = int32(*[0] * tokens)
        for lanes in (0, 4):
            indices = torch.full((tokens, lanes), -1, dtype=torch.int32)
            check_masked(q, k, v, indices, ks, ks)
        check_dense(q, k, v, ks, ks)


def test_an_unasked_lse_is_empty():
    ks, ke = causal_intervals([2])
    q, k, v = expanded(2, 2)
    indices = selection(ks, ke, 2)
    for _, lse in (
        by_triton(ops.dense_mha, q, k, v, ks, ke, 2, SCALE, None, False),
        by_triton(ops.masked_mha, q, k, v, indices, ks, ke, SCALE, False),
    ):
        assert lse.shape == (0,)


def test_what_is_not_served_is_refused_with_a_sentence():
    ks, ke = causal_intervals([1])
    for qk, v_dim, dtype, sentence in (
        (8, 8, torch.float64, "got float64"),
        (300, 8, torch.float32, "head dims of 256"),
        (8, 300, torch.float32, "values of 256"),
    ):
        q, k, v = expanded(1, 1, 1, qk, v_dim, dtype)
        with pytest.raises(NotImplementedError, match=sentence):
            by_triton(ops.dense_mha, q, k, v, ks, ke, 1, SCALE)
        with pytest.raises(NotImplementedError, match=sentence):
            by_triton(ops.masked_mha, q, k, v, selection(ks, ke, 1), ks, ke, SCALE)


def test_a_broken_premise_raises():
    ks, ke = causal_intervals([3])
    with pytest.raises(ValueError, match="compiled for at most 2 keys"):
        by_triton(ops.dense_mha, *expanded(3, 3), ks, ke, 3, SCALE, 2)
