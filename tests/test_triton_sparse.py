"""Absorbed attention of the triton provider, in the interpreter, against float64."""

from __future__ import annotations

import functools

import pytest
import torch
from _attention_operands import selection
from _pages import BLOCK, LATENT, ROPE, STALE, filled_mla_cache, mla_inputs, pages
from _reference import causal_intervals, int32
from torch import Tensor

from dsafx import ops
from dsafx.ops.mla_cache import mla_cache_gather
from dsafx.ops.sparse_mla import sparse_mla
from dsafx.ops.sparse_mqa_paged import sparse_mqa_paged

pytestmark = pytest.mark.triton

SCALE = 0.3
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
LAYOUTS = [("bf16", None), ("fp8", 0.125), ("fp8_ds_mla", None)]


def by_triton(op, *args) -> tuple[Tensor, Tensor]:
    with ops.use_provider("triton"):
        return op(*args)


def exact(q: Tensor, kv: Tensor, *rest) -> tuple[Tensor, Tensor]:
    with ops.use_provider("reference"):
        return ops.sparse_mqa(q.double(), kv.double(), *rest)


def assert_near(found: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype):
    out, lse = found
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert out.is_contiguous()
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(out.double(), right[0], **tolerance)
    torch.testing.assert_close(lse.double(), right[1], atol=2e-5, rtol=2e-5)


def operands(tokens: int, keys: int, heads: int = 3, width: int = 40, dtype=torch.float32):
    return torch.randn(tokens, heads, width).to(dtype), torch.randn(keys, width).to(dtype)


@pytest.mark.parametrize("heads", [1, 3, 8, 16, 17])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attention_over_a_few_of_many_keys_is_that_of_float64(dtype, heads):
    """Packed requests, 7 lanes of up to 150 keys, some of them empty, in random order."""
    ks, ke = causal_intervals([4, 1], cached=150)
    indices = selection(ks, ke, 7, holes=2)
    q, kv = operands(5, 305, heads, dtype=dtype)
    right = exact(q, kv, indices, ks, SCALE, 32)
    assert_near(by_triton(ops.sparse_mqa, q, kv, indices, ks, SCALE, 32), right, dtype)
    apart = (q[..., :32], q[..., 32:], kv[:, :32], kv[:, 32:], indices, ks, SCALE)
    assert_near(by_triton(sparse_mla, *apart), right, dtype)


@pytest.mark.parametrize(("width", "latent"), [(16, 16), (20, 6), (40, 17), (65, 1), (128, 96)])
def test_any_dims_of_latent_and_rope_are_served(width, latent):
    ks, ke = causal_intervals([3], cached=20)
    indices = selection(ks, ke, 6)
    q, kv = operands(3, 23, width=width)
    args = (indices, ks, SCALE, latent)
    assert_near(by_triton(ops.sparse_mqa, q, kv, *args), exact(q, kv, *args), torch.float32)


@pytest.mark.parametrize("topk", [1, 64, 65, 600])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_many_lanes_of_one_token_are_merged_to_the_same(topk, batch_invariant):
    """600 lanes are several splits, of which later ones may hold no key at all."""
    ks, ke = int32(2, 0), int32(702, 40)
    indices = selection(ks, ke, topk, holes=0)
    q, kv = operands(2, 710, 2)
    args = (indices, ks, SCALE, 32)
    found = by_triton(ops.sparse_mqa, q, kv, *args, True, batch_invariant)
    assert_near(found, exact(q, kv, *args), torch.float32)


def test_rows_that_select_nothing_give_zero_and_minus_infinity():
    q, kv = operands(4, 30)
    indices = torch.full((4, 300), -1, dtype=torch.int32)
    indices[1, 290], indices[3, 0] = 4, 2
    ks = int32(0, 5, 5, 0)
    q[0] = torch.nan
    out, lse = by_triton(ops.sparse_mqa, q, kv, indices, ks, SCALE, 32)
    assert out[[0, 2]].eq(0).all()
    assert lse[[0, 2]].isneginf().all()
    right = exact(q.nan_to_num(), kv, indices, ks, SCALE, 32)
    assert_near((out, lse), right, torch.float32)


