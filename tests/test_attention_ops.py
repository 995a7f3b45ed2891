from __future__ import annotations

import pytest
import torch
from _reference import attend_by_hand, causal_intervals, int32, padded

from dsafx import ops, routing

L, R, P, V, N = 12, 4, 6, 10, 3
SCALE = (P + R) ** -0.5
EVERYTHING = routing.LayerCapabilities(dense_mha=True, masked_mha=True)


@pytest.fixture(autouse=True, params=["reference", "dispatched"])
def _provider(request):
    """Every test twice: on the meaning of the ops, and on what runs on this device."""
    if request.param == "dispatched":
        yield
    else:
        with ops.use_provider("reference"):
            yield


def spec(layer=EVERYTHING, **config) -> str:
    return routing.encode_spec(layer, routing.RouteConfig(**config))


def latents(tokens: int, keys: int, dtype=torch.float32):
    torch.manual_seed(tokens)
    shapes = [(tokens, N, P), (tokens, N, R), (keys, L), (keys, R), (N * (P + V), L)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def expanded(q_nope, q_pe, kv_c, k_pe, weight):
    """q [T, N, P + R], k [S, N, P + R] and v [S, N, V] of the same attention, in float64."""
    kv = (kv_c.double() @ weight.double().t()).view(kv_c.shape[0], N, P + V)
    k_pe = k_pe.double()[:, None].expand(-1, N, -1)
    return torch.cat([q_nope, q_pe], -1).double(), torch.cat([kv[..., :P], k_pe], -1), kv[..., P:]


def random_selection(ks, ke, topk):
    """Some visible positions of each row in random order, with -1 between them."""
    rows = []
    for start, end in zip(ks.tolist(), ke.tolist(), strict=True):
        row = torch.randperm(max(end - start, 0))[: topk - 1].tolist()
        rows.append([*row[:1], -1, *row[1:]])
    return padded(rows, topk), [
        [start + p for p in row if p >= 0] for start, row in zip(ks.tolist(), rows, strict=True)
    ]


def test_dense_attention_is_softmax_over_the_interval():
    ks, ke = causal_intervals([5, 9], cached=2)
    q, k, v = expanded(*latents(14, 18))
    out, lse = ops.dense_mha(q.float(), k.float(), v.float(), ks, ke, 11, SCALE)
    keys = [list(range(a, b)) for a, b in zip(ks.tolist(), ke.tolist(), strict=True)]
    expected_out, expected_lse = attend_by_hand(q, k, v, keys, SCALE)
    torch.testing.assert_close(out.double(), expected_out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("topk", [2, 5, 16])
def test_masked_and_sparse_attention_read_the_selected_keys_alone(topk):
    ks, ke = causal_intervals([5, 9], cached=2)
    operands = latents(14, 18)
    q, k, v = expanded(*operands)
    indices, keys = random_selection(ks, ke, topk)
    expected, expected_lse = attend_by_hand(q, k, v, keys, SCALE)
    out, lse = ops.masked_mha(q.float(), k.float(), v.float(), indices, ks, ke, SCALE)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)

    _, _, kv_c, k_pe, _ = operands
    kv = torch.cat([kv_c, k_pe], -1)
    absorbed = torch.randn(14, N, L + R)
    expected, expected_lse = attend_by_hand(
        absorbed, kv[:, None].expand(-1, N, -1), kv_c[:, None].expand(-1, N, -1), keys, SCALE
    )
    parts = (absorbed[..., :L], absorbed[..., L:], kv_c, k_pe)
    for out, lse in (
        ops.sparse_mqa(absorbed, kv, indices, ks, SCALE, L),
        ops.sparse_mla(*parts, indices, ks, SCALE),
    ):
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)


