"""Which provider is chosen, which is passed over, and why."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from dsafx import ops
from dsafx.ops import libraries, providers

OPT_IN = "triton has not run on a GPU yet, so that it computes only where use_provider names it"
NOT_INSTALLED = "triton needs triton, which is not installed: pip install 'dsafx[triton]'"
NOT_INTERPRETED = "triton runs on the CPU only in its interpreter, with TRITON_INTERPRET=1"


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch):
    """Say whether Triton is installed and interprets, whatever this process has."""

    def is_there(installed: bool, interpreted: bool) -> None:
        monkeypatch.setattr(libraries, "installed", lambda library: installed)
        monkeypatch.setattr(libraries, "interpreted", lambda: interpreted)

    return is_there


def test_triton_is_passed_over_on_a_gpu_until_it_has_run_on_one(triton):
    triton(installed=True, interpreted=False)
    assert providers.reasons("cuda")["triton"] == OPT_IN
    assert providers.dispatch("cuda") is providers.REFERENCE
    with ops.use_provider("triton"):
        assert providers.dispatch("cuda") is providers.TRITON
        assert providers.reasons("cuda")["triton"] is None


def test_triton_takes_cpu_tensors_only_in_its_interpreter_and_only_by_name(triton):
    triton(installed=True, interpreted=False)
    assert providers.reasons("cpu")["triton"] == NOT_INTERPRETED
    with ops.use_provider("triton"), pytest.raises(NotImplementedError, match="TRITON_INTERPRET"):
        providers.dispatch("cpu")
    triton(installed=True, interpreted=True)
    assert providers.reasons("cpu")["triton"] == OPT_IN
    assert providers.dispatch("cpu") is providers.CPU
    with ops.use_provider("triton"):
        assert providers.dispatch("cpu") is providers.TRITON


def test_without_triton_the_reason_says_what_to_install(triton):
    triton(installed=False, interpreted=True)
    for device in ("cpu", "cuda"):
        assert providers.reasons(device)["triton"] == NOT_INSTALLED
        with ops.use_provider("triton"), pytest.raises(NotImplementedError) as refusal:
            providers.dispatch(device)
        assert str(refusal.value) == NOT_INSTALLED


def test_a_named_provider_that_cannot_run_is_never_replaced_by_another(triton):
    triton(installed=True, interpreted=False)
    x = torch.zeros(1, 1, 2)
    with (
        ops.use_provider("triton"),
        pytest.raises(NotImplementedError, match="merge_attention: triton runs on the CPU only"),
    ):
        ops.merge_attention(x, x[..., 0], x, x[..., 0])


def test_reasons_name_the_provider_in_use():
    with ops.use_provider("reference"):
        found = providers.reasons("cpu")
    assert found.pop("reference") is None
    assert list(found) == ["cpu", "triton", "flashinfer", "flash_mla", "deep_gemm"]
    for name, reason in found.items():
        assert reason == f"{name} is not reference, the provider in use"


def test_each_provider_says_how_its_library_is_had(monkeypatch):
    monkeypatch.setattr(libraries, "installed", lambda library: False)
    reasons = providers.reasons("cuda")
    assert reasons["flashinfer"].endswith("not installed: pip install 'dsafx[flashinfer]'")
    assert reasons["deep_gemm"].endswith("not installed: it is built from its own source")


def test_a_library_without_a_distribution_has_an_unknown_version():
    assert libraries.version("pytest") == pytest.__version__
    assert libraries.version("no_such_library") == "unknown"


def test_an_unknown_provider_is_refused_with_the_names_of_all():
    with (
        pytest.raises(ValueError, match="flash_mla, deep_gemm, reference, got 'cutlass'"),
        ops.use_provider("cutlass"),
    ):
        pass


def test_the_package_and_its_dispatch_need_no_triton():
    code = """
        import sys
        sys.modules["triton"] = None
        import torch
        from dsafx import ops
        from dsafx.ops import providers
        print(providers.reasons("cuda")["triton"])
        x = torch.zeros(1, 1, 2)
        ops.merge_attention(x, x[..., 0], x, x[..., 0])
        print(*[name for name in sys.modules if name.startswith("dsafx.ops.triton")])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{NOT_INSTALLED}\n\n"
