"""The command line, run as a user runs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dsafx import __version__, routing


def run(*arguments: str, block: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``dsafx`` in a new process, with the module ``block`` made missing."""
    start = f"sys.modules[{block!r}] = None; " if block else ""
    code = f"import sys; {start}from dsafx._cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_help_names_every_command_and_what_it_is_for():
    result = run("--help")
    assert result.returncode == 0
    assert "demo" in result.stdout
    assert "routes" in result.stdout


def test_the_version_is_the_package_s():
    assert run("--version").stdout == f"dsafx {__version__}\n"


def test_routes_prints_the_truth_table_and_then_the_known_backends():
    result = run("routes")
    assert result.returncode == 0, result.stderr
    expected = f"{routing.truth_table()}\n\n{routing.backend_table()}\n"
    assert result.stdout == expected
    assert "FlashInfer sparse MLA" in routing.backend_table()


def test_routes_can_print_one_table_alone():
    assert run("routes", "--only", "truth").stdout == f"{routing.truth_table()}\n"
    assert run("routes", "--only", "backends").stdout == f"{routing.backend_table()}\n"


def test_an_unknown_table_is_refused_by_name():
    result = run("routes", "--only", "weather")
    assert result.returncode == 2
    assert "weather" in result.stderr


def test_without_the_cli_extra_the_command_names_what_to_install():
    result = run("routes", block="typer")
    assert result.returncode == 1
    assert result.stderr == "the dsafx command needs typer: pip install 'dsafx[cli]'\n"


@pytest.mark.parametrize("library", ["transformers", "rich"])
def test_without_its_libraries_the_demo_names_what_to_install(library: str):
    result = run("demo", block=library)
    assert result.returncode == 1
    assert result.stderr == (f"the demo needs {library}: pip install 'dsafx[cli,transformers]'\n")


def test_the_demo_refuses_an_unknown_family_by_name():
    result = run("demo", "--family", "llama")
    assert result.returncode == 2
    assert "llama" in result.stderr
