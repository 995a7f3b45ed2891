"""The Dynamo backend: options, guards, caches, foreign passes, and dropped guards."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from _graphs import (
    TOPK,
    Layer,
    compiled,
    largest_difference,
    op_names,
    prompt,
    spec_of,
)
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

import dsafx
from dsafx import _backend, ops
from dsafx.passes import collect, pipeline

SHORT, LONG, SHORT_AGAIN = 9, 37, 13


class Recorder(CustomGraphPass):
    """A pass of somebody else, which keeps the ops that it saw."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.seen.append(op_names(graph))

    def uuid(self) -> str:
        return "recorder"


def tiny(x: Tensor, weight: Tensor) -> Tensor:
    return ops.rms_norm(x, weight, 1e-6) + 1


TINY = (torch.randn(3, 8), torch.rand(8))


@torch.no_grad()
@pytest.mark.parametrize(
    "lengths",
    [
        (SHORT, LONG, SHORT_AGAIN),
        pytest.param((LONG, SHORT, 50), marks=pytest.mark.slow),
    ],
)
def test_three_lengths_around_the_width_make_two_graphs_and_right_numbers(lengths: tuple[int, ...]):
    layer = Layer()
    counters.clear()
    calls = [prompt(length) for length in lengths]
    results, reports = compiled(layer, *calls, dynamic=True)
    assert counters["stats"]["unique_graphs"] == 2
    assert len(reports) == 2
    for result, args in zip(results, calls, strict=True):
        assert largest_difference(result, layer(*args)) < 1e-5


@torch.no_grad()
def test_never_specialising_leaves_one_graph_that_decides_when_it_runs():
    layer = Layer()
    counters.clear()
    calls = [prompt(length) for length in (SHORT, LONG, SHORT_AGAIN)]
    results, reports = compiled(layer, *calls, dynamic=True, specialize="never")
    assert counters["stats"]["unique_graphs"] == 1
    assert "mla_attention" in reports[0].after
    assert "index_select" in reports[0].after
    for result, args in zip(results, calls, strict=True):
        assert largest_difference(result, layer(*args)) < 1e-5


@torch.no_grad()
def test_a_short_compiled_prefill_runs_no_scoring_and_keeps_the_index_key():
    layer = Layer()
    args = prompt(SHORT)
    (result,), (report,) = compiled(layer, args, dynamic=False, fuse="always", strict=True)
    for gone in ("index_select", "mla_attention", "rms_norm", "layer_norm"):
        assert f"dsafx.{gone}(" not in report.after
    for there in ("norm_rope_index", "dense_mha"):
        assert report.after.count(f"dsafx.{there}(") == 1
    assert report.of("close_selection").removed == [("index_select", "nothing reads it")]
    assert largest_difference(result, layer(*args)) < 1e-5


def test_gradients_go_through_a_compiled_layer():
    def loss(*outputs: Tensor) -> Tensor:
        return sum(output.square().sum() for output in outputs)

    layer = Layer()
    args = prompt(SHORT)
    loss(*layer(*args)).backward()
    expected = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    torch._dynamo.reset()
    with fresh_cache():
        loss(*torch.compile(layer, backend="dsafx", fullgraph=True)(*args)).backward()
    found = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    assert largest_difference(found.values(), expected.values()) < 1e-3


@torch.no_grad()
@pytest.mark.parametrize("dense", [True, False])
def test_a_graph_made_for_short_raises_on_long_where_guards_were_dropped(dense: bool):
    layer = Layer(None if dense else spec_of(dense=False, masked=False))
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    torch._dynamo.reset()
    with fresh_cache():
        run = torch.compile(layer, backend="dsafx", dynamic=True, options=options)
        run(*prompt(SHORT))
        with pytest.raises(ValueError, match=f"compiled for at most {TOPK} keys a row, got"):
            run(*prompt(LONG))


@torch.no_grad()
def test_a_graph_made_for_long_stays_right_on_short_where_guards_were_dropped():
    layer = Layer()
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    torch._dynamo.reset()
    with fresh_cache():
        run = torch.compile(layer, backend="dsafx", dynamic=True, options=options)
        for length in (LONG, SHORT):
            args = prompt(length)
            assert largest_difference(run(*args), layer(*args)) < 1e-5


