"""Routes at their edges, on a layer whose answer is either right or wrong."""

from __future__ import annotations

import pytest
import torch
from _retrieval import CONFIG, TOPK, answers, make_prompt, set_weights

from dsafx import ops, routing
from dsafx.models import layer as layers
from dsafx.models._record import record_decisions
from dsafx.models.layer import DSAAttention, MQAOnlyAttention

# Around index_topk (256), the dense query threshold (42 is below all of them), the masked threshold
# (492) and powers of two that kernels tile by.
LENGTHS = (97, 127, 128, 129, 191, 254, 255, 256, 257, 258, 383, 491, 492, 493, 511, 512, 513, 777)
LENGTHS = (*LENGTHS, 1001)
MODES = ("auto", "sparse", "masked", "dense")


def build(kind=DSAAttention, **route) -> DSAAttention:
    layer = kind(CONFIG, route=routing.RouteConfig(**route)).eval()
    set_weights(layer)
    return layer


def right(layer, lengths=LENGTHS, chunks=()) -> dict[int, bool]:
    """Per length, whether the answers after prefill and after each decode step are all right."""
    with torch.no_grad():
        return {
            length: answers(layer, prompt, chunks) == prompt.answers
            for length in lengths
            for prompt in [make_prompt(length, seed=length)]
        }


@pytest.mark.parametrize("kind", [DSAAttention, MQAOnlyAttention])
@pytest.mark.parametrize("mode", MODES)
def test_every_length_is_answered_right_by_every_legal_route(kind, mode):
    if kind is MQAOnlyAttention and mode in ("masked", "dense"):
        with pytest.raises((ValueError, NotImplementedError), match=mode):
            right(build(kind, mode=mode), (97,))
        return
    # A forced dense mode is illegal once the last decode step sees more than K keys.
    lengths = [n for n in LENGTHS if mode != "dense" or n + 4 <= TOPK]
    assert right(build(kind, mode=mode), lengths) == dict.fromkeys(lengths, True)


def test_every_length_is_answered_right_in_small_blocks_and_in_chunks():
    layer = build()
    with ops.options(workspace_bytes=1 << 19):
        assert right(layer, (256, 257, 513, 1001)) == dict.fromkeys((256, 257, 513, 1001), True)
    for chunks in ((1, 96), (128,), (255, 256), (256, 257)):
        assert right(layer, (258, 512), chunks) == {258: True, 512: True}


def test_a_layer_that_declares_nothing_never_goes_dense_and_always_selects():
    with record_decisions() as records:
        right(build(MQAOnlyAttention), (97, 256, 257))
    assert {record.decision.route for record in records} == {routing.Route.SPARSE_MQA}
    assert routing.Selection.NONE not in {record.decision.selection for record in records}


def test_a_selection_of_nothing_is_noticed(monkeypatch):
    def nothing(q, k, weights, ks, ke, max_kv_len, topk, mask=None, batch_invariant=False):
        return ks.new_full((ks.shape[0], topk), -1)

    monkeypatch.setattr(layers.ops, "index_select", nothing)
    assert right(build(), (257, 512)) == {257: False, 512: False}


def test_a_closed_form_for_a_long_row_is_noticed(monkeypatch):
    def closed(q, k, weights, ks, ke, max_kv_len, topk, mask=None, batch_invariant=False):
        return ops.causal_positions(ks, ke, max_kv_len, topk)

    monkeypatch.setattr(layers.ops, "index_select", closed)
    assert right(build(), (257, 512)) == {257: False, 512: False}


def test_a_selection_of_the_previous_forward_is_noticed(monkeypatch):
    select, previous = ops.index_select, {}

    def stale(q, *rest):
        fresh = select(q, *rest)
        return previous.setdefault(tuple(fresh.shape), fresh)

    monkeypatch.setattr(layers.ops, "index_select", stale)
    layer = build()
    with torch.no_grad():
        first, second = make_prompt(512, seed=1), make_prompt(512, seed=2)
        answers(layer, first)
        assert answers(layer, second) != second.answers


def test_a_dense_route_just_above_topk_is_noticed():
    route = {"mode": "dense", "dense_threshold": 2 * TOPK, "allow_approximate": True}
    assert right(build(**route), (TOPK + 1,)) == {TOPK + 1: False}


def test_a_dropped_key_write_is_noticed(monkeypatch):
    written = layers._written

    def forgetful(cache, rows, positions):
        if cache is not None and cache.shape[1] == CONFIG.index_head_dim:
            return cache
        return written(cache, rows, positions)

    monkeypatch.setattr(layers, "_written", forgetful)
    # The prompt itself needs no key to be written; the decode steps past K do.
    assert right(build(), (254, 512)) == {254: False, 512: False}


def check_compiled(mode: str, lengths: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    layer = build(mode=mode)
    compiled = torch.compile(layer, backend="dsafx", dynamic=True, fullgraph=True)
    assert right(compiled, lengths) == dict.fromkeys(lengths, True)


def test_every_length_is_answered_right_compiled():
    check_compiled("auto", LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sparse", "masked"])
def test_every_length_is_answered_right_compiled_by_every_forced_route(mode):
    check_compiled(mode, LENGTHS)
