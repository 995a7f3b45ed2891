"""``dsafx.debug``, the logs of the passes, and the page that explains both."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import depyf
import pytest
import torch
from _graphs import Layer, op_names, prompt, trace_layer
from _uncompiled import passes_only
from expecttest import assert_expected_inline
from torch import fx
from torch._dynamo.utils import counters

import dsafx
from dsafx import routing
from dsafx.passes import PassReport, _log
from dsafx.passes import _torch_compat as compat
from dsafx.passes._report import PassContext, PassOptions
from dsafx.passes.pipeline import Pipeline
from dsafx.passes.resolve_route import resolve_route_pass
from dsafx.passes.verify import verify_pass

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


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the passes logged, among all that torch logs."""
    return [text for name, _, text in caplog.record_tuples if name.startswith("dsafx.")]


def swapping_pass(graph: fx.Graph, context: PassContext) -> PassReport:
    """A pass that makes the outputs change places, without a node added or removed."""
    output = graph.output_node()
    output.args = (list(reversed(output.args[0])),)
    return PassReport("swapping", matched=1)


def unsure_pass(graph: fx.Graph, context: PassContext) -> PassReport:
    report = PassReport("verify")
    report.decline(graph.output_node(), "is not what it was")
    return report


def idle_pass(graph: fx.Graph, context: PassContext) -> PassReport:
    return PassReport("idle")


def failing_pass(graph: fx.Graph, context: PassContext) -> PassReport:
    raise ZeroDivisionError("in a pass")


def test_the_graph_log_numbers_passes_and_shows_those_that_changed_something(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.DEBUG, "dsafx.passes.graphs")
    Pipeline(PassOptions(), (idle_pass, resolve_route_pass, idle_pass, verify_pass))(
        trace_layer(40), True
    )
    before, after = logged(caplog)
    assert before.startswith("graph -, post_grad.00_before\ninputs: ")
    assert after.startswith("graph -, post_grad.02_after_resolve_route\ninputs: ")
    assert "\nmasked_mha: dsafx.masked_mha(" in after


def called_in(text: str) -> list[str]:
    """The calls of a graph's text; the nodes of a graph that was put back have other names."""
    return re.findall(r": (\w+\.\w+)\(", text)


def test_a_graph_that_is_put_back_is_shown_as_it_came(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "dsafx.passes")
    pipeline = Pipeline(PassOptions(), passes=(swapping_pass, unsure_pass))
    with pytest.warns(UserWarning, match="compiles the graph as it came"):
        pipeline(trace_layer(9), True)
    first, _, last, report = logged(caplog)
    assert last.startswith("graph -, post_grad.03_after_put_back\n")
    assert called_in(last) == called_in(first)
    assert_expected_inline(
        report,
        """\
graph -, post_grad, inference
swapping: 1 rewritten
verify: 0 rewritten
    output declined: is not what it was
put back as it came: output is not what it was""",
    )


def test_the_report_is_told_where_a_pass_raises(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "dsafx.passes.report")
    pipeline = Pipeline(PassOptions(), passes=(resolve_route_pass, failing_pass))
    with pytest.raises(ZeroDivisionError):
        pipeline(trace_layer(9), False)
    (told,) = logged(caplog)
    assert told.startswith("graph -, post_grad, training\nresolve_route: 1 rewritten\n")


def test_no_text_is_made_where_nobody_reads(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **kwargs: object) -> str:
        raise AssertionError("nobody reads this")

    monkeypatch.setattr(_log, "graph_text", refuse)
    monkeypatch.setattr(_log, "report_text", refuse)
    graph = trace_layer(9)
    Pipeline(PassOptions())(graph, True)
    assert op_names(graph) == ["dense_mha"]


def test_a_cache_hit_is_noted_in_the_log(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "dsafx.passes.report")
    with _log.noting_cache_hits():
        pass
    assert logged(caplog) == []
    with _log.noting_cache_hits():
        counters["aot_autograd"]["autograd_cache_hit"] += 1
    assert logged(caplog) == ["graph - came from Inductor's cache: no pass ran"]


@pytest.fixture
def fresh_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """``DSAFX_LOGS`` as not read yet; loggers are put back as they were."""
    before = [
        (log, log.level, log.propagate, list(log.handlers)) for log in (_log.REPORT, _log.GRAPHS)
    ]
    _log.follow_environment.cache_clear()
    yield monkeypatch
    _log.follow_environment.cache_clear()
    for log, level, propagate, handlers in before:
        log.setLevel(level)
        log.propagate, log.handlers = propagate, handlers


def test_an_unknown_log_is_answered_with_the_known_ones(fresh_environment: pytest.MonkeyPatch):
    fresh_environment.setenv("DSAFX_LOGS", "report,graph")
    with pytest.raises(ValueError, match=r"accepts report, graphs, .* got 'graph'$"):
        dsafx.inductor_options()
    assert not _log.REPORT.handlers


def test_the_environment_is_read_once(fresh_environment: pytest.MonkeyPatch):
    fresh_environment.setenv("DSAFX_LOGS", " report,, report ")
    dsafx.inductor_options()
    fresh_environment.setenv("DSAFX_LOGS", "graphs")
    dsafx.inductor_options()
    assert [handler.level for handler in _log.REPORT.handlers] == [logging.NOTSET]
    assert (_log.REPORT.level, _log.REPORT.propagate) == (logging.INFO, False)
    assert not _log.GRAPHS.handlers


def test_without_the_variable_the_loggers_are_left_alone(fresh_environment: pytest.MonkeyPatch):
    fresh_environment.delenv("DSAFX_LOGS", raising=False)
    dsafx.inductor_options()
    for log in (_log.REPORT, _log.GRAPHS):
        assert (log.level, log.propagate, log.handlers) == (logging.NOTSET, True, [])


@pytest.mark.parametrize(
    ("setting", "heard"), [("dsafx", ["report"]), ("+dsafx", ["report", "graphs"])]
)
def test_the_logs_are_among_torch_s_own(setting: str, heard: list[str]):
    code = (
        "from dsafx.passes import _log\n"
        "_log.REPORT.info('the report')\n"
        "_log.GRAPHS.debug('the graphs')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCH_LOGS": setting},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"\] the (\w+)$", done.stderr, re.MULTILINE) == heard
