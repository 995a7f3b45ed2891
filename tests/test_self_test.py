"""A provider's kernels are tried before they compute, and a provider that is wrong steps aside."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dsafx import ops
from dsafx.ops import _self_test, _verdicts, providers
from dsafx.ops.probes import PROBES
from dsafx.ops.providers import Kernel, Provider

CPU = torch.device("cpu")
MODULE = "planted_kernels"
GRADIENTS = {f"{op}_backward" for op in ("dense_mha", "masked_mha", "sparse_mqa", "sparse_mla")}


def of_the_reference(op: str) -> Callable[..., object]:
    overload = getattr(torch.ops.dsafx, op).default

    def run(*args: object) -> object:
        with ops.use_provider("reference"):
            return overload(*args)

    return run


class Planted:
    """A provider on the CPU whose kernels are the reference's, counted, with faults on request."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.kernels: dict[str, Kernel] = {}
        self.provider = Provider(
            name="planted",
            devices=("cpu",),
            kernels=providers.REFERENCE.kernels,
            fused=frozenset(),
            sorted_ids=True,
            lowest_tie=True,
            fp32_scores=True,
            graph_safe=False,
            module=MODULE,
            self_tested=("cpu",),
        )

    def plant(self, op: str, run: Callable[..., object] | None = None, refusal: str | None = None):
        body = run or of_the_reference(op)

        def counted(*args: object) -> object:
            self.calls.append(op)
            return body(*args)

        self.kernels[op] = Kernel(counted, lambda *args: refusal)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Planted]:
    """A new provider before all others, whose verdicts are forgotten afterwards."""
    found = Planted()
    module = types.ModuleType(MODULE)
    module.KERNELS = found.kernels  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(providers, "PROVIDERS", (found.provider, *providers.PROVIDERS))
    monkeypatch.setattr(_verdicts, "_verdicts", {})
    providers.kernels_of.cache_clear()
    yield found
    providers.kernels_of.cache_clear()


def norm_arguments() -> tuple[Tensor, Tensor, float]:
    return torch.randn(4, 16), torch.randn(16), 1e-6


def disturbed(value: object) -> object:
    """What is returned, with the rows of its first tensor in reverse."""
    first = value[0] if isinstance(value, tuple) else value
    assert isinstance(first, Tensor)
    return (first.flip(0), *value[1:]) if isinstance(value, tuple) else first.flip(0)


@pytest.mark.parametrize("op", PROBES)
def test_the_reference_passes_the_probes_of_each_op(planted, op):
    planted.plant(op)
    verdict = _self_test.verdict(planted.provider, CPU)
    assert (verdict.tested, dict(verdict.untested), verdict.failure) == ((op,), {}, None)


@pytest.mark.parametrize("op", PROBES)
def test_a_wrong_result_of_each_op_is_found(planted, op):
    right = of_the_reference(op)

    def wrong(*args: object) -> object:
        if op.endswith("cache_write"):
            cache = next(arg for arg in args if isinstance(arg, Tensor) and arg.dim() == 3)
            right(*args)
            return cache[0, 0, :1].fill_(0)
        return disturbed(right(*args))

    planted.plant(op, wrong)
    with pytest.warns(RuntimeWarning, match="planted fails its self-test on cpu"):
        verdict = _self_test.verdict(planted.provider, CPU)
    assert verdict.failure is not None
    assert verdict.failure.startswith(f"{op}: ")


def test_every_kernel_of_the_cpu_provider_but_gradients_has_a_probe():
    kernels = providers.kernels_of(".cpu")
    assert set(kernels) - set(PROBES) == GRADIENTS


def test_an_op_is_tried_at_its_first_call_and_only_then(planted):
    planted.plant("rms_norm")
    planted.plant("layer_norm")
    arguments = norm_arguments()
    expected = torch.nn.functional.rms_norm(arguments[0], (16,), *arguments[1:])
    torch.testing.assert_close(ops.rms_norm(*arguments), expected)
    probes = len(PROBES["rms_norm"](planted.provider))
    assert planted.calls == ["rms_norm"] * (probes + 1)
    ops.rms_norm(*arguments)
    assert planted.calls == ["rms_norm"] * (probes + 2)


