"""``dsafx.debug``, and the page that explains it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import depyf
import pytest
import torch
from _graphs import Layer, prompt
from _uncompiled import passes_only
from torch._dynamo.utils import counters

import dsafx
from dsafx import routing
from dsafx.passes import _log
from dsafx.passes import _torch_compat as compat

PAGE = Path(__file__).resolve().parents[1] / "docs" / "debugging.md"
needs_page = pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not installed")


@dataclass
class Page:
    """What the code of the page printed, block by block, what it logged, and what it left."""

    printed: list[str]
    logged: str
    folder: Path


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The page's code, run in one process of its own, with both logs on."""
    home = tmp_path_factory.mktemp("page")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (home / "page.py").write_text("print('<end>')\n".join(blocks), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=home,
        env={**os.environ, "DSAFX_LOGS": "report, graphs"},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Page(done.stdout.split("<end>\n"), done.stderr, home / "why_slow")


def shown_by_the_page() -> list[str]:
    """The output that the page shows behind each of its code blocks."""
    blocks = re.split(r"```python\n", PAGE.read_text(encoding="utf-8"))[1:]
    shown = [re.search(r"```\n\n```text\n(.*?)```", block, re.DOTALL) for block in blocks]
    return [found[1] if found else "" for found in shown]


@needs_page
def test_the_page_shows_what_its_code_prints(page: Page):
    assert [text.rstrip() for text in page.printed] == [
        text.rstrip() for text in shown_by_the_page()
    ]
    assert "".join(page.printed)


@needs_page
def test_the_page_explains_reasons_that_the_routing_gives():
    table = PAGE.read_text(encoding="utf-8").split("| reason | then |\n|---|---|\n")[1]
    explained = re.findall(r"^\| (.*?) \|", table.split("\n\n")[0], re.MULTILINE)
    assert len(explained) == 8
    assert set(explained) - {reason.value for reason in routing.Reason} == {
        "... is not faster than its parts",
        "put back as it came",
    }


@needs_page
def test_a_compile_leaves_its_bytecode_graphs_and_kernel(page: Page):
    names = {path.name for path in page.folder.iterdir()}
    assert {
        "report.txt",
        "full_code_for_attend_0.py",
        "__transformed_code_0_for_attend.py",
        "__compiled_fn_1.Forward_graph.0.py",
        "__compiled_fn_1.kernel_0.py",
    } <= names
    steps = sorted(name for name in names if ".dsafx.post_grad." in name)
    ops = [re.findall(r"ops\.dsafx\.(\w+)", (page.folder / name).read_text()) for name in steps]
    assert ops == [
        ["index_select", "mla_attention"],
        ["index_select", "sparse_mla"],
        ["causal_positions", "sparse_mla"],
    ]
    bytecode = (page.folder / "__transformed_code_0_for_attend.py").read_text()
    assert re.search(r"= __compiled_fn_1\w*\(", bytecode)


@needs_page
def test_the_environment_variable_sends_reports_and_graphs_to_stderr(page: Page):
    for section in report_in(page.folder).split("\n\n"):
        assert f"dsafx.passes.report: {section.partition('files:')[0]}" in page.logged
    assert page.logged.count("dsafx.passes.report: ") == 4
    assert "dsafx.passes.graphs: graph 0/0, post_grad.00_before\ninputs: " in page.logged
    assert (
        "dsafx.passes.graphs: graph 0/1, post_grad.01_after_resolve_route\ninputs: " in page.logged
    )


def compiled_layer() -> Callable[..., Any]:
    """A compiled layer that has not run yet."""
    return torch.compile(Layer().eval(), backend=passes_only, dynamic=False)


def report_in(folder: Path) -> str:
    return (folder / "report.txt").read_text(encoding="utf-8")


@torch.no_grad()
def test_what_was_compiled_before_the_block_is_compiled_again_in_it(tmp_path: Path):
    run, args = compiled_layer(), prompt(9)
    expected, _ = run(*args)
    with dsafx.debug(tmp_path) as folder:
        found, _ = run(*args)
    assert folder == tmp_path
    assert torch.equal(found, expected)
    report = re.sub(r"fn_\d+", "fn_N", report_in(tmp_path))
    before, after = report.split("\n\n")
    assert before == "graph 0/0, pre_grad\nrecognise: 0 rewritten\nfiles: __compiled_fn_N.*"
    assert after.startswith("graph 0/0, post_grad, inference\nresolve_route: 1 rewritten\n    mla")
    assert after.endswith("\nfiles: __compiled_fn_N.*\n")


@torch.no_grad()
def test_a_block_turns_the_caches_off_and_leaves_everything_as_it_was(tmp_path: Path):
    def watched() -> tuple[bool, bool, int]:
        off = torch.compiler.config.force_disable_caches
        return off, compat.depyf_is_watching(), len(_log._readers)

    assert watched() == (False, False, 0)
    with dsafx.debug(tmp_path):
        assert watched() == (True, True, 1)
    assert watched() == (False, False, 0)


def test_a_graph_of_another_thread_is_reported(tmp_path: Path):
    def compile_there() -> None:
        with torch.no_grad():
            compiled_layer()(*prompt(9))

    thread = threading.Thread(target=compile_there)
    with dsafx.debug(tmp_path):
        thread.start()
        thread.join()
    assert "mla_attention became dense MHA" in report_in(tmp_path)


@torch.no_grad()
def test_a_graph_without_our_ops_is_named_as_such(tmp_path: Path):
    with dsafx.debug(tmp_path):
        torch.compile(torch.relu, backend=passes_only)(torch.ones(3))
    assert (
        "graph 0/0, post_grad, inference\nno op of dsafx in it: left as it came\nfiles: "
        in report_in(tmp_path)
    )


def test_a_block_in_which_nothing_was_compiled_says_so(tmp_path: Path):
    with dsafx.debug(tmp_path):
        pass
    assert report_in(tmp_path) == (
        "No graph came to the passes of dsafx: nothing was compiled with them.\n"
    )


def test_a_graph_that_came_from_a_cache_is_not_passed_over_in_silence(tmp_path: Path):
    with dsafx.debug(tmp_path):
        counters["inductor"]["fxgraph_cache_hit"] += 1
    assert report_in(tmp_path) == "One graph or more came from a cache: no pass ran for them.\n"


@torch.no_grad()
def test_runs_do_not_mix(tmp_path: Path):
    run, args = compiled_layer(), prompt(9)
    folders = []
    for _ in range(3):
        with dsafx.debug(tmp_path / "new" / "deep") as folder:
            run(*args)
        folders.append(folder.relative_to(tmp_path).as_posix())
        assert len(list(folder.glob("*.post_grad.00_before.0.py"))) == 1
        assert report_in(folder).count(", post_grad, inference") == 1
    assert folders == ["new/deep", "new/deep/run_1", "new/deep/run_2"]


def test_a_folder_with_somebody_else_s_files_keeps_them_apart(tmp_path: Path):
    (tmp_path / "notes.md").write_text("mine")
    with dsafx.debug(str(tmp_path)) as folder:
        pass
    assert folder == tmp_path / "run_1"
    assert {path.name for path in tmp_path.iterdir()} == {"notes.md", "run_1"}


@torch.no_grad()
def test_what_was_written_before_an_error_stays_and_the_error_comes_through(tmp_path: Path):
    def compile_and_fail() -> None:
        compiled_layer()(*prompt(9))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), dsafx.debug(tmp_path):
        compile_and_fail()
    assert "mla_attention became dense MHA" in report_in(tmp_path)
    assert len(list(tmp_path.glob("*.dsafx.*"))) > 1
    assert list(tmp_path.glob("full_code_for_forward_*.py"))
    assert not compat.depyf_is_watching()


