"""Requests of equal length as packed rows, against plain PyTorch on each request."""

from __future__ import annotations

import pytest
import torch
from _graphs import SCALE, int32, spec_of
from torch import Tensor

from dsafx import ops
from dsafx.ops import _requests as requests
from dsafx.ops.indices import check_indices

BATCH, ROWS, KEYS, HEADS, DIM, TOPK = 3, 5, 40, 8, 16, 16
NOPE, ROPE, VALUE, LATENT, ATTENTION_HEADS = 8, 4, 8, 32, 2


def intervals(batch: int) -> Tensor:
    """[batch, ROWS, 2] int32: causal with a prefix, the first row of request 0 empty."""
    end = torch.arange(ROWS)[None] * 9 + torch.arange(batch)[:, None]
    start = (end - 30).clamp(min=0)
    return torch.stack((start, end), dim=-1).to(torch.int32)


def as_mask(visibility: Tensor) -> Tensor:
    """[batch, ROWS, KEYS] bool."""
    keys = torch.arange(KEYS)
    return (keys >= visibility[..., :1]) & (keys < visibility[..., 1:])


def scattered(batch: int) -> Tensor:
    """A mask that is no interval, [batch, ROWS, KEYS] bool; one row of it is empty."""
    mask = torch.rand(batch, ROWS, KEYS) < 0.6
    mask[0, 1] = False
    return mask


def form(kind: str, batch: int) -> Tensor:
    if kind == "intervals":
        return intervals(batch)
    mask = scattered(batch)
    if kind == "mask":
        return mask
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


def seen(visibility: Tensor) -> Tensor:
    is_interval = requests.is_interval(visibility)
    return as_mask(visibility) if is_interval else requests.visible(visibility)


FORMS = ["intervals", "mask", "additive"]


def index_operands() -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(BATCH, ROWS, HEADS, DIM),
        torch.randn(BATCH, KEYS, DIM),
        torch.randn(BATCH, ROWS, HEADS),
    )


def expected_selection(operands: tuple[Tensor, ...], mask: Tensor) -> list[set[int]]:
    """Per row of all requests, the positions of the K highest scores among the visible keys."""
    query, keys, weights = operands
    logits = torch.einsum("bshd,btd->bsht", query, keys).relu()
    scores = torch.einsum("bsh,bsht->bst", weights, logits)
    scores = scores.masked_fill(~mask, float("-inf"))
    counts = mask.expand(BATCH, -1, -1).sum(-1).clamp(max=TOPK)
    order = scores.argsort(dim=-1, descending=True)
    rows = zip(order.flatten(0, 1).tolist(), counts.flatten().tolist(), strict=True)
    return [set(row[:count]) for row, count in rows]


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("requests_of_mask", [1, BATCH])
def test_each_request_selects_among_its_own_visible_keys(kind: str, requests_of_mask: int):
    visibility = form(kind, requests_of_mask)
    operands = index_operands()
    selected = requests.select_requests(*operands, visibility, TOPK)
    assert (selected.shape, selected.dtype) == ((BATCH, ROWS, TOPK), torch.int32)
    start = visibility[..., :1] if kind == "intervals" else 0
    positions = torch.where(selected < 0, -1, selected + start)
    found = [set(row) - {-1} for row in positions.flatten(0, 1).tolist()]
    assert found == expected_selection(operands, seen(visibility))


def test_a_selection_is_compact_and_relative_to_its_interval():
    query, keys, weights = index_operands()
    visibility = intervals(BATCH)
    ks, ke = requests.packed_rows(visibility, BATCH, ROWS, KEYS)
    selected = requests.select_requests(query, keys, weights, visibility, TOPK)
    check_indices(selected.flatten(0, 1), ks, ke, TOPK)


def attention_operands() -> tuple[Tensor, ...]:
    heads = ATTENTION_HEADS
    return (
        torch.randn(BATCH, heads, ROWS, NOPE),
        torch.randn(BATCH, heads, ROWS, ROPE),
        torch.randn(BATCH, 1, KEYS, LATENT),
        torch.randn(BATCH, 1, KEYS, ROPE),
        torch.randn(heads * (NOPE + VALUE), LATENT) * LATENT**-0.5,
    )


def expected_attention(operands: tuple[Tensor, ...], mask: Tensor) -> Tensor:
    """[B, N, S, V], softmax over the keys of ``mask``, zero in rows without one."""
    q_nope, q_pe, kv_c, k_pe, weight = operands
    expanded = (kv_c @ weight.t()).view(BATCH, KEYS, ATTENTION_HEADS, -1).transpose(1, 2)
    k_nope, value = expanded.split([NOPE, VALUE], dim=-1)
    key = torch.cat([k_nope, k_pe.expand(-1, ATTENTION_HEADS, -1, -1)], dim=-1)
    logits = torch.cat([q_nope, q_pe], dim=-1) @ key.transpose(2, 3) * SCALE
    shares = logits.masked_fill(~mask[:, None], float("-inf")).softmax(dim=-1)
    return shares.nan_to_num(0.0) @ value


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("mode", ["auto", "masked", "sparse"])
def test_each_request_attends_to_its_own_selection(kind: str, mode: str):
    visibility = form(kind, BATCH)
    query, keys, weights = index_operands()
    selected = requests.select_requests(query, keys, weights, visibility, TOPK)
    operands = attention_operands()
    out = requests.attend_requests(*operands, selected, visibility, TOPK, SCALE, spec_of(mode))
    mask = torch.zeros(BATCH, ROWS, KEYS + 1, dtype=torch.bool)
    start = visibility[..., :1] if kind == "intervals" else 0
    named = torch.where(selected < 0, KEYS, selected + start)
    mask = mask.scatter(-1, named.long(), True)[..., :KEYS]
    torch.testing.assert_close(out, expected_attention(operands, mask), atol=1e-5, rtol=1e-5)