def test_a_provider_with_a_wrong_kernel_steps_aside_once_and_is_trusted_with_no_other(planted):
    planted.plant("rms_norm", lambda x, weight, eps: x)
    planted.plant("layer_norm")
    arguments = norm_arguments()
    expected = torch.nn.functional.rms_norm(arguments[0], (16,), *arguments[1:])
    with pytest.warns(RuntimeWarning, match="result 0 is off by .* times what rounding") as warned:
        torch.testing.assert_close(ops.rms_norm(*arguments), expected)
    assert len(warned) == 1
    tried = len(planted.calls)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(ops.rms_norm(*arguments), expected)
        ops.layer_norm(arguments[0], arguments[1], arguments[1], 1e-6)
    assert len(planted.calls) == tried
    reason = providers.reasons("cpu")["planted"]
    assert reason is not None
    assert reason.startswith("the self-test of planted failed on cpu: rms_norm: result 0 is off by")
    assert providers.dispatch("cpu").name == "cpu"


def test_a_kernel_that_raises_steps_aside_with_what_it_said(planted):
    def raises(*args: object) -> object:
        raise OSError("no kernel image is available\nand much more")

    planted.plant("rms_norm", raises)
    with pytest.warns(RuntimeWarning, match="rms_norm: OSError: no kernel image is available$"):
        ops.rms_norm(*norm_arguments())


def test_whoever_names_a_provider_that_failed_is_told_so(planted):
    planted.plant("rms_norm", lambda x, weight, eps: x)
    named = ops.use_provider("planted")
    with pytest.warns(RuntimeWarning), named, pytest.raises(RuntimeError, match="self-test failed"):
        ops.rms_norm(*norm_arguments())


def test_an_op_whose_probes_are_all_refused_is_untested_and_computes(planted):
    planted.plant("rms_norm", refusal="serves nothing")
    verdict = _self_test.verdict(planted.provider, CPU)
    assert (verdict.passed, verdict.tested) == (True, ())
    assert dict(verdict.untested) == {"rms_norm": "serves nothing"}
    assert str(verdict) == "passed, 0 of 1 ops tried"


def test_a_module_that_does_not_load_fails(planted, monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE, None)
    with pytest.warns(RuntimeWarning, match="ModuleNotFoundError"):
        assert not _self_test.verdict(planted.provider, CPU).passed


def test_fake_tensors_and_tracing_run_no_self_test(planted):
    planted.plant("rms_norm", lambda x, weight, eps: x)
    arguments = norm_arguments()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        ops.rms_norm(mode.from_tensor(arguments[0]), mode.from_tensor(arguments[1]), 1e-6)
    make_fx(ops.rms_norm, tracing_mode="fake")(*arguments)
    with torch.device("meta"):
        ops.rms_norm(torch.empty(4, 16), torch.empty(16), 1e-6)
    assert planted.calls == []
    assert _verdicts.known("planted", "cpu") is None


def test_a_self_test_sees_none_of_the_modes_around_it(planted):
    planted.plant("norm_rope_index_write")
    state = torch.get_rng_state()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            FakeTensorMode(),
            torch.autocast("cpu", dtype=torch.bfloat16),
            torch.device("meta"),
        ):
            assert _self_test.verdict(planted.provider, CPU).tested == ("norm_rope_index_write",)
    finally:
        torch.set_default_dtype(default)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_kernel_under_test_may_call_ops_itself(planted):
    def by_parts(q_c, q_weight, kv_c, kv_weight, k_pe, cos, sin, eps, style):
        return (
            ops.rms_norm(q_c, q_weight, eps),
            ops.rms_norm(kv_c, kv_weight, eps),
            ops.rope(k_pe, cos, sin, style),
        )

    planted.plant("norm_rope", by_parts)
    planted.plant("rms_norm")
    assert _self_test.verdict(planted.provider, CPU).passed


def test_selections_without_the_promise_of_the_lowest_tie_are_compared_by_score(planted):
    unordered = replace(planted.provider, lowest_tie=False, sorted_ids=False)
    right = of_the_reference("index_select")

    def backwards(*args: object) -> Tensor:
        found = right(*args)
        assert isinstance(found, Tensor)
        return found.flip(1)

    planted.plant("index_select", backwards)
    assert _self_test.verdict(unordered, CPU).passed
    _verdicts._verdicts.clear()
    with pytest.warns(RuntimeWarning, match="bytes of result 0 differ"):
        assert not _self_test.verdict(planted.provider, CPU).passed
