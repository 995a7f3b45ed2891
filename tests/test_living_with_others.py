"""Beside other users of torch.compile: their passes, modes, stances and nested compiles."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from _graphs import Layer, largest_difference, prompt
from _select import LONG, SHORT, SHORT_TOO, TOPK, Select, check, tokens
from _uncompiled import passes_only
from torch import Tensor, fx
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

import dsafx
from dsafx import ops
from dsafx.passes import PipelineReport, collect
from dsafx.passes import _torch_compat as compat
from dsafx.passes._report import PassOptions
from dsafx.passes.pipeline import Pipeline

HOOKS = (compat.PRE_GRAD_HOOK, compat.POST_GRAD_HOOK)


class Foreign(CustomGraphPass):
    """A pass of somebody else, which keeps the ops of this package that it saw."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: list[list[str]] = []

    def __call__(self, graph: fx.Graph) -> None:
        names = [str(node.target) for node in graph.nodes]
        self.seen.append([name for name in names if name.startswith("dsafx.")])

    def uuid(self) -> str:
        return self.name


def tiny(x: Tensor, weight: Tensor) -> Tensor:
    return ops.rms_norm(x, weight, 1e-6) + 1


TINY = (torch.randn(3, 8), torch.rand(8))


def run_tiny(backend: str = "dsafx", **kwargs: Any) -> list[PipelineReport]:
    """Compile and check ``tiny``; the post-grad reports."""
    torch._dynamo.reset()
    with torch.no_grad(), fresh_cache(), collect() as reports:
        result = torch.compile(tiny, backend=backend, fullgraph=True, **kwargs)(*TINY)
    torch.testing.assert_close(result, tiny(*TINY))
    return reports


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("kind", ["none", "one", "list", "tuple"])
@pytest.mark.parametrize("where", ["the options", "the configuration"])
def test_passes_of_others_stay_in_front_of_ours_and_are_not_changed(
    hook: str, kind: str, where: str
):
    a, b = Foreign("a"), Foreign("b")
    theirs: Any = {"none": None, "one": a, "list": [a, b], "tuple": (a, b)}[kind]
    expected = {"none": [], "one": [a]}.get(kind, [a, b])
    options = {hook: theirs}
    if where == "the options":
        found = dsafx.inductor_options(**options)[hook]
        assert options[hook] is theirs
    else:
        with config.patch(options):
            found = dsafx.inductor_options()[hook]
            assert getattr(config, hook) is theirs
    *others, ours = compat.passes_in(found)
    assert others == expected
    assert type(ours).__module__ == Pipeline.__module__
    assert list(compat.passes_in(theirs)) == expected


def test_a_pass_in_the_options_stands_for_the_one_in_the_configuration_as_under_inductor():
    a, b = Foreign("a"), Foreign("b")
    with config.patch({compat.POST_GRAD_HOOK: a}):
        given = dsafx.inductor_options(post_grad_custom_pre_pass=b)
        nothing = dsafx.inductor_options(post_grad_custom_pre_pass=None)
    assert compat.passes_in(given[compat.POST_GRAD_HOOK])[:-1] == (b,)
    assert compat.passes_in(nothing[compat.POST_GRAD_HOOK])[:-1] == ()


def test_options_made_twice_hold_our_passes_once_and_keep_what_was_chosen():
    foreign = Foreign("a")
    once = dsafx.inductor_options(strict=True, post_grad_custom_pre_pass=foreign)
    twice = dsafx.inductor_options(fuse="never", **once)
    for hook in HOOKS:
        assert len(compat.passes_in(twice[hook])) == len(compat.passes_in(once[hook]))
    *others, ours = compat.passes_in(twice[compat.POST_GRAD_HOOK])
    assert others == [foreign]
    assert ours == Pipeline(PassOptions(strict=True, fuse="never"))


def test_equal_options_are_equal_so_that_compiled_code_is_found_again():
    first = dsafx.inductor_options(strict=True)
    assert first == dsafx.inductor_options(strict=True)
    assert first == copy.deepcopy(first) == pickle.loads(pickle.dumps(first))
    assert first != dsafx.inductor_options(strict=False)
    counters.clear()
    torch._dynamo.reset()
    with torch.no_grad(), fresh_cache():
        for _ in range(2):
            torch.compile(tiny, backend="inductor", options=dsafx.inductor_options())(*TINY)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("lists", [True, False])
def test_passes_of_others_run_before_ours_in_both_hooks(
    lists: bool, monkeypatch: pytest.MonkeyPatch
):
    """``lists`` False composes as for the versions whose hooks take one pass."""
    monkeypatch.setattr(compat, "_HOOKS_TAKE_LISTS", lists and compat._HOOKS_TAKE_LISTS)
    everywhere, here = Foreign("everywhere"), Foreign("here")
    with config.patch({compat.PRE_GRAD_HOOK: everywhere}):
        (report,) = run_tiny(options={compat.POST_GRAD_HOOK: here})
    assert everywhere.seen == here.seen == [["dsafx.rms_norm.default"]]
    assert report.of("lower").matched == 1
    assert "rms_norm" not in report.after