def test_blocks_cannot_be_nested(tmp_path: Path):
    inner = tmp_path / "inner"
    with dsafx.debug(tmp_path / "outer"):
        with pytest.raises(RuntimeError, match="cannot be nested"), dsafx.debug(inner):
            pass
        assert compat.depyf_is_watching()
    with (
        pytest.warns(UserWarning, match="debug `torch.compile`"),
        depyf.prepare_debug(str(tmp_path / "theirs")),
        pytest.raises(RuntimeError, match=r"depyf.prepare_debug is open"),
        dsafx.debug(inner),
    ):
        pass
    assert not inner.exists()
    with dsafx.debug(inner):
        pass


@pytest.mark.parametrize("folder", [3, None, b"bytes", ["a"]])
def test_a_folder_that_is_no_path_is_refused(folder: Any):
    message = re.escape(f"folder must be a str or a path of str, got {folder!r}")
    with pytest.raises(TypeError, match=message), dsafx.debug(folder):
        pass


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(NotADirectoryError, match="file is a file"), dsafx.debug(file):
        pass
    assert file.read_text() == "mine"
    assert not compat.depyf_is_watching()


def test_without_depyf_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "depyf", None)
    folder = tmp_path / "folder"
    with pytest.raises(ImportError, match=r"pip install 'dsafx\[debug\]'"), dsafx.debug(folder):
        pass
    assert not folder.exists()


@torch.no_grad()
def test_what_depyf_cannot_write_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*args: object) -> str:
        raise AssertionError("two graphs")

    monkeypatch.setattr("depyf.explain.dump_src", fail)
    with (
        pytest.warns(UserWarning, match="could not write all of its files: AssertionError: two"),
        dsafx.debug(tmp_path),
    ):
        compiled_layer()(*prompt(9))
    assert "mla_attention became dense MHA" in report_in(tmp_path)
    assert not compat.depyf_is_watching()
