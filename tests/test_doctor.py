"""``dsafx doctor``: versions, devices and providers, what is missing, and an exit code."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

from dsafx import _doctor
from dsafx._commands import app
from dsafx._doctor_libraries import LIBRARIES
from dsafx.ops import _self_test, _verdicts, libraries, providers
from dsafx.ops._verdicts import Verdict
from dsafx.ops.levels import LEVELS, Level

PROJECT = Path(__file__).parent.parent / "pyproject.toml"


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What is installed, by import name; other libraries are absent."""
    found: dict[str, str] = {"transformers": "5.24.0"}
    names = {name: library.name for library in LIBRARIES for name in library.distributions}
    monkeypatch.setattr(libraries, "installed", lambda name: name in found)

    def version(distribution: str) -> str:
        said = found.get(names[distribution], "")
        if not said:
            raise libraries.importlib.metadata.PackageNotFoundError(distribution)
        return said

    monkeypatch.setattr(libraries.importlib.metadata, "version", version)
    return found


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def status(report: _doctor.Report) -> dict[str, str]:
    return {each.name: each.status for each in report.libraries}


def test_the_supported_ranges_are_those_of_the_project():
    if not PROJECT.exists():
        pytest.skip("runs from the repository")
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = project["optional-dependencies"].values()
    given = [*project["dependencies"], *(each for extra in extras for each in extra)]
    wanted = {r.name: r.specifier for r in map(Requirement, given) if r.specifier}
    wanted["python"] = SpecifierSet(project["requires-python"])
    for library in LIBRARIES:
        for name in ("python",) if library.name == "python" else library.distributions:
            if name in wanted:
                assert SpecifierSet(library.supported) == wanted[name], name


def test_a_machine_without_kernel_libraries_is_well_and_told_what_they_would_give(versions):
    report = _doctor.examine()
    assert report.ok
    assert status(report) == {
        "python": "ok",
        "torch": "ok",
        "triton": "missing",
        "transformers": "ok",
        "flashinfer": "missing",
        "deep_gemm": "missing",
        "flash_mla": "missing",
    }
    text = str(report)
    assert "- without triton, calls on cuda run on the reference, which takes many launches" in text
    assert text.endswith("All that this machine can use works.")
    cpu = next(each for each in report.providers if each.provider == "cpu")
    assert (cpu.device, cpu.available, cpu.chosen, cpu.passed) == ("cpu", True, True, True)
    assert cpu.self_test == "passed, 6 of 10 ops tried"
    triton = next(each for each in report.providers if each.provider == "triton")
    assert (triton.available, triton.self_test) == (False, "not run")
    assert triton.reason.startswith("triton needs triton, which is not installed")


@pytest.mark.parametrize(
    ("library", "version", "expected"),
    [
        ("triton", "3.6.0", "ok"),
        ("triton", "3.9.1+cu130", "ok"),
        ("triton", "3.10.0", "outside"),
        ("triton", "3.5.1", "outside"),
        ("flashinfer", "0.6.18.post1", "ok"),
        ("flashinfer", "0.7.4", "ok"),
        ("flashinfer", "0.8.0rc1", "outside"),
        ("flashinfer", "0.6.17", "outside"),
        ("transformers", "5.23.0", "outside"),
        ("transformers", "6.0.0", "ok"),
        ("deep_gemm", "2.1.0+local", "ok"),
        ("flash_mla", "", "unknown"),
    ],
)
def test_versions_are_compared_with_the_supported_range(versions, library, version, expected):
    versions[library] = version
    report = _doctor.examine(self_test=False)
    assert status(report)[library] == expected
    assert report.ok == (expected != "outside")


def test_what_is_outside_of_its_range_ends_with_status_1_and_is_named(versions):
    versions["triton"] = "3.12.0"
    code, text = run("--no-self-test")
    assert code == 1
    assert "- triton 3.12.0 is outside of what is supported, >=3.6,<3.10" in text
    assert text.rstrip().endswith("is outside of its range or fails its self-test.")


