"""Several models, threads and copies in one process, each with its own graphs and reports."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _select import LONG, SHORT, SHORT_TOO, TOPK, Select, check, tokens
from _uncompiled import passes_only

from dsafx.passes import _torch_compat as compat
from dsafx.passes import collect


@torch.no_grad()
def test_models_in_one_process_keep_their_own_graphs_and_options():
    narrow, wide = Select(TOPK), Select(2 * LONG)
    forms = {"index_select": narrow, "causal_positions": wide}
    runs = {
        "index_select": torch.compile(narrow, backend=passes_only),
        "causal_positions": torch.compile(wide, backend=passes_only, options={"strict": True}),
    }
    theirs = torch.compile(wide, backend="aot_eager")
    for name, run in runs.items():
        with collect() as reports:
            check(run, forms[name], LONG)
            check(theirs, wide, LONG)
        assert [f"dsafx.{name}(" in report.after for report in reports] == [True]


def in_threads(*works: Callable[[], None]) -> None:
    """Run all at once, and raise what one of them raised."""
    barrier, raised = threading.Barrier(len(works)), []

    def run(work: Callable[[], None]) -> None:
        barrier.wait()
        try:
            work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in raised:
        raise error


def calling(run: Callable[..., Any], model: Select, *lengths: int) -> Callable[[], None]:
    """Checked calls whose inputs are made now, since threads share the generator."""
    calls = [tokens(length) for length in lengths]
    expected = [model(*args) for args in calls]

    def call() -> None:
        with torch.no_grad():
            for args, result in zip(calls, expected, strict=True):
                assert torch.equal(run(*args), result)

    return call


# Threads that compile at once crash there, or change what later graphs hold, under any backend.
THREADS = pytest.mark.skipif(
    compat._VERSION < (2, 12), reason="torch 2.11 cannot compile in several threads at once"
)


@THREADS
def test_threads_that_compile_different_models_gather_their_own_reports():
    widths = {TOPK: "index_select", 2 * LONG: "causal_positions"}
    found: dict[int, list[bool]] = {}

    def work(topk: int) -> Callable[[], None]:
        model = Select(topk)
        call = calling(torch.compile(model, backend=passes_only, dynamic=True), model, LONG, LONG)

        def compile_and_call() -> None:
            with collect() as reports:
                call()
            found[topk] = [f"dsafx.{widths[topk]}(" in report.after for report in reports]

        return compile_and_call

    with collect() as outside:
        in_threads(*(work(topk) for topk in widths))
    assert found == {topk: [True] for topk in widths}
    assert outside == []


@THREADS
def test_one_compiled_function_is_right_in_several_threads_at_once():
    model = Select()
    run = torch.compile(model, backend=passes_only, dynamic=True)
    orders = [(SHORT, LONG, SHORT_TOO), (LONG, SHORT_TOO), (SHORT_TOO, SHORT, LONG + 3)]
    in_threads(*(calling(run, model, *lengths) for lengths in orders))


@torch.no_grad()
@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_copy_of_a_compiled_model_gives_the_same_numbers(pickled: bool, in_place: bool):
    """A copy of what ``torch.compile`` returned compiles anew; one of ``compile()`` runs eager."""
    model = Select()
    compiled: Any = Select()
    if in_place:
        compiled.compile(backend=passes_only, dynamic=True)
    else:
        compiled = torch.compile(compiled, backend=passes_only, dynamic=True)
    check(compiled, model, SHORT)
    torch._dynamo.reset()
    again = pickle.loads(pickle.dumps(compiled)) if pickled else copy.deepcopy(compiled)
    with collect() as reports:
        check(again, model, SHORT, LONG)
    assert len(reports) == (0 if in_place else 2)