def test_rows_of_keys_that_nobody_selects_are_not_read():
    ks, ke = causal_intervals([3], cached=20)
    indices = selection(ks, ke, 5)
    q, kv = operands(3, 23)
    unread = torch.ones(23, dtype=torch.bool)
    unread[(indices + ks[:, None])[indices >= 0].long()] = False
    args = (indices, ks, SCALE, 32)
    found = by_triton(ops.sparse_mqa, q, kv.masked_fill(unread[:, None], torch.nan), *args)
    assert_near(found, exact(q, kv, *args), torch.float32)


def test_no_token_no_key_and_no_lane_give_empty_results():
    for tokens, keys, lanes in ((0, 5, 4), (2, 0, 4), (2, 5, 0)):
        q, kv = operands(tokens, keys)
        indices = torch.full((tokens, lanes), -1, dtype=torch.int32)
        out, lse = by_triton(ops.sparse_mqa, q, kv, indices, int32(*[0] * tokens), SCALE, 32)
        assert out.shape == (tokens, 3, 32)
        assert out.eq(0).all()
        assert lse.shape == (tokens, 3)
        assert lse.isneginf().all()


def test_operands_may_lie_apart():
    ks, ke = causal_intervals([5], cached=2)
    indices = selection(ks, ke, 6).t().contiguous().t()
    q = torch.randn(3, 5, 40).transpose(0, 1)
    kv = torch.randn(7, 90)[:, 4:84:2]
    args = (indices, ks, SCALE, 32)
    right = exact(q, kv, *args)
    assert_near(by_triton(ops.sparse_mqa, q, kv, *args), right, torch.float32)
    shared = torch.randn(1, 40).expand(7, -1)
    found = by_triton(ops.sparse_mqa, q, shared, *args)
    assert_near(found, exact(q, shared, *args), torch.float32)


def test_an_unasked_lse_is_empty():
    q, kv = operands(2, 9)
    indices = int32(*range(8)).view(2, 4)
    out, lse = by_triton(ops.sparse_mqa, q, kv, indices, int32(0, 0), SCALE, 32, False)
    assert lse.shape == (0,)
    with_lse, _ = by_triton(ops.sparse_mqa, q, kv, indices, int32(0, 0), SCALE, 32)
    assert torch.equal(out, with_lse)


def test_a_batch_invariant_row_is_bit_equal_alone_and_in_a_batch():
    ks, ke = causal_intervals([6], cached=300)
    indices = selection(ks, ke, 260)
    q, kv = operands(6, 306, dtype=torch.bfloat16)
    rest = (SCALE, 32, True, True)
    whole = by_triton(ops.sparse_mqa, q, kv, indices, ks, *rest)
    for row in range(6):
        at = slice(row, row + 1)
        alone = by_triton(ops.sparse_mqa, q[at], kv, indices[at], ks[at], *rest)
        assert torch.equal(alone[0][0], whole[0][row])
        assert torch.equal(alone[1][0], whole[1][row])


def test_what_is_not_served_is_refused_with_a_sentence():
    indices = int32(0).view(1, 1)
    for q, kv, v_dim, sentence in (
        (torch.zeros(1, 1, 8).double(), torch.zeros(1, 8).double(), 4, "got float64"),
        (torch.zeros(1, 1, 600), torch.zeros(1, 600), 560, "at most 512 dims"),
        (torch.zeros(1, 1, 600), torch.zeros(1, 600), 500, "keys of 64 more"),
    ):
        with pytest.raises(NotImplementedError, match=sentence):
            by_triton(ops.sparse_mqa, q, kv, indices, int32(0), SCALE, v_dim)