def test_a_row_without_a_key_gives_zero_and_minus_infinity():
    ks, ke = int32(0, 3, 2), int32(2, 3, 1)
    q, k, v = (x.float() for x in expanded(*latents(3, 4)))
    none = torch.full((3, 4), -1, dtype=torch.int32)
    for out, lse in (
        ops.dense_mha(q, k, v, ks, ke, 2, SCALE),
        ops.masked_mha(q, k, v, none, ks, ke, SCALE),
        ops.sparse_mqa(q, k[:, 0], none, ks, SCALE, V),
    ):
        assert out[1:].eq(0).all()
        assert lse[1:].eq(float("-inf")).all()


@pytest.mark.parametrize("mode", ["auto", "sparse", "masked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_route_of_a_long_prefill_gives_the_same_attention(mode, dtype):
    topk, (ks, ke) = 6, causal_intervals([20, 3])
    operands = latents(23, 23, dtype)
    indices, keys = random_selection(ks, ke, topk)
    out, lse = ops.mla_attention(
        *operands, indices, ks, ke, 20, 20, topk, SCALE, spec(mode=mode), return_lse=True
    )
    expected, expected_lse = attend_by_hand(*expanded(*operands), keys, SCALE)
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, atol=tolerance, rtol=tolerance)
    assert out.dtype is dtype
    assert lse.dtype is torch.float32


@pytest.mark.parametrize("mode", ["auto", "sparse", "masked", "dense"])
def test_every_route_of_a_short_prefill_gives_the_same_attention(mode):
    ks, ke = causal_intervals([5, 8])
    operands = latents(13, 13)
    closed = ops.causal_positions(ks, ke, 8, 8)
    out, _ = ops.mla_attention(*operands, closed, ks, ke, 8, 8, 8, SCALE, spec(mode=mode))
    keys = [list(range(a, b)) for a, b in zip(ks.tolist(), ke.tolist(), strict=True)]
    expected, _ = attend_by_hand(*expanded(*operands), keys, SCALE)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_dense_route_needs_no_selection_and_every_other_route_does():
    ks, ke = causal_intervals([8])
    operands = latents(8, 8)
    ops.mla_attention(*operands, None, ks, ke, 8, 8, 8, SCALE, spec())
    sparse = spec(layer=routing.LayerCapabilities())
    with pytest.raises(ValueError, match="indices must be given"):
        ops.mla_attention(*operands, None, ks, ke, 8, 8, 8, SCALE, sparse)


def test_a_forced_dense_route_above_topk_is_refused():
    ks, ke = causal_intervals([9])
    with pytest.raises(ValueError, match="dense"):
        ops.mla_attention(*latents(9, 9), None, ks, ke, 9, 9, 8, SCALE, spec(mode="dense"))


@pytest.mark.parametrize("workspace", [1, 3000])
def test_attention_does_not_depend_on_the_workspace(workspace):
    ks, ke = causal_intervals([9, 20])
    operands = latents(29, 29)
    indices, _ = random_selection(ks, ke, 5)
    for mode in ("sparse", "masked"):
        call = (*operands, indices, ks, ke, 20, 20, 5, SCALE, spec(mode=mode))
        whole, _ = ops.mla_attention(*call)
        with ops.options(workspace_bytes=workspace):
            torch.testing.assert_close(ops.mla_attention(*call)[0], whole, atol=1e-6, rtol=1e-6)


def test_sparse_attention_of_a_batch_invariant_row_is_bit_equal_alone():
    ks, ke = causal_intervals([9, 20])
    q_nope, q_pe, *keys = latents(29, 29, torch.bfloat16)
    indices, _ = random_selection(ks, ke, 5)
    text = spec(batch_invariant=True)
    whole, _ = ops.mla_attention(q_nope, q_pe, *keys, indices, ks, ke, 20, 20, 5, SCALE, text)
    for row in (0, 8, 9, 28):
        one = slice(row, row + 1)
        absorbed_whole = torch.randn(29, N, L + R, generator=torch.Generator().manual_seed(0))
        kv = torch.cat(keys[:2], -1).float()
        a, _ = ops.sparse_mqa(absorbed_whole, kv, indices, ks, SCALE, L, batch_invariant=True)
        b, _ = ops.sparse_mqa(
            absorbed_whole[one], kv, indices[one], ks[one], SCALE, L, batch_invariant=True
        )
        assert torch.equal(a[one], b)
    assert whole.isfinite().all()


def test_autocast_changes_neither_dtype_nor_value():
    ks, ke = causal_intervals([9])
    operands = latents(9, 9)
    indices, _ = random_selection(ks, ke, 4)
    call = (*operands, indices, ks, ke, 9, 9, 4, SCALE, spec())
    plain, _ = ops.mla_attention(*call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, _ = ops.mla_attention(*call)
    assert torch.equal(plain, cast)


def test_mixed_dtypes_are_promoted_to_the_widest():
    ks, ke = causal_intervals([4])
    q_nope, q_pe, kv_c, k_pe, weight = latents(4, 4)
    out, _ = ops.mla_attention(
        q_nope.bfloat16(), q_pe, kv_c.bfloat16(), k_pe, weight, None, ks, ke, 4, 4, 8, SCALE, spec()
    )
    assert out.dtype is torch.float32


def test_a_position_beyond_the_keys_is_refused_before_it_is_read():
    q, kv = torch.randn(2, N, L + R), torch.randn(5, L + R)
    with pytest.raises(ValueError, match="one of the 5 packed rows"):
        ops.sparse_mqa(q, kv, padded([[0], [5]], 2), int32(0, 0), SCALE, L)
    with pytest.raises(ValueError, match="one of the 5 packed rows"):
        ops.sparse_mqa(q, kv, padded([[0], [-2]], 2), int32(0, 0), SCALE, L)


def test_bad_attention_operands_name_the_argument():
    ks, ke = causal_intervals([4])
    q_nope, q_pe, kv_c, k_pe, weight = latents(4, 4)
    tail = (None, ks, ke, 4, 4, 8, SCALE, spec())
    with pytest.raises(ValueError, match="q_pe must have 4 in dimension 0"):
        ops.mla_attention(q_nope, q_pe[:3], kv_c, k_pe, weight, *tail)
    with pytest.raises(ValueError, match=r"kv_b_weight must have 3 \* \(6 \+ v_head_dim\) rows"):
        ops.mla_attention(q_nope, q_pe, kv_c, k_pe, weight[:-1], *tail)
    with pytest.raises(TypeError, match=r"kv_c must be .*, got int64"):
        ops.mla_attention(q_nope, q_pe, kv_c.long(), k_pe, weight, *tail)
    q, k, v = (x.float() for x in expanded(q_nope, q_pe, kv_c, k_pe, weight))
    with pytest.raises(TypeError, match="k must have the dtype of q"):
        ops.dense_mha(q, k.double(), v, ks, ke, 4, SCALE)
    apart = (q_nope, k[..., :P], v, ks, ke, 4, SCALE, None, True)
    with pytest.raises(ValueError, match="come together or not at all, got q_pe and no k_pe"):
        ops.dense_mha(*apart, q_pe)
    with pytest.raises(ValueError, match="k_pe must have 4 in dimension 1"):
        ops.dense_mha(*apart, q_pe, k_pe[:, :3])
    with pytest.raises(TypeError, match="k_pe must have the dtype of q"):
        ops.dense_mha(*apart, q_pe, k_pe.double())
    with pytest.raises(ValueError, match="v_dim must be between 1 and the width of kv, 16, got 17"):
        ops.sparse_mqa(
            torch.randn(4, N, L + R), torch.randn(4, L + R), padded([[]] * 4, 2), ks, 1.0, 17
        )
    with pytest.raises(ValueError, match="compiled for at most 3 keys a row, got max_kv_len 4"):
        ops.dense_mha(q, k, v, ks, ke, 4, SCALE, bound=3)