@torch.no_grad()
def test_a_foreign_pass_in_the_global_config_still_runs_and_stays_there():
    foreign = Recorder()
    with config.patch(post_grad_custom_pre_pass=foreign):
        _, reports = compiled(tiny, TINY)
        assert config.post_grad_custom_pre_pass is foreign
    assert foreign.seen == [["rms_norm"]]
    assert reports[0].of("lower").matched == 1


@torch.no_grad()
def test_foreign_passes_in_the_options_run_before_ours():
    first, second = Recorder(), Recorder()
    _, reports = compiled(tiny, TINY, post_grad_custom_pre_pass=[first, second])
    assert first.seen == second.seen == [["rms_norm"]]
    assert reports[0].of("lower").matched == 1


@torch.no_grad()
def test_our_options_run_under_the_inductor_backend_and_leave_nothing_behind():
    before = config.get_config_copy()
    torch._dynamo.reset()
    with fresh_cache(), collect() as reports:
        options = dsafx.inductor_options(specialize="never", max_autotune=False)
        result = torch.compile(tiny, backend="inductor", options=options)(*TINY)
    assert reports[0].of("lower").matched == 1
    torch.testing.assert_close(result, tiny(*TINY))
    assert config.get_config_copy() == before


@torch.no_grad()
def test_a_mode_is_expanded_and_options_override_it():
    gm = fx.symbolic_trace(torch.nn.Identity())
    found: dict[str, Any] = {}

    def compile_fx(gm: Any, inputs: Any, config_patches: dict[str, Any]) -> Any:
        found.update(config_patches)
        return gm

    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
        assert _backend.backend(gm, [], mode="max-autotune-no-cudagraphs") is gm
        assert found["max_autotune"] is True
        _backend.backend(gm, [], mode="max-autotune-no-cudagraphs", options={"max-autotune": False})
        assert found["max_autotune"] is False


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"specialise": "never"}, "unknown option 'specialise': did you mean specialize"),
        ({"max_autotun": True}, "unknown option 'max_autotun': did you mean max_autotune"),
        (
            {"qqqqqqqq": 1},
            "unknown option 'qqqqqqqq': accepted are specialize, .* and Inductor's own",
        ),
        ({"fuse": "sometimes"}, "fuse must be one of auto, always, never, got 'sometimes'"),
    ],
)
def test_an_option_that_is_not_accepted_is_answered_with_what_is(options: Any, error: str):
    with pytest.raises(ValueError, match=error):
        dsafx.inductor_options(**options)


class GlmMoeDsaIndexer(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.topk(2, dim=-1).indices


class GlmMoeDsaAttention(torch.nn.Module):
    """Named like the attention of transformers, with another selection inside."""

    def __init__(self) -> None:
        super().__init__()
        self.indexer = GlmMoeDsaIndexer()

    def forward(self, x: Tensor) -> Tensor:
        return self.indexer(x) + 1


@torch.no_grad()
def test_a_model_of_which_no_layer_was_recognised_is_told_so_once():
    pipeline._warn_once.cache_clear()
    model = torch.nn.Sequential(GlmMoeDsaAttention())
    with pytest.warns(UserWarning, match=r"\(0: its selection differs: .*dsafx\.enable\(model\)"):
        (result,), _ = compiled(model, (torch.tensor([1.0, 3.0, 2.0]),))
    assert result.tolist() == [2, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compiled(model, (torch.ones(5),))


@torch.no_grad()
def test_a_model_without_such_a_layer_is_told_nothing():
    pipeline._warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        (result,), reports = compiled(GlmMoeDsaIndexer(), (torch.tensor([1.0, 3.0, 2.0]),))
    assert result.tolist() == [1, 2]
    assert reports == []


@torch.no_grad()
def test_a_report_is_gathered_for_each_compiled_graph_and_none_on_a_cache_hit():
    with fresh_cache(), collect() as reports:
        torch._dynamo.reset()
        torch.compile(tiny, backend="dsafx")(*TINY)
        torch._dynamo.reset()
        torch.compile(tiny, backend="dsafx")(*TINY)
    assert len(reports) == 1


def test_the_backend_is_found_by_name_and_imports_no_compiler():
    code = (
        "import sys, dsafx._backend\n"
        "assert 'dsafx.passes.pipeline' not in sys.modules\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules\n"
        "import torch._dynamo\n"
        "assert 'dsafx' in torch._dynamo.list_backends()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