def test_positions_beyond_the_packed_rows_raise():
    q, kv = operands(1, 4)
    with pytest.raises(ValueError, match="one of the 4 packed rows"):
        by_triton(ops.sparse_mqa, q, kv, int32(4).view(1, 1), int32(0), SCALE, 32)


def test_paged_results_are_written_where_fresh_memory_is_nan():
    """Padding rows included: their requests are in no table, and their lanes are not read."""
    at = pages()
    _, _, kv_c, k_pe, _ = mla_inputs(at)
    rows = at.lens.shape[0]
    q = torch.randn(rows, 3, LATENT + ROPE)
    cache = filled_mla_cache(at, kv_c, k_pe, "bf16", None)
    request = at.row_request.clone()
    request[0], request[-1] = -1, 99
    indices = selection(torch.zeros_like(at.lens), at.lens, 4)
    indices[0] = STALE
    out, lse = by_triton(
        sparse_mqa_paged, q, cache, indices, at.block_table, request, at.lens, SCALE, LATENT, "bf16"
    )
    kv = torch.cat([kv_c, k_pe], dim=-1)
    indices[[0, -1]] = -1
    right = exact(q, kv, indices, at.ks, SCALE, LATENT)
    assert_near((out, lse), right, torch.float32)
    assert out[[0, -1]].eq(0).all()


@pytest.mark.parametrize(("layout", "scale"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [1, 256 << 20])
def test_paged_attention_is_that_of_the_stored_rows(layout, scale, dtype, budget):
    """In one block of tokens, and in as many as there are tokens."""
    at = pages()
    _, _, kv_c, k_pe, _ = mla_inputs(at)
    factor = None if scale is None else torch.tensor([scale])
    q = torch.randn(at.lens.shape[0], 3, LATENT + ROPE).to(dtype)
    cache = filled_mla_cache(at, kv_c, k_pe, layout, factor)
    indices = selection(torch.zeros_like(at.lens), at.lens, 5)
    rows = (at.block_table, at.row_request, at.lens, SCALE, LATENT, layout, factor)
    with ops.options(workspace_bytes=budget):
        found = by_triton(sparse_mqa_paged, q, cache, indices, *rows)
    stored = mla_cache_gather(cache, *at.packed, layout, factor, LATENT, dtype)
    right = exact(q, torch.cat(stored, dim=-1), indices, at.ks, SCALE, LATENT)
    assert_near(found, right, dtype)


def test_blocks_of_a_cache_may_lie_apart():
    at = pages()
    _, _, kv_c, k_pe, _ = mla_inputs(at)
    q = torch.randn(at.lens.shape[0], 3, LATENT + ROPE)
    indices = selection(torch.zeros_like(at.lens), at.lens, 5)
    for layout in ("bf16", "fp8_ds_mla"):
        cache = filled_mla_cache(at, kv_c, k_pe, layout, None)
        wide = cache.new_zeros((at.blocks, 3 * BLOCK, cache.shape[2]))[:, BLOCK : 2 * BLOCK]
        wide.copy_(cache)
        rows = (at.block_table, at.row_request, at.lens, SCALE, LATENT, layout)
        for ours, theirs in zip(
            by_triton(sparse_mqa_paged, q, wide, indices, *rows),
            by_triton(sparse_mqa_paged, q, cache, indices, *rows),
            strict=True,
        ):
            assert torch.equal(ours, theirs)


def test_splits_fill_the_device_and_stay_inside_the_workspace():
    """Of 132 programs at once, 2 tokens of 2 groups of heads leave 33 a piece."""
    from dsafx.ops.triton._sparse_launch import splits_for

    parts = functools.partial(splits_for, 90, split_bytes=1000)
    assert parts(4, 2048) == 16
    assert parts(4, 16384) == 32
    assert parts(100, 2048) == 1
    assert parts(4, 100) == 1
    with ops.options(workspace_bytes=3999):
        assert parts(4, 2048) == 3
    with ops.options(workspace_bytes=1):
        assert parts(4, 2048) == 1
