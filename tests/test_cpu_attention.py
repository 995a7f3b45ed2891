from __future__ import annotations

import pytest
import torch
from _attention_operands import INTERVALS, LONG, expanded, selection
from _inside import Inside
from _reference import causal_intervals, int32
from hypothesis import given, settings
from hypothesis import strategies as st

from dsafx import ops
from dsafx.ops.cpu import dense
from dsafx.ops.cpu.attention import ATTENTION
from dsafx.ops.index_scores import visible_keys
from dsafx.ops.sparse_mla import sparse_mla

SCALE = 0.3
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(scope="module", params=[True, False], ids=["tiles", "flash"], autouse=True)
def compiled_kernels(request):
    """Both means of attention over expanded keys; they are one where nothing can be compiled."""
    with ops.options(compiled_kernels=request.param):
        yield request.param


def assert_same(actual, expected, dtype=torch.float32):
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def reference(op, *args):
    with ops.use_provider("reference"):
        return op(*args)


def check_dense(q, k, v, ks, ke, dtype=torch.float32):
    args = (q, k, v, ks, ke, k.shape[0], SCALE)
    assert_same(ATTENTION["dense_mha"].run(*args), reference(ops.dense_mha, *args), dtype)


def check_masked(q, k, v, indices, ks, ke, dtype=torch.float32):
    args = (q, k, v, indices, ks, ke, SCALE)
    assert_same(ATTENTION["masked_mha"].run(*args), reference(ops.masked_mha, *args), dtype)


def check_sparse(q, kv, indices, ks, latent, dtype=torch.float32):
    args = (q, kv, indices, ks, SCALE, latent)
    expected = reference(ops.sparse_mqa, *args)
    assert_same(ATTENTION["sparse_mqa"].run(*args), expected, dtype)
    apart = (q[..., :latent], q[..., latent:], kv[:, :latent], kv[:, latent:], indices, ks, SCALE)
    assert_same(ATTENTION["sparse_mla"].run(*apart), expected, dtype)
    assert_same(reference(sparse_mla, *apart), expected, dtype)