def test_a_failed_self_test_ends_with_status_1_and_shows_its_reason(versions, monkeypatch):
    wrong = Verdict(("sparse_mqa",), {}, "sparse_mqa: the output is off by 1e+03 times")
    monkeypatch.setattr(_self_test, "verdict", lambda provider, device: wrong)
    code, text = run()
    assert code == 1
    assert "failed: sparse_mqa: the output is off by 1e+03 times" in text
    assert run("--no-self-test")[0] == 0


def test_a_provider_that_refuses_every_op_is_not_said_to_compute(versions, monkeypatch):
    refused = Verdict((), {"sparse_mqa": "flashinfer-python must be newer"}, None)
    monkeypatch.setattr(_self_test, "verdict", lambda provider, device: refused)
    report = _doctor.examine()
    cpu = next(each for each in report.providers if each.provider == "cpu")
    assert (cpu.chosen, cpu.self_test) == (False, "passed, 0 of 1 ops tried")
    assert cpu.reason == "no op can be tried, for flashinfer-python must be newer"


def test_json_holds_the_whole_report(versions):
    code, text = run("--json", "--no-self-test")
    found = json.loads(text)
    assert (code, found["ok"]) == (0, True)
    assert {each["name"] for each in found["libraries"]} == {each.name for each in LIBRARIES}
    assert found["devices"][0]["device"] == "cpu"
    assert {each["provider"] for each in found["providers"]} == {
        each.name for each in providers.PROVIDERS
    }


def test_a_driver_that_raises_is_reported_and_not_raised(versions, monkeypatch):
    def broken(*args: object) -> object:
        raise RuntimeError("CUDA driver initialization failed")

    for name in ("is_available", "device_count", "get_device_capability", "get_device_name"):
        monkeypatch.setattr(torch.cuda, name, broken)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    report = _doctor.examine(self_test=False)
    assert report.no_cuda == "torch.cuda raised RuntimeError: CUDA driver initialization failed"
    assert report.ok
    assert "no CUDA device: torch.cuda raised RuntimeError" in str(report)


def test_each_cuda_device_gets_its_own_line_and_verdict(versions, monkeypatch):
    versions["triton"] = "3.9.0"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, index))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    asked = []

    def verdict(provider: providers.Provider, device: torch.device) -> Verdict:
        asked.append((provider.name, str(device)))
        return Verdict(("rope",), {}, None)

    monkeypatch.setattr(_self_test, "verdict", verdict)
    report = _doctor.examine()
    assert [each.device for each in report.devices] == ["cpu", "cuda:0", "cuda:1"]
    assert report.no_cuda is None
    assert {("triton", "cuda:0"), ("triton", "cuda:1"), ("cpu", "cpu")} <= set(asked)
    assert "GPU 1, sm 9.1" in str(report)
    lost = next(each.note for each in report.libraries if each.name == "flashinfer")
    assert "nothing here" not in lost


def test_a_compiler_that_is_missing_or_refuses_costs_speed_and_says_so(
    versions, monkeypatch, tmp_path
):
    monkeypatch.setenv("CXX", "no-such-compiler")
    report = _doctor.examine(self_test=False)
    assert (report.compiler.status, report.ok) == ("missing", True)
    assert report.compiler.note.startswith("without a C++ compiler, attention in float32")
    refuses = tmp_path / "c++"
    refuses.write_text("#!/bin/sh\necho 'error: no space' >&2\nexit 1\n")
    refuses.chmod(0o755)
    monkeypatch.setenv("CXX", str(refuses))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    report = _doctor.examine()
    assert (report.compiler.status, report.ok) == ("outside", False)
    assert "error: no space" in report.compiler.note


def test_every_provider_has_a_level_that_says_how_far_it_was_checked():
    assert {each.name for each in providers.PROVIDERS} <= set(LEVELS)
    level = Level(compiled=(90, 100), interpreted=True)
    assert str(level) == "compiled for sm_90, sm_100; interpreted; ran on no device yet"
    assert str(replace(level, ran=("H200",))).endswith("; ran on H200")


def test_the_doctor_keeps_no_verdict_that_it_was_told_not_to_look_for(versions, monkeypatch):
    monkeypatch.setattr(_verdicts, "_verdicts", {})
    _doctor.examine(self_test=False)
    assert _verdicts.known("cpu", "cpu") is None
