"""Unmodified models under compile: the logits, gradients and graphs of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from _matrix import (
    SETTINGS,
    TWO_LENGTHS,
    Case,
    covering_cases,
    every_case,
    pairs_of,
)
from _recognised import ONE_LAYER, groups, make_cache, small_model
from _tiny import FAMILIES, TOPK, left_padding, prompt
from _uncompiled import Counting, passes_only
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from transformers import CompileConfig, PreTrainedModel

from dsafx.passes import PipelineReport, collect

DECODE_STEPS = 2
SHORT, LONG = TOPK - 4, 3 * TOPK


def logits_of(
    prefill: Callable[..., Any],
    decode: Callable[..., Any] | None,
    model: PreTrainedModel,
    case: Case,
    length: int,
) -> Tensor:
    """Logits of a prefill and of the decode steps after it, at the positions whose mask is 1."""
    cache = make_cache(case.cache, model)
    steps = 0 if decode is None or cache is None else DECODE_STEPS
    stops = [length + step for step in range(steps + 1)]
    tokens = prompt(2, stops[-1])
    mask = left_padding(stops[-1], 0, 5) if case.padded else torch.ones_like(tokens)
    kept, start = [], 0
    for stop in stops:
        run = decode if start and decode is not None else prefill
        logits = run(
            tokens[:, start:stop],
            attention_mask=mask[:, :stop] if case.padded else None,
            cache=cache,
            use_cache=cache is not None,
        ).logits
        kept.append(logits[mask[:, start:stop].bool()])
        start = stop
    return torch.cat(kept)


@torch.no_grad()
def check_case(case: Case) -> None:
    """Right logits in one graph a function and shape, one more at most for each phase."""
    graphs = {}
    model = small_model(case.family, case.attention)
    expected = [logits_of(model, model, model, case, length) for length in case.lengths]
    for recognise in ("auto", "never"):
        torch._dynamo.reset()
        counters.clear()
        backend = Counting(passes_only)
        options = {"recognise": recognise}
        run = torch.compile(
            model, backend=backend, fullgraph=True, dynamic=case.dynamic, options=options
        )
        # With static shapes each length of a prefill and each decode step is a graph of its own.
        limit = torch._dynamo.config.patch(recompile_limit=len(case.lengths) * (1 + DECODE_STEPS))
        with limit, collect() as reports:
            for length, right in zip(case.lengths, expected, strict=True):
                actual = logits_of(run, run, model, case, length)
                torch.testing.assert_close(
                    actual, right, atol=1e-4, rtol=0, msg=_of(f"length {length}")
                )
        assert not counters["graph_break"]
        graphs[recognise] = backend.graphs
        if recognise == "auto":
            _assert_recognised(reports, case.family)
        else:
            assert [report.stage for report in reports if "dsafx." in report.before] == []
    phases = 1 if case.cache == "none" else 2
    assert graphs["auto"] <= graphs["never"] + phases


def _assert_recognised(reports: list[PipelineReport], family: str) -> None:
    """All layers in each graph, and nothing that the proof on the final graph objects to."""
    second = "attends" if family == "glm_moe_dsa" else "selects and attends"
    found = [report.of("recognise") for report in reports if report.stage == "pre_grad"]
    assert found
    for each in found:
        assert (groups(each), each.declined) == ({"0": "selects and attends", "1": second}, [])
    assert [report.problem for report in reports if report.problem] == []


CHEAP = [
    Case("deepseek_v32", "eager", "none", False, True, (LONG,)),
    Case("glm_moe_dsa", "sdpa", "static", False, False, (LONG,)),
]


@pytest.mark.parametrize("case", CHEAP, ids=str)
def test_recognised_logits_are_those_of_transformers(case: Case):
    check_case(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", covering_cases(), ids=str)
def test_recognised_logits_are_those_of_transformers_for_each_pair_of_settings(case: Case):
    check_case(case)


@pytest.mark.matrix
@pytest.mark.parametrize("case", every_case(), ids=str)
def test_recognised_logits_are_those_of_transformers_in_the_whole_matrix(case: Case):
    check_case(case)


def test_the_covering_cases_show_each_pair_of_settings_and_are_as_few_as_can_be():
    settings = {**SETTINGS, "lengths": TWO_LENGTHS}
    rows = [dict(zip(settings, values, strict=True)) for values in product(*settings.values())]
    cases = covering_cases()
    assert set().union(*(pairs_of(vars(case)) for case in cases)) == set().union(
        *(pairs_of(row) for row in rows)
    )
    assert len(cases) == len(TWO_LENGTHS) * 3
    assert len(set(map(str, every_case()))) == 2 * 2 * 3 * 3 * 2


# A prefill, or the decode steps after an eager one.
INDUCTOR = [
    ("prefill", Case("deepseek_v32", "sdpa", "none", False, False, (LONG,))),
    ("prefill", Case("deepseek_v32", "eager", "dynamic", True, True, (LONG,))),
    ("prefill", Case("deepseek_v32", "sdpa", "static", None, False, (SHORT,))),
    ("decode", Case("deepseek_v32", "sdpa", "dynamic", True, True, (TOPK + 1,))),
    ("decode", Case("deepseek_v32", "eager", "dynamic", True, False, (LONG,))),
    ("decode", Case("deepseek_v32", "eager", "static", False, False, (LONG,))),
    ("prefill", Case("glm_moe_dsa", "eager", "none", None, False, (SHORT,))),
    ("prefill", Case("glm_moe_dsa", "sdpa", "dynamic", True, False, (TOPK + 1,))),
    ("prefill", Case("glm_moe_dsa", "eager", "static", False, True, (LONG,))),
    ("decode", Case("glm_moe_dsa", "sdpa", "dynamic", True, False, (TOPK - 1,))),
    ("decode", Case("glm_moe_dsa", "sdpa", "static", None, True, (LONG,))),
    ("decode", Case("glm_moe_dsa", "eager", "static", None, False, (TOPK - 1,))),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "case"), [pytest.param(*each, id=f"{each[0]}-{each[1]}") for each in INDUCTOR]
)
@torch.no_grad()
def test_logits_of_recognised_models_through_inductor_are_those_of_transformers(
    phase: str, case: Case
):
    model = small_model(case.family, case.attention, ONE_LAYER[case.family])
    (length,) = case.lengths
    backend = Counting("dsafx")
    run = torch.compile(model, backend=backend, fullgraph=True, dynamic=case.dynamic)
    compiled = {"prefill": (run, None), "decode": (model, run)}[phase]
    eager = {"prefill": (model, None), "decode": (model, model)}[phase]
    with fresh_cache(), collect() as reports:
        actual = logits_of(*compiled, model, case, length)
    torch.testing.assert_close(actual, logits_of(*eager, model, case, length), atol=1e-4, rtol=0)
    # Dynamo calls a backend once more where a float turned out to be no input after all.
    recognised = [each.of("recognise") for each in reports if each.stage == "pre_grad"]
    assert [groups(each) for each in recognised] == [{"0": "selects and attends"}] * len(recognised)
    assert recognised
    # In a padded decode the mask grows from step to step, which one static graph does not serve.
    assert backend.graphs == (2 if phase == "decode" and case.padded else 1)


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("glm_moe_dsa", "sdpa"),
        pytest.param("deepseek_v32", "eager", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_recognised_models_are_those_of_transformers(family: str, attention: str):
    """In training mode without dropout, with padding, where rows select some of their keys."""
    model = small_model(family, attention).train()
    expected_logits, expected = _gradients(model, model)
    with collect() as reports:
        run = torch.compile(model, backend=passes_only, fullgraph=True)
        actual_logits, actual = _gradients(run, model)
    _assert_recognised(reports, family)
    torch.testing.assert_close(actual_logits, expected_logits, atol=1e-4, rtol=0)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(actual[name], gradient, atol=1e-4 * scale, rtol=0, msg=_of(name))


def _of(name: str) -> Callable[[str], str]:
    return lambda text: f"{name}: {text}"


def _gradients(run: Callable[..., Any], model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits where the mask is 1, and the gradient of each parameter that has one."""
    mask = left_padding(LONG, 0, 5)
    model.zero_grad()
    logits = run(prompt(2, LONG), attention_mask=mask, use_cache=False).logits[mask.bool()]
    logits.square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), found


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_recognised_bfloat16_logits_are_as_near_to_float32_as_those_of_transformers(family: str):
    """Both round at other places, and a key whose score is within a rounding of the K-th may take
    its place, which moves few logits much: the typical error and the mean square are compared."""
    model = small_model(family).to(torch.bfloat16)
    tokens = prompt(2, LONG)
    exact = copy.deepcopy(model).float()(tokens, use_cache=False).logits
    theirs = (model(tokens, use_cache=False).logits - exact).abs()
    with collect() as reports:
        run = torch.compile(model, backend=passes_only, fullgraph=True)
        ours = (run(tokens, use_cache=False).logits - exact).abs()
    _assert_recognised(reports, family)
    assert ours.amax(-1).median() < 1.25 * theirs.amax(-1).median()
    assert ours.square().mean() < 2 * theirs.square().mean()


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_compiles_an_unmodified_model_and_gives_its_tokens(family: str):
    model, tokens = small_model(family), prompt(1, LONG)
    settings: dict[str, Any] = {
        "attention_mask": torch.ones_like(tokens),
        "cache_implementation": "static",
        "do_sample": False,
        "max_new_tokens": 6,
    }
    expected = model.generate(tokens, **settings)
    compile_config = CompileConfig(backend="dsafx", mode=None, fullgraph=True)
    # Without it, generate compiles on accelerators only.
    compile_config._compile_all_devices = True
    with fresh_cache(), collect() as reports:
        actual = model.generate(tokens, compile_config=compile_config, **settings)
    assert torch.equal(actual, expected)
    _assert_recognised(reports, family)