@pytest.mark.parametrize("name", INTERVALS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotated_parts_kept_apart_give_what_they_give_joined(name, dtype):
    ks, ke = INTERVALS[name]
    q, k, v = expanded(ks.shape[0], 61, dtype=dtype)
    rotated = q.shape[2] // 2
    k_pe = k[:, 0, rotated:]
    k = torch.cat([k[..., :rotated], k_pe[:, None].expand(-1, k.shape[1], -1)], dim=-1)
    apart = (q[..., :rotated], k[..., :rotated], v)
    pe = (True, q[..., rotated:], k_pe)
    indices = selection(ks, ke, 20)
    dense, masked = ATTENTION["dense_mha"].run, ATTENTION["masked_mha"].run
    for whole, parts in (
        (dense(q, k, v, ks, ke, 61, SCALE), dense(*apart, ks, ke, 61, SCALE, None, *pe)),
        (masked(q, k, v, indices, ks, ke, SCALE), masked(*apart, indices, ks, ke, SCALE, *pe)),
    ):
        assert_same(parts, whole, dtype)


@pytest.mark.parametrize("name", INTERVALS)
@pytest.mark.parametrize(("qk", "v"), [(8, 8), (10, 6), (6, 10)])
def test_dense_attention_equals_the_reference(name, qk, v):
    ks, ke = INTERVALS[name]
    check_dense(*expanded(ks.shape[0], 61, qk=qk, v=v), ks, ke)


@pytest.mark.parametrize("name", INTERVALS)
@pytest.mark.parametrize("topk", [2, 7, 61])
def test_masked_and_sparse_attention_equal_the_reference(name, topk):
    ks, ke = INTERVALS[name]
    indices = selection(ks, ke, topk)
    check_masked(*expanded(ks.shape[0], 61), indices, ks, ke)
    check_sparse(torch.randn(ks.shape[0], 3, 20), torch.randn(61, 20), indices, ks, latent=16)


@pytest.mark.parametrize("heads", [1, 3, 24, 128])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_number_of_heads_and_every_dtype_equal_the_reference(heads, dtype):
    ks, ke = causal_intervals([21, 4], cached=3)
    indices = selection(ks, ke, 6)
    operands = expanded(25, 31, heads, dtype=dtype)
    check_dense(*operands, ks, ke, dtype)
    check_masked(*operands, indices, ks, ke, dtype)
    q, kv = torch.randn(25, heads, 20).to(dtype), torch.randn(31, 20).to(dtype)
    check_sparse(q, kv, indices, ks, 16, dtype)


def test_float64_is_left_to_the_reference():
    q = torch.zeros(1, 1, 4, dtype=torch.float64)
    assert all(kernel.supports(q) is not None for kernel in ATTENTION.values())
    assert all(kernel.supports(q.float()) is None for kernel in ATTENTION.values())


@pytest.mark.parametrize("rows", [0, 3])
def test_no_packed_key_is_no_key_for_any_row(rows):
    ks, indices = int32(*[0] * rows), torch.full((rows, 4), -1, dtype=torch.int32)
    check_dense(*expanded(rows, 0), ks, ks)
    check_masked(*expanded(rows, 0), indices, ks, ks)
    check_sparse(torch.randn(rows, 3, 20), torch.randn(0, 20), indices, ks, latent=16)


def test_non_contiguous_operands_equal_the_reference():
    ks, ke = causal_intervals([20, 5], cached=2)
    indices = selection(ks, ke, 12).t().contiguous().t()[:, ::2]
    q = torch.randn(10, 3, 25).permute(2, 1, 0)
    k = torch.randn(29, 1, 10).expand(-1, 3, -1)
    v = torch.randn(29, 3, 12)[..., ::2]
    check_dense(q, k, v, ks, ke)
    check_masked(q, k, v, indices, ks, ke)
    check_dense(q, torch.randn(1, 3, 10).expand(29, -1, -1), v, ks, ke)
    check_dense(*(torch.randn(rows, 3, 20)[..., ::2] for rows in (25, 29, 29)), ks, ke)
    kv = torch.randn(29, 48)[:, 4:44:2]
    check_sparse(torch.randn(3, 25, 20).transpose(0, 1), kv, indices, ks, latent=16)


def test_an_unasked_lse_is_empty():
    ks, ke = INTERVALS["a fresh prompt"]
    indices = selection(ks, ke, 4)
    q, k, v = expanded(LONG, LONG)
    for _, lse in (
        ATTENTION["dense_mha"].run(q, k, v, ks, ke, LONG, SCALE, None, False),
        ATTENTION["masked_mha"].run(q, k, v, indices, ks, ke, SCALE, False),
        ATTENTION["sparse_mqa"].run(q, k[:, 0], indices, ks, SCALE, 6, False),
        ATTENTION["sparse_mla"].run(q, q, k[:, 0], k[:, 1], indices, ks, SCALE, False),
    ):
        assert lse.shape == (0,)
        assert lse.dtype == torch.float32


@pytest.mark.parametrize("name", INTERVALS)
def test_rows_that_select_nothing_are_written_too(name):
    ks, ke = INTERVALS[name]
    rows = ks.shape[0]
    q, k, v = expanded(rows, 61)
    indices = selection(ks, ke, 3)
    indices[: rows // 2] = -1
    torch.use_deterministic_algorithms(True)  # Fresh memory is NaN then.
    try:
        check_masked(q, k, v, indices, ks, ke)
        check_masked(q, k, v, torch.full_like(indices, -1), ks, ke)
        check_sparse(torch.randn(rows, 3, 20), torch.randn(61, 20), indices, ks, latent=16)
    finally:
        torch.use_deterministic_algorithms(False)


def test_positions_outside_a_masked_interval_are_no_key():
    ks, ke = int32(2, 2, 2), int32(5, 6, 7)
    indices = int32(0, 3, 9, 90, -1, 3, 5, -1, -1).view(3, 3)
    check_masked(*expanded(3, 12), indices, ks, ke)


def test_values_that_leave_the_packed_rows_raise():
    q, k, v = expanded(1, 8)
    one = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="within the 8 packed keys"):
        ATTENTION["dense_mha"].run(q, k, v, int32(0), int32(9), 9, SCALE)
    with pytest.raises(ValueError, match="max_kv_len must bound"):
        ATTENTION["dense_mha"].run(q, k, v, int32(0), int32(8), 7, SCALE)
    with pytest.raises(ValueError, match="compiled for at most 4 keys"):
        ATTENTION["dense_mha"].run(q, k, v, int32(0), int32(8), 8, SCALE, 4)
    with pytest.raises(ValueError, match="within the 8 packed keys"):
        ATTENTION["masked_mha"].run(q, k, v, one, int32(-1), int32(3), SCALE)
    for position in (5, -2):
        with pytest.raises(ValueError, match="one of the 8 packed rows"):
            ATTENTION["sparse_mqa"].run(q, k[:, 0], one + position, int32(3), SCALE, 6)
        with pytest.raises(ValueError, match="one of the 8 packed rows"):
            ATTENTION["sparse_mla"].run(q, q, k[:, 0], k[:, 1], one + position, int32(3), SCALE)


@pytest.mark.parametrize("name", INTERVALS)
def test_masked_attention_to_all_that_is_visible_equals_the_reference(name):
    ks, ke = INTERVALS[name]
    operands = expanded(ks.shape[0], 61)
    closed = ops.causal_positions(ks, ke, 61, 61)
    for workspace in (1 << 20, 1):
        with ops.options(workspace_bytes=workspace):
            check_masked(*operands, closed, ks, ke)


@pytest.mark.parametrize("name", INTERVALS)
def test_keys_that_no_row_sees_may_hold_anything(name):
    ks, ke = INTERVALS[name]
    q, k, v = expanded(ks.shape[0], 61)
    seen = visible_keys(ks, ke, 0, 61).any(dim=0)
    k[~seen], v[~seen] = float("nan"), float("inf")
    for out, _ in (
        ATTENTION["dense_mha"].run(q, k, v, ks, ke, 61, SCALE),
        ATTENTION["masked_mha"].run(q, k, v, selection(ks, ke, 61), ks, ke, SCALE),
    ):
        assert out.isfinite().all()


@pytest.mark.parametrize("holes", [0, 1])
@pytest.mark.parametrize("name", INTERVALS)
def test_keys_that_no_row_selects_may_hold_anything(name, holes):
    ks, ke = INTERVALS[name]
    indices = selection(ks, ke, 3, holes)
    q, k, v = expanded(ks.shape[0], 61)
    read = torch.zeros(61, dtype=torch.bool)
    read[(indices + ks[:, None])[indices >= 0].long()] = True
    k[~read], v[~read] = float("nan"), float("inf")
    for out, _ in (
        ATTENTION["masked_mha"].run(q, k, v, indices, ks, ke, SCALE),
        ATTENTION["sparse_mqa"].run(q, k[:, 0], indices, ks, SCALE, 6),
        ATTENTION["sparse_mla"].run(q, q, k[:, 0], k[:, 1], indices, ks, SCALE),
    ):
        assert out.isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "name", ["a fresh prompt", "packed prompts with context", "a sliding window"]
)
def test_results_do_not_depend_on_the_workspace(name, dtype):
    ks, ke = INTERVALS[name]
    rows = ks.shape[0]
    indices = selection(ks, ke, 7)
    with ops.options(workspace_bytes=1):
        check_dense(*expanded(rows, 61, dtype=dtype), ks, ke, dtype)
        check_masked(*expanded(rows, 61, dtype=dtype), indices, ks, ke, dtype)
        q, kv = torch.randn(rows, 3, 20).to(dtype), torch.randn(61, 20).to(dtype)
        check_sparse(q, kv, indices, ks, 16, dtype)


