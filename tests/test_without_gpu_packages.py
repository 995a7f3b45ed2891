"""On a machine without kernel libraries and with a driver that raises, everything else works."""

from __future__ import annotations

import subprocess
import sys
import textwrap

BLOCKED = ("triton", "flashinfer", "deep_gemm", "flash_mla")
START = f"""
    import sys
    blocked = {BLOCKED!r}
    for name in blocked:
        sys.modules[name] = None
    import torch

    def refuse(*args, **kwargs):
        raise RuntimeError("CUDA driver initialization failed")

    for name in ("init", "_lazy_init", "is_available", "device_count", "current_device",
                 "get_device_capability", "get_device_properties", "get_device_name",
                 "synchronize", "is_current_stream_capturing", "current_stream"):
        setattr(torch.cuda, name, refuse)
"""


def run(code: str, expected: int = 0) -> str:
    """The output of ``code`` in a new process, after what stands above."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(START) + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == expected, result.stderr
    return result.stdout


def test_the_package_imports_and_loads_none_of_them():
    out = run(
        """
        import dsafx
        from dsafx import ops, routing
        print(*(name for name in blocked if sys.modules[name] is not None))
        print(sorted(dsafx.__all__) == dir(dsafx))
        """
    )
    assert out.split() == ["True"]


def test_ops_run_on_the_cpu_and_the_providers_of_gpus_say_what_they_lack():
    out = run(
        """
        from dsafx import ops
        from dsafx.ops import providers
        torch.manual_seed(0)
        q, k, weights = torch.randn(6, 8, 32), torch.randn(6, 32), torch.randn(6, 8)
        ks, ke = torch.zeros(6, dtype=torch.int32), torch.arange(1, 7, dtype=torch.int32)
        indices = ops.index_select(q, k, weights, ks, ke, 6, 3)
        ops.check_indices(indices, ks, ke, 3)
        with ops.use_provider("reference"):
            print(torch.equal(indices, ops.index_select(q, k, weights, ks, ke, 6, 3)))
        print(providers.dispatch("cpu").name, providers.dispatch("cuda").name)
        for name, reason in providers.reasons("cuda").items():
            print(name, "|", reason)
        """
    )
    same, dispatched, *reasons = out.splitlines()
    assert (same, dispatched) == ("True", "cpu reference")
    assert "triton | triton needs triton, which is not installed" in "\n".join(reasons)
    assert reasons[-1] == "reference | None"


def test_naming_the_triton_provider_says_what_to_install():
    out = run(
        """
        from dsafx import ops
        try:
            with ops.use_provider("triton"):
                ops.rms_norm(torch.ones(1, 4), torch.ones(4), 1e-6)
        except NotImplementedError as error:
            print(error)
        """
    )
    assert "triton needs triton, which is not installed: pip install 'dsafx[triton]'" in out


def test_the_doctor_says_what_is_missing_and_what_that_costs():
    out = run(
        """
        from dsafx import _doctor
        torch.version.cuda = "13.0"
        report = _doctor.examine()
        print(report)
        sys.exit(0 if report.ok else 1)
        """
    )
    assert (
        "no CUDA device: torch.cuda raised RuntimeError: CUDA driver initialization failed" in out
    )
    for library in BLOCKED:
        assert f"- without {library}, " in out
    assert "calls on cuda run on the reference" in out
    assert "All that this machine can use works." in out
