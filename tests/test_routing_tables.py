"""The generated tables, and what a reader must find in them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from dsafx import routing

DOCUMENT = Path(__file__).parents[1] / "docs" / "routing.md"
ROUTING_FILES = [
    "_backends",
    "_capabilities",
    "_cost",
    "_decide",
    "_route_spec",
    "_route_types",
    "_schedule",
    "_truth_table",
    "routing",
]


def rows_of(case: str) -> list[list[str]]:
    lines = [line.strip("| ").split("|") for line in routing.truth_table().splitlines()]
    cells = [[cell.strip() for cell in line] for line in lines]
    return [line[1:5] for line in cells if line[0] == case]


@pytest.mark.skipif(not DOCUMENT.exists(), reason="the documentation is not installed")
def test_the_documentation_is_what_the_code_answers():
    assert DOCUMENT.read_text(encoding="utf-8") == routing.document()


def test_the_document_holds_the_truth_table_and_every_known_backend():
    text = routing.document()
    assert routing.truth_table() in text
    for row in routing.known_backends():
        assert any(
            row.name in line and row.hardware in line and row.reason in line
            for line in text.splitlines()
        )


def test_the_table_shows_a_layer_that_declares_nothing_though_its_base_declares_dense():
    assert rows_of("layer declares nothing, its base declares dense") == [
        ["97", "97", "top-k MQA", "closed"],
        ["2048", "2048", "top-k MQA", "closed"],
        ["2049", "2049", "top-k MQA", "scored"],
        ["9000", "1", "top-k MQA", "scored"],
    ]


def test_the_table_shows_sm120_at_its_four_lengths():
    assert rows_of("FlashInfer SM120: kernels declare nothing") == [
        ["127", "127", "top-k MQA", "closed"],
        ["128", "128", "top-k MQA", "closed"],
        ["129", "129", "top-k MQA", "closed"],
        ["3300", "3300", "top-k MQA", "scored"],
    ]


def test_the_table_shows_a_short_prefill_that_scores_nothing():
    assert rows_of("fresh prefill")[:2] == [
        ["1024", "1024", "dense MHA", "none"],
        ["2048", "2048", "dense MHA", "none"],
    ]
    assert rows_of("another consumer reads the selection")[0][2:] == ["dense MHA", "closed"]


@pytest.mark.parametrize("name", ROUTING_FILES)
def test_routing_does_not_import_torch(name: str):
    path = Path(routing.__file__).with_name(f"{name}.py")
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")[0]
            imported.add(f".{module}" if node.level else module)
    own = {f".{file}" for file in ROUTING_FILES}
    standard = {"__future__", "collections", "dataclasses", "enum", "functools", "operator"}
    assert imported <= own | standard | {"typing"}