@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_pass_without_a_uuid_runs_at_each_compile(
    hook: str, lists: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compat, "_HOOKS_TAKE_LISTS", lists and compat._HOOKS_TAKE_LISTS)
    seen: list[str] = []

    def bare(graph: fx.Graph) -> None:
        seen.append(hook)

    with torch.no_grad(), fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            run = torch.compile(tiny, backend="dsafx", fullgraph=True, options={hook: bare})
            torch.testing.assert_close(run(*TINY), tiny(*TINY))
    assert seen == [hook, hook]


@pytest.mark.parametrize("mode", compat.modes())
def test_each_mode_of_torch_compile_runs_our_passes_unless_it_runs_none(mode: str):
    reports = run_tiny(mode=mode)
    runs_none = compat.mode_options(mode).get("use_post_grad_passes") is False
    assert [report.of("lower").matched for report in reports] == ([] if runs_none else [1])


def test_a_mode_that_does_not_exist_is_answered_with_those_that_do():
    with pytest.raises(
        BackendCompilerFailed,
        match=r"unknown mode 'reduce-overheads': did you mean reduce-overhead\? accepted are "
        "default, ",
    ):
        run_tiny(mode="reduce-overheads")


def test_a_mode_beside_options_is_refused_by_torch():
    with pytest.raises(RuntimeError, match="Either mode or options can be specified"):
        torch.compile(tiny, backend="dsafx", mode="default", options={"strict": True})


@torch.no_grad()
def test_under_force_eager_nothing_is_compiled():
    model = Select()
    run = torch.compile(model, backend=passes_only, dynamic=True)
    with collect() as reports, torch.compiler.set_stance("force_eager"):
        check(run, model, SHORT, LONG)
    assert reports == []


@torch.no_grad()
def test_under_fail_on_recompile_a_length_beyond_the_guard_raises_and_says_which_guard():
    model = Select()
    run = torch.compile(model, backend=passes_only, dynamic=True)
    run(*tokens(SHORT))
    with torch.compiler.set_stance("fail_on_recompile"):
        check(run, model, SHORT_TOO)
        with pytest.raises(RuntimeError, match=rf"2 <= k.size\(\)\[0\] <= {TOPK}"):
            run(*tokens(LONG))
    check(run, model, LONG)


@torch.no_grad()
def test_under_eager_on_recompile_a_length_beyond_the_guard_runs_eager():
    model = Select()
    run = torch.compile(model, backend=passes_only, dynamic=True)
    with collect() as reports:
        check(run, model, SHORT)
        with torch.compiler.set_stance("eager_on_recompile"):
            check(run, model, SHORT_TOO, LONG)
    assert len(reports) == 1


@torch.no_grad()
def test_a_stance_can_force_our_backend_onto_code_compiled_for_another():
    model = Select()
    run = torch.compile(model, backend="eager", dynamic=True)
    with collect() as reports, torch.compiler.set_stance("default", force_backend=passes_only):
        check(run, model, SHORT, LONG)
    assert len(reports) == 2


@torch.no_grad()
@pytest.mark.parametrize("outer", ["dsafx", "inductor"])
@pytest.mark.parametrize("inner", ["dsafx", "inductor"])
def test_of_nested_compiles_the_outermost_backend_takes_it_all(outer: str, inner: str):
    """Where that one is not ours, our ops run as they are, with the same numbers."""
    compiled = torch.compile(tiny, backend=inner)

    def around(x: Tensor, weight: Tensor) -> Tensor:
        return 2 * compiled(x, weight)

    with fresh_cache(), collect() as reports:
        result = torch.compile(around, backend=outer, fullgraph=True)(*TINY)
    torch.testing.assert_close(result, 2 * tiny(*TINY))
    assert len(reports) == (outer == "dsafx")


@torch.no_grad()
def test_a_compiled_part_that_the_outer_compile_may_not_touch_runs_eager():
    model = Select()
    part = torch.compiler.disable(torch.compile(model, backend=passes_only, dynamic=True))

    def around(*args: Tensor) -> Tensor:
        return part(*args) + 1

    with collect() as reports:
        run = torch.compile(around, backend="aot_eager", dynamic=True)
        check(run, lambda *args: model(*args) + 1, SHORT, LONG)
    assert reports == []


@pytest.mark.slow
@torch.no_grad()
def test_a_layer_compiled_inside_a_function_compiled_for_inductor_is_right_at_any_length():
    layer = Layer()
    compiled = torch.compile(layer, backend="dsafx", dynamic=True)
    with fresh_cache():
        run = torch.compile(lambda *args: compiled(*args), backend="inductor", dynamic=True)
        for length in (SHORT, LONG):
            args = prompt(length)
            assert largest_difference(run(*args), layer(*args)) < 1e-5
