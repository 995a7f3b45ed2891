"""Enabled transformers models under compile: the logits, gradients and graphs of the eager ones."""

from __future__ import annotations

import pytest
import torch
from _tiny import FAMILIES, TOPK, left_padding, prompt, tiny_model
from _uncompiled import Counting, passes_only
from torch._dynamo.utils import counters
from transformers import DynamicCache, StaticCache

import dsafx
from dsafx.passes import collect

LENGTHS = (TOPK - 1, TOPK, TOPK + 1, 3 * TOPK)
DECODE_STEPS = 8
TWO_LAYERS = {
    "deepseek_v32": {"num_hidden_layers": 2},
    "glm_moe_dsa": {"num_hidden_layers": 2, "indexer_types": ["full", "shared"]},
}

# Where many graphs are compiled, the fast tests take the family that has shared layers too.
SLOW_WITHOUT_SHARED_LAYERS = [
    pytest.param("deepseek_v32", marks=pytest.mark.slow),
    "glm_moe_dsa",
]


def small_model(family: str):
    return tiny_model(family, **TWO_LAYERS[family])


def make_cache(kind: str, model):
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=3 * TOPK + DECODE_STEPS)


def run(model, length: int, cache_kind: str, padded: bool):
    """Logits of a prefill and of the decode steps after it, at the positions whose mask is 1."""
    total = length + DECODE_STEPS
    tokens = prompt(2, total)
    mask = left_padding(total, 0, 5) if padded else None
    cache = make_cache(cache_kind, model)
    kept = []
    with torch.no_grad():
        for start, stop in [(0, length), *((t, t + 1) for t in range(length, total))]:
            seen = None if mask is None else mask[:, :stop]
            logits = model(tokens[:, start:stop], attention_mask=seen, cache=cache).logits
            kept.append(logits if mask is None else logits[mask[:, start:stop].bool()])
    return torch.cat([logits.reshape(-1, logits.shape[-1]) for logits in kept])


@pytest.mark.parametrize("family", SLOW_WITHOUT_SHARED_LAYERS)
@pytest.mark.parametrize(("cache", "padded"), [("dynamic", False), ("static", True)])
def test_compiled_logits_are_those_of_transformers(family, cache, padded):
    check_logits(family, cache, padded, LENGTHS, passes_only)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("cache", "padded"), [("dynamic", True), ("static", False)])
def test_compiled_logits_are_those_of_transformers_in_the_other_cases(family, cache, padded):
    check_logits(family, cache, padded, LENGTHS, passes_only)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("cache", "padded"), [("dynamic", False), ("static", True)])
def test_logits_compiled_by_inductor_are_those_of_transformers(family, cache, padded):
    check_logits(family, cache, padded, (TOPK - 1, 3 * TOPK), "dsafx")


def check_logits(family, cache, padded, lengths, backend):
    plain, ours = small_model(family), dsafx.enable(small_model(family))
    counters.clear()
    ours.compile(backend=backend, dynamic=None, fullgraph=True)
    for length in lengths:
        expected = run(plain, length, cache, padded)
        actual = run(ours, length, cache, padded)
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0, msg=f"length {length}")
    assert not counters["graph_break"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [TOPK, 3 * TOPK])
def test_compiled_gradients_are_those_of_transformers(family, length):
    check_gradients(family, length, passes_only)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_compiled_by_inductor_are_those_of_transformers(family):
    check_gradients(family, 3 * TOPK, "dsafx")


def check_gradients(family, length, backend):
    tokens, mask = prompt(2, length), left_padding(length, 0, 5)
    expected = gradients(small_model(family), tokens, mask)
    ours = dsafx.enable(small_model(family))
    ours.compile(backend=backend, fullgraph=True)
    actual = gradients(ours, tokens, mask)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-4, rtol=1e-4, msg=name)


def gradients(model, tokens, mask):
    logits = model(tokens, attention_mask=mask, use_cache=False).logits
    (logits * mask[..., None]).square().mean().backward()
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and "experts" not in name
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [TOPK, 3 * TOPK])
def test_autocast_gives_compiled_code_the_numbers_of_eager(family, length):
    model, tokens = dsafx.enable(small_model(family)), prompt(1, length)
    compiled = torch.compile(model, backend=passes_only, fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(tokens, use_cache=False).logits
        actual = compiled(tokens, use_cache=False).logits
    assert actual.dtype is expected.dtype
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_prefill_scores_nothing_and_still_writes_the_index_keys(family):
    """No scoring and no indexer query in the graph; the cache holds transformers' index keys."""
    plain, ours = small_model(family), dsafx.enable(small_model(family))
    ours.compile(backend=passes_only, fullgraph=True)
    tokens, caches = prompt(2, TOPK), {}
    with torch.no_grad(), collect() as reports:
        for name, model in (("plain", plain), ("ours", ours)):
            caches[name] = DynamicCache(config=model.config)
            model(tokens, cache=caches[name])
    (report,) = reports
    assert "dense_mha" in report.after
    assert "index_select" in report.before
    assert "index_select" not in report.after
    query = [p for n, p in ours.named_parameters() if n.endswith("wq_b.weight")]
    assert query
    assert f"{tuple(query[0].shape)}" not in report.after
    for layer, reference in zip(caches["ours"].layers, caches["plain"].layers, strict=True):
        if reference.is_indexer_initialized:
            torch.testing.assert_close(layer.indexer_keys, reference.indexer_keys)


@pytest.mark.parametrize("family", SLOW_WITHOUT_SHARED_LAYERS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_specialising_on_the_length_costs_one_graph_at_most(family, dynamic):
    """Lengths below, above and below K, in both orders; the numbers are right in any."""
    plain = small_model(family)
    lengths = (9, 40, 12) if family == "glm_moe_dsa" else (40, 9, 44)
    graphs = {}
    for backend in ("eager", passes_only):
        torch._dynamo.reset()
        model, counting = dsafx.enable(small_model(family)), Counting(backend)
        model.compile(backend=counting, fullgraph=True, dynamic=dynamic)
        for length in lengths:
            tokens = prompt(1, length)
            with torch.no_grad():
                actual = model(tokens, use_cache=False).logits
                expected = plain(tokens, use_cache=False).logits
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
        graphs[backend] = counting.graphs
    assert graphs[passes_only] <= graphs["eager"] + 1
    assert dynamic is None or graphs[passes_only] <= 2


@pytest.mark.parametrize("family", FAMILIES)
def test_specialize_never_makes_one_dynamic_graph_of_all_lengths(family):
    plain, model = small_model(family), dsafx.enable(small_model(family))
    compiled = torch.compile(
        model,
        backend=passes_only,
        dynamic=True,
        fullgraph=True,
        options={"specialize": "never"},
    )
    with torch.no_grad():
        compiled(prompt(1, 9), use_cache=False)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for length in (40, 12, TOPK, TOPK + 1):
                tokens = prompt(1, length)
                actual = compiled(tokens, use_cache=False).logits
                expected = plain(tokens, use_cache=False).logits
                torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
