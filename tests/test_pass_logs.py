"""The logs of the passes, and ``DSAFX_LOGS``."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from _graphs import op_names, trace_layer
from expecttest import assert_expected_inline
from torch import fx
from torch._dynamo.utils import counters

import dsafx
from dsafx.passes import PassReport, _log
from dsafx.passes._report import PassContext, PassOptions
from dsafx.passes.pipeline import Pipeline
from dsafx.passes.resolve_route import resolve_route_pass
from dsafx.passes.verify import verify_pass


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
