"""The demo: what it measures, what its tables say, and the whole of it once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from dsafx import routing
from dsafx._demo_measure import Measured, measure
from dsafx._demo_tables import Run, agrees, measurements, rewrites, routes
from dsafx.models._record import LayerRecord
from dsafx.passes import PassReport, PipelineReport


def finished(*tokens: int, way: str = "transformers", decisions=(), reports=()) -> Run:
    call = Measured(list(tokens), seconds=0.25, peak_bytes=3 << 20)
    return Run(way, way == "dsafx compiled", 96, call, call, decisions, reports)


def decided(layer: int, tokens: int, keys: int, selection: routing.Selection) -> LayerRecord:
    decision = routing.Decision(routing.Route.SPARSE_MQA, selection, routing.Reason.SPARSE_CHEAPER)
    return LayerRecord(layer, decision, "reference", tokens, keys)


def printed(*parts: object) -> str:
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(*parts, sep="\n")
    return console.export_text()


def test_the_peak_of_a_call_is_what_it_allocated_at_most():
    measured = measure(lambda: torch.ones(64 << 18).sum().item())
    assert measured.value == 64 << 18
    if sys.platform == "linux":
        assert 60 << 20 < measured.peak_bytes < 128 << 20


def test_one_differing_token_is_seen_and_said():
    plain, other = finished(5, 6, 7), finished(5, 6, 8, way="dsafx eager")
    assert agrees(plain, [plain, other])
    assert not agrees(other, [plain, other])
    text = printed(measurements([plain, other]))
    assert "equal" in text
    assert "DIFFERENT" in text


def test_decode_steps_that_decided_alike_share_a_table_and_others_get_their_own():
    closed, scored = routing.Selection.CLOSED, routing.Selection.SCORED
    steps = [(96, 96, closed), (1, 97, closed), (1, 98, closed), (1, 99, scored)]
    decisions = [
        decided(layer, tokens, keys, selection)
        for tokens, keys, selection in steps
        for layer in (0, 1)
    ]
    tables = list(routes(finished(1, decisions=decisions), ("full", "shared")))
    assert [table.title for table in tables] == [
        "prefill of 96 tokens",
        "decode over 97 to 98 keys",
        "decode over 99 keys",
    ]
    text = printed(tables[2])
    assert "shared" in text
    assert "scored" in text
    assert routing.Reason.SPARSE_CHEAPER.value in text


def test_nodes_with_one_fate_share_a_line_and_equal_graphs_are_shown_once():
    def report() -> PipelineReport:
        closing = PassReport("close_selection", matched=1)
        closing.decline(torch.fx.Graph().placeholder("a"), "has a mask operand")
        closing.decline(torch.fx.Graph().placeholder("b"), "has a mask operand")
        return PipelineReport([closing])

    run = finished(1, way="dsafx compiled", reports=[report(), report()])
    assert [text.plain for text in rewrites(run)] == [
        "graphs 1 to 2 of 2\n"
        "  close_selection: 1 rewritten\n"
        "    a, b declined: has a mask operand\n"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm", "deepseek"])
def test_the_demo_ends_with_equal_tokens_and_keeps_the_checkpoint(family: str, tmp_path: Path):
    command = [sys.executable, "-m", "dsafx", "demo", "--family", family, "--new-tokens", "4"]
    result = subprocess.run(
        [*command, "--keep", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "All tokens are equal" in result.stdout
    assert "DIFFERENT" not in result.stdout
    assert "close_selection: " in result.stdout
    assert (tmp_path / family / "model.safetensors").exists()