def test_attention_is_a_view_in_the_order_that_a_reshape_to_tokens_wants():
    operands = attention_operands()
    visibility = intervals(BATCH)
    selected = requests.select_requests(*index_operands(), visibility, TOPK)
    out = requests.attend_requests(*operands, selected, visibility, TOPK, SCALE, spec_of())
    assert out.shape == (BATCH, ATTENTION_HEADS, ROWS, VALUE)
    assert out.transpose(1, 2).is_contiguous()


def test_gradients_reach_the_latents_and_the_weights_and_no_index_operand():
    operands = tuple(each.requires_grad_() for each in attention_operands())
    indexed = tuple(each.requires_grad_() for each in index_operands())
    visibility = intervals(BATCH)
    selected = requests.select_requests(*indexed, visibility, TOPK)
    out = requests.attend_requests(*operands, selected, visibility, TOPK, SCALE, spec_of())
    out.square().sum().backward()
    assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in operands)
    assert all(each.grad is None for each in indexed)


@pytest.mark.parametrize("last", [-(2**62), -3, -1, 0, 5, KEYS - 1, KEYS, 2**63 - 1])
def test_causal_intervals_say_what_the_comparison_says(last: int):
    kv = torch.arange(KEYS)[None, None, None]
    q = torch.tensor([last, 3])[None, None, :, None]
    found = requests.causal_intervals(kv, q)
    assert (found.shape, found.dtype) == ((1, 2, 2), torch.int32)
    keys = torch.arange(KEYS)
    assert torch.equal((keys >= found[..., :1]) & (keys < found[..., 1:]), (kv <= q)[:, 0])


def test_packed_rows_of_intervals_and_of_a_mask():
    ks, ke = requests.packed_rows(torch.tensor([[[0, 1], [2, 4]]], dtype=torch.int32), 2, 2, 10)
    assert (ks.tolist(), ke.tolist()) == ([0, 2, 10, 12], [1, 4, 11, 14])
    mask = torch.ones(2, 2, 10, dtype=torch.bool)
    ks, ke = requests.packed_rows(mask, 2, 2, 10)
    assert (ks.tolist(), ke.tolist()) == ([0, 0, 10, 10], [10, 10, 20, 20])
    assert ks.dtype == ke.dtype == torch.int32


def test_a_packed_mask_is_block_diagonal():
    mask = torch.tensor([[[True, False]], [[False, True]]])
    assert requests.packed_mask(mask, 2).tolist() == [
        [True, False, False, False],
        [False, False, False, True],
    ]
    assert requests.packed_mask(mask[:1], 1).tolist() == [[True, False]]
    assert requests.packed_mask(intervals(2), 2) is None


def test_a_mask_that_serves_all_requests_is_repeated_for_each():
    mask = torch.tensor([[[True, False]]])
    assert requests.packed_mask(mask, 2).tolist() == [
        [True, False, False, False],
        [False, False, True, False],
    ]


def test_an_additive_mask_hides_what_is_below_half_its_minimum():
    lowest = torch.finfo(torch.float32).min
    mask = torch.tensor([0.0, -1e4, lowest, float("-inf")])
    assert requests.visible(mask).tolist() == [True, True, False, False]
    with pytest.raises(TypeError, match=r"bool or floating point, got torch\.int64"):
        requests.visible(torch.ones(2, dtype=torch.int64))


def test_foreign_indices_repeat_a_selected_key_and_name_the_first_in_an_empty_row():
    indices = int32(3, 5, -1, -1, -1, -1, -1, -1).view(1, 2, 4)
    assert requests.foreign_indices(indices, 4).tolist() == [[[3, 5, 3, 3], [0, 0, 0, 0]]]
    assert requests.foreign_indices(indices, 2).tolist() == [[[3, 5], [0, 0]]]
    assert requests.foreign_indices(indices, 4).dtype == torch.int32


def test_a_selection_of_one_request_is_that_of_the_packed_op():
    query, keys, weights = (each[:1] for each in index_operands())
    visibility = intervals(1)
    ks, ke = requests.packed_rows(visibility, 1, ROWS, KEYS)
    packed = ops.index_select(query[0], keys[0], weights[0], ks, ke, KEYS, TOPK)
    assert torch.equal(requests.select_requests(query, keys, weights, visibility, TOPK)[0], packed)