def test_a_run_in_several_blocks_of_rows_equals_the_reference(monkeypatch):
    monkeypatch.setattr(dense, "_MOST_ROWS", 7)
    for name in ("a fresh prompt", "packed prompts with context"):
        ks, ke = INTERVALS[name]
        check_dense(*expanded(ks.shape[0], 61), ks, ke)


def test_no_tensor_but_the_output_exceeds_the_workspace():
    ks, ke = causal_intervals([300])
    indices = selection(ks, ke, 40)
    q, k, v = expanded(300, 300, heads=2, qk=8, v=4)
    output, budget = 300 * 2 * 8 * 4, 64 << 10
    with ops.options(workspace_bytes=budget), Inside() as largest:
        ATTENTION["dense_mha"].run(q, k, v, ks, ke, 300, SCALE)
        ATTENTION["masked_mha"].run(q, k, v, indices, ks, ke, SCALE)
        ATTENTION["sparse_mqa"].run(q, k[:, 0], indices, ks, SCALE, 8)
    # Checks of values look at one number for each lane of the selection.
    assert largest.bytes <= max(budget, output, 8 * indices.numel())


@pytest.mark.parametrize("v_dim", [4, 8])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_copies_of_keys_fit_the_workspace(dtype, v_dim):
    ks, ke = causal_intervals([4], cached=3000)
    q, k, v = expanded(4, 3004, heads=16, qk=8, v=v_dim, dtype=dtype)
    indices = selection(ks, ke, 1500)
    with ops.options(workspace_bytes=512 << 10), Inside() as largest:
        ATTENTION["dense_mha"].run(q, k, v, ks, ke, 3004, SCALE)
        ATTENTION["masked_mha"].run(q, k, v, indices, ks, ke, SCALE)
    assert largest.bytes <= 512 << 10


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_decode_step_makes_no_tensor_that_grows_with_the_cache(dtype):
    q_latent, q_pe = torch.randn(1, 4, 16).to(dtype), torch.randn(1, 4, 8).to(dtype)
    kv_c, k_pe = torch.randn(4000, 16).to(dtype), torch.randn(4000, 8).to(dtype)
    indices = torch.randperm(4000)[:32].int()[None]
    with Inside() as largest:
        ATTENTION["sparse_mla"].run(q_latent, q_pe, kv_c, k_pe, indices, int32(0), SCALE)
        ATTENTION["sparse_mqa"].run(q_latent, kv_c, indices, int32(0), SCALE, 16)
    assert largest.bytes <= 32 * 16 * 4


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_batch_invariant_row_has_the_same_bits_alone_and_in_any_batch(dtype):
    ks, ke = causal_intervals([30, 50], cached=4)
    # The kernel drops trailing lanes without a key, of which each row has another number here.
    indices = ops.compact(selection(ks, ke, 24))
    q, kv = torch.randn(80, 5, 40).to(dtype), torch.randn(88, 40).to(dtype)
    parts = (q[..., :32], q[..., 32:], kv[:, :32], kv[:, 32:])

    def both(rows):
        head = [part[rows] for part in parts[:2]]
        yield from ATTENTION["sparse_mqa"].run(
            q[rows], kv, indices[rows], ks[rows], SCALE, 32, True, True
        )
        yield from ATTENTION["sparse_mla"].run(
            *head, *parts[2:], indices[rows], ks[rows], SCALE, True, True
        )

    whole = list(both(torch.arange(80)))
    shuffled = torch.randperm(80)
    for rows in (shuffled, shuffled[:7], torch.tensor([79]), torch.tensor([3])):
        for part, all_rows in zip(both(rows), whole, strict=True):
            assert torch.equal(part, all_rows[rows])


