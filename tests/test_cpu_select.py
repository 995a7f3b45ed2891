"""Selection kernels of the cpu provider against the reference, equal wherever scores are equal."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator

import pytest
import torch
from _index_operands import by, gaussian, whole_numbers
from _inside import Inside
from _reference import causal_intervals, int32, scores_by_hand
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dsafx import ops
from dsafx.ops.cpu import _index_tiles

INF = float("inf")
NAN = float("nan")
NEGATIVE_NAN = struct.unpack("f", struct.pack("I", 0xFFC00001))[0]


def assert_same(op, *args):
    """The kernel answers what the reference answers."""
    found, expected = by("cpu", op, *args), by("reference", op, *args)
    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill new memory with NaN and large integers."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Workspace(Inside):
    """Also the most bytes that results held at one time, without the tensors ``given``."""

    def __init__(self, *given: Tensor | None) -> None:
        super().__init__()
        self.most = 0
        self._given = {StorageWeakRef(x.untyped_storage()) for x in given if x is not None}
        self._live: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self._live[StorageWeakRef(storage)] = storage.nbytes()
        self._live = {
            ref: size
            for ref, size in self._live.items()
            if ref not in self._given and not ref.expired()
        }
        self.most = max(self.most, sum(self._live.values()))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "dim"), [(1, 32), (2, 128), (3, 40), (24, 64), (64, 128), (128, 33)]
)
def test_selection_is_that_of_the_reference_at_every_head_count(heads, dim, dtype):
    ks, ke = causal_intervals([40, 7, 90], cached=5)
    q, k, weights = whole_numbers(137, int(ke.max()), heads, dim, dtype)
    mask = torch.rand(137, k.shape[0]) < 0.7
    for topk in (1, 3, 64, 96):
        for batch_invariant in (False, True):
            for operand in (None, mask):
                assert_same(
                    ops.index_select, q, k, weights, ks, ke, 95, topk, operand, batch_invariant
                )


@pytest.mark.parametrize("topk", [1, 3, 512, 2047, 2048, 2051])
def test_selection_is_that_of_the_reference_at_real_widths(topk):
    ks, ke = int32(0, 7, 0, 2, 100), int32(2200, 2200, 2049, 2050, 2148)
    q, k, weights = whole_numbers(5, 2200, 4, 32)
    assert_same(ops.index_select, q, k, weights, ks, ke, 2200, topk)
    scores = torch.randn(5, 2200)
    assert_same(ops.select_topk, scores, ks, ke, topk)
    assert_same(ops.select_topk, scores.mul(4).round(), ks, ke, topk)


def test_real_scores_give_the_highest_keys_but_for_rounding_at_the_threshold():
    ks, ke = causal_intervals([150, 60])
    q, k, weights = gaussian(210, 210, 16, 64)
    scores = scores_by_hand(q, k, weights)
    for batch_invariant in (False, True):
        chosen = by("cpu", ops.index_select, q, k, weights, ks, ke, 150, 24, None, batch_invariant)
        ops.check_indices(chosen, ks, ke, 24)
        for row in (ke - ks > 24).nonzero()[:, 0].tolist():
            visible = scores[row, int(ks[row]) : int(ke[row])]
            picked = torch.zeros_like(visible, dtype=torch.bool)
            picked[chosen[row].long()] = True
            assert visible[picked].min() >= visible[~picked].max() - 1e-5


def test_strided_operands_select_as_their_copies_do():
    ks, ke = causal_intervals([50, 30])
    q, k, weights = whole_numbers(160, 240, 16, 64)
    q, k, weights = q[::2, ::2, 1::2], k.view(80, 192)[:, 64:96], weights.t().clone().t()[::2, 1::2]
    mask = (torch.rand(80, 80) < 0.7).t()
    scores = torch.randn(160, 80)[::2].mul(2).round()
    for topk in (3, 20):
        for batch_invariant in (False, True):
            assert_same(ops.index_select, q, k, weights, ks, ke, 50, topk, mask, batch_invariant)
        for given_scores in (scores, scores.t().clone().t()):
            assert_same(ops.select_topk, given_scores, ks, ke, topk)
            assert_same(ops.select_topk, given_scores, ks, ke, topk, mask)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("tokens", "keys"), [(0, 0), (0, 9), (1, 0), (3, 0), (0, 1)])
def test_a_step_without_tokens_or_keys_selects_nothing(tokens, keys, masked, batch_invariant):
    q, k, weights = gaussian(tokens, keys)
    none = torch.zeros(tokens, dtype=torch.int32)
    mask = torch.ones(tokens, keys, dtype=torch.bool) if masked else None
    args = q, k, weights, none, none, keys, 4, mask, batch_invariant
    assert by("cpu", ops.index_select, *args).tolist() == [[-1] * 4] * tokens
    scores = torch.zeros(tokens, keys)
    chosen = by("cpu", ops.select_topk, scores, none, none, 4, mask)
    assert chosen.tolist() == [[-1] * 4] * tokens


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_keys_beyond_sixteen_bits_are_found(batch_invariant):
    keys = 131_073
    k = torch.zeros(keys, 4)
    k[[10, 70_000, 131_068]] = 1.0
    q, weights = torch.ones(2, 1, 4), torch.ones(2, 1)
    ks, ke = int32(0, 5), int32(keys, keys)
    args = q, k, weights, ks, ke, keys
    three = by("cpu", ops.index_select, *args, 3, None, batch_invariant)
    assert three.tolist() == [[10, 70_000, 131_068], [5, 69_995, 131_063]]
    assert_same(ops.index_select, *args, 2048, None, batch_invariant)


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=5)


@settings(max_examples=60)
@given(
    lengths=lengths,
    cached=st.integers(0, 20),
    topk=st.integers(1, 24),
    masked=st.booleans(),
    batch_invariant=st.booleans(),
    workspace=st.sampled_from([1, 4096, 1 << 16, 256 << 20]),
    seed=st.integers(0, 1 << 30),
)
def test_any_ragged_batch_selects_as_the_reference(
    lengths, cached, topk, masked, batch_invariant, workspace, seed
):
    torch.manual_seed(seed)
    ks, ke = causal_intervals(lengths, cached)
    tokens, keys = ks.shape[0], int(ke.max())
    q, k, weights = whole_numbers(tokens, keys, 3, 8)
    mask = torch.rand(tokens, keys) < 0.6 if masked else None
    with ops.options(workspace_bytes=workspace), poisoned():
        assert_same(
            ops.index_select,
            *(q, k, weights, ks, ke, cached + max(lengths), topk, mask, batch_invariant),
        )


@settings(max_examples=60)
@given(data=st.data())
def test_any_intervals_and_scores_select_as_the_reference(data):
    tokens, keys = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 30))
    bound = st.lists(st.integers(0, keys), min_size=tokens, max_size=tokens)
    ks, ke = int32(*data.draw(bound)), int32(*data.draw(bound))
    special = st.sampled_from(
        [NAN, NEGATIVE_NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, -7e4, 3e38]
    )
    count = tokens * keys
    drawn = data.draw(st.lists(special, min_size=count, max_size=count))
    scores = torch.tensor(drawn).view(tokens, keys)
    mask = torch.rand(tokens, keys) < 0.6 if data.draw(st.booleans()) else None
    topk = data.draw(st.integers(1, 12))
    with ops.options(workspace_bytes=data.draw(st.sampled_from([1, 2000, 256 << 20]))):
        untouched = scores.clone()
        assert_same(ops.select_topk, scores, ks, ke, topk, mask)
    assert torch.equal(scores.view(torch.int32), untouched.view(torch.int32))


def test_a_row_of_ties_gives_its_lowest_positions_among_rows_without_ties():
    scores = torch.stack([torch.zeros(300), torch.arange(300.0), torch.arange(300.0).fmod(7)])
    ks, ke = int32(0, 0, 0), int32(300, 300, 300)
    chosen = by("cpu", ops.select_topk, scores, ks, ke, 50)
    assert chosen[0].tolist() == list(range(50))
    assert chosen[1].tolist() == list(range(250, 300))
    best, second = list(range(6, 300, 7)), list(range(5, 300, 7))
    assert chosen[2].tolist() == sorted(best + second[: 50 - len(best)])


def test_signed_zeros_are_equal_and_nan_beats_what_is_hidden():
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, 1.0, -1.0]])
    assert by("cpu", ops.select_topk, scores, int32(0), int32(6), 3).tolist() == [[0, 1, 4]]
    scores = torch.tensor([[5.0, NEGATIVE_NAN, -INF, NAN, 1.0, NAN]])
    mask = torch.tensor([[False, True, True, True, True, True]])
    selected = by("cpu", ops.select_topk, scores, int32(0), int32(6), 3, mask)
    assert selected.tolist() == [[1, 2, 4]]


def test_a_key_of_another_request_never_matters_and_a_visible_nan_ranks_last():
    ks, ke = causal_intervals([40, 40])
    q, k, weights = whole_numbers(80, 80)
    k[:40] = NAN
    k[60] = NAN
    assert_same(ops.index_select, q, k, weights, ks, ke, 40, 8)
    chosen = by("cpu", ops.index_select, q, k, weights, ks, ke, 40, 8)
    assert not (chosen[40:] == 20).logical_and((ke - ks)[40:, None] > 21).any()


def test_a_long_row_among_short_ones_is_scored_and_only_it():
    ks, ke = int32(0, 0, 9, 0), int32(4, 900, 12, 40)
    q, k, weights = whole_numbers(4, 900)
    poisoned_q = q.clone()
    poisoned_q[[0, 2]] = NAN
    expected = by("reference", ops.index_select, q, k, weights, ks, ke, 900, 16)
    found = by("cpu", ops.index_select, poisoned_q, k, weights, ks, ke, 900, 16)
    assert torch.equal(found, expected)


def test_short_rows_call_no_product_and_no_sort():
    ks, ke = causal_intervals([64])
    q, k, weights = gaussian(64, 64)
    for max_kv_len in (64, 65):
        # A compiled kernel's products go past the dispatcher.
        with ops.options(compiled_kernels=False), Inside() as seen:
            chosen = by("cpu", ops.index_select, q, k, weights, ks, ke, max_kv_len, 64)
        assert not {"aten::mm", "aten::bmm", "aten::topk", "aten::sort"} & seen.names
        assert torch.equal(chosen, ops.causal_positions(ks, ke, 64, 64))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [2 << 20, 8 << 20])
@pytest.mark.parametrize("compiled", [False, True])
def test_all_memory_beyond_the_result_stays_within_the_workspace(
    budget, dtype, batch_invariant, masked, compiled
):
    ks, ke = causal_intervals([1536])
    q, k, weights = gaussian(1536, 1536, 32, 64, dtype)
    mask = torch.rand(1536, 1536) < 0.9 if masked else None
    args = q, k, weights, ks, ke, 1536, 256, mask, batch_invariant
    limits = ops.options(workspace_bytes=budget, compiled_kernels=compiled)
    with limits, Workspace(q, k, weights, ks, ke, mask) as seen:
        chosen = by("cpu", ops.index_select, *args)
        inside = _index_tiles.workspace_bytes(32) if compiled and not batch_invariant else 0
    assert inside <= budget // 8
    assert ("aten::mm" in seen.names) == (inside == 0)
    assert "aten::topk" in seen.names
    assert seen.most - chosen.untyped_storage().nbytes() + inside <= budget


def test_fifty_runs_give_the_same_bits():
    ks, ke = causal_intervals([90, 60], cached=30)
    q, k, weights = gaussian(150, 210, 8, 64, torch.bfloat16)
    for batch_invariant in (False, True):
        args = q, k, weights, ks, ke, 120, 16, None, batch_invariant
        first = by("cpu", ops.index_select, *args)
        for _ in range(50):
            assert torch.equal(by("cpu", ops.index_select, *args), first)


@pytest.mark.parametrize(("heads", "dim"), [(1, 32), (3, 40), (32, 128)])
def test_a_batch_invariant_row_selects_alike_alone_and_anywhere_in_any_batch(heads, dim):
    """Nearly equal keys make every selection hang on the last bit of a score."""
    q, _, weights = gaussian(64, 0, heads, dim)
    k = torch.randn(1, dim) + 1e-6 * torch.randn(1300, dim)
    start, length, topk = 37, 1200, 500

    def select(batch: list[int], at: int) -> Tensor:
        ks, ke = torch.full((len(batch),), start), torch.full((len(batch),), start + length)
        ke[:at], ke[at + 1 :] = ke[:at] - 600, ke[at + 1 :] + 60
        args = q[batch], k, weights[batch], ks.int(), ke.int(), length + 60, topk, None, True
        return by("cpu", ops.index_select, *args)[at]

    alone = select([5], 0)
    for size in (2, 7, 64):
        for at in (0, size // 2, size - 1):
            others = [row % 5 for row in range(size)]
            others[at] = 5
            assert torch.equal(select(others, at), alone)
    k = torch.cat([torch.full((11, dim), NAN), k])
    start += 11
    assert torch.equal(select([4, 5, 3], 1), alone)


def test_a_selection_detaches_and_never_refuses_gradients():
    ks, ke = causal_intervals([30])
    q, k, weights = (operand.requires_grad_() for operand in gaussian(30, 30))
    for batch_invariant in (False, True):
        args = q, k, weights, ks, ke, 30, 8, None, batch_invariant
        assert not by("cpu", ops.index_select, *args).requires_grad
    scores = ops.index_scores(q, k, weights, ks, ke).requires_grad_()
    assert not by("cpu", ops.select_topk, scores, ks, ke, 8).requires_grad


def test_intervals_beyond_the_keys_and_float64_queries_are_refused_by_name():
    q, k, weights = gaussian(3, 5)
    ks, ke = int32(0, 0, 0), int32(1, 2, 6)
    with pytest.raises(ValueError, match=r"within the 5 packed keys, got \[0, 6\)"):
        by("cpu", ops.index_select, q, k, weights, ks, ke, 6, 2)
    with pytest.raises(ValueError, match=r"within the 5 packed keys, got \[0, 6\)"):
        by("cpu", ops.select_topk, torch.zeros(3, 5), ks, ke, 2)
    with pytest.raises(ValueError, match="got 2 for a row of 5"):
        by("cpu", ops.index_select, q, k, weights, ks, ke.clamp(max=5), 2, 2)
    with pytest.raises(NotImplementedError, match="float64 queries are scored in float64"):
        by("cpu", ops.index_select, q.double(), k, weights, ks, ke - 1, 5, 2)