def test_a_batch_invariant_row_has_the_same_bits_wherever_its_keys_lie():
    ks, ke = causal_intervals([9], cached=30)
    indices = ops.causal_positions(ks, ke, 39, 39)
    q, kv = torch.randn(9, 5, 19), torch.randn(39, 19)
    alone = ATTENTION["sparse_mqa"].run(q, kv, indices, ks, SCALE, 16, True, True)
    for offset in (1, 2, 3):
        packed = torch.cat([torch.randn(offset, 19), kv])
        again = ATTENTION["sparse_mqa"].run(q, packed, indices, ks + offset, SCALE, 16, True, True)
        assert all(map(torch.equal, alone, again))


def test_kernels_are_deterministic():
    ks, ke = causal_intervals([30, 9], cached=2)
    indices = selection(ks, ke, 8)
    q, k, v = expanded(39, 43)
    calls = [
        lambda: ATTENTION["dense_mha"].run(q, k, v, ks, ke, 43, SCALE),
        lambda: ATTENTION["masked_mha"].run(q, k, v, indices, ks, ke, SCALE),
        lambda: ATTENTION["sparse_mqa"].run(q, k[:, 0], indices, ks, SCALE, 6),
    ]
    for call in calls:
        out, lse = call()
        for _ in range(10):
            again, lse_again = call()
            assert torch.equal(out, again)
            assert torch.equal(lse, lse_again)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 24), st.integers(0, 1)), max_size=30),
    st.integers(1, 12),
)
def test_any_intervals_give_the_attention_of_the_reference(lines, topk):
    """A row starts and ends somewhere, or continues the one before."""
    starts, ends = [], []
    for start, end, continues in lines:
        follow = continues and ends and ends[-1] < 24
        starts.append(starts[-1] if follow else start)
        ends.append(ends[-1] + 1 if follow else end)
    ks, ke = int32(*starts), int32(*ends)
    indices = selection(ks, ke, topk)
    check_dense(*expanded(len(lines), 24), ks, ke)
    check_masked(*expanded(len(lines), 24), indices, ks, ke)
    check_sparse(torch.randn(len(lines), 3, 20), torch.randn(24, 20), indices, ks, latent=16)
