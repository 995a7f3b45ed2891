"""The pipeline as a whole: what a layer's graph becomes, and what its cache key covers."""

from __future__ import annotations

import operator
from pathlib import Path

import pytest
import torch
from _graphs import op_names, run_pipeline, spec_of, text, trace, trace_layer, wrapped
from expecttest import assert_expected_inline
from torch import Tensor

from dsafx import ops
from dsafx.ops import providers
from dsafx.passes import graph_text
from dsafx.passes import pipeline as pipeline_module
from dsafx.passes._report import PassOptions
from dsafx.passes.pipeline import Pipeline, source_digest


def test_a_short_layer_has_no_scoring_left_and_keeps_its_index_key():
    graph = trace_layer(9)
    report = run_pipeline(graph, fuse="always")
    assert op_names(graph) == ["norm_rope_index", "dense_mha"]
    assert graph.output_node().args[0][1].target is operator.getitem
    assert_expected_inline(
        "\n".join(wrapped(line) for line in str(report).splitlines()),
        """\
resolve_route: 1 rewritten; mla_attention became dense MHA: no row sees more keys than the
    dense limit, and expanding them costs less
close_selection: 0 rewritten; index_select removed: nothing reads it
fuse_norm_rope: 1 rewritten; rope became part of norm_rope_index
fuse_index_query: 0 rewritten
fuse_cache_write: 0 rewritten
lower: 1 rewritten
verify: 4 proved""",
    )


def test_a_long_layer_is_scored():
    graph = trace_layer(40)
    run_pipeline(graph)
    assert op_names(graph) == ["index_select", "masked_mha"]


def test_an_undecided_layer_keeps_its_routed_op_and_its_selection():
    graph = trace_layer(9, symbolic=True)
    run_pipeline(graph, specialize="never")
    assert op_names(graph) == ["index_select", "mla_attention"]


def test_a_layer_that_declares_nothing_reads_a_closed_selection_when_short():
    graph = trace_layer(9, spec=spec_of(dense=False, masked=False))
    run_pipeline(graph)
    assert op_names(graph) == ["causal_positions", "sparse_mla"]


def test_the_short_graph_is_that_of_a_layer_written_with_the_final_ops():
    graph = trace_layer(9)
    run_pipeline(graph, fuse="always")
    again = graph_text(graph)
    run_pipeline(graph, fuse="always")
    assert graph_text(graph) == again


def test_a_graph_without_our_ops_is_not_touched():
    def plain(x: Tensor) -> Tensor:
        return torch.relu(x) + 1

    graph = trace(plain, torch.randn(3))
    before = text(graph)
    Pipeline(PassOptions(), passes=())(graph, True)
    assert text(graph) == before


def test_symbols_print_in_order_of_appearance():
    def product(x: Tensor, y: Tensor) -> Tensor:
        return torch.mm(x, y)

    graph = trace(product, torch.randn(5, 7), torch.randn(7, 11), symbolic=True)
    assert graph_text(graph, shapes=True) == (
        "inputs: arg0_1: f32[s0, s1], arg1_1: f32[s1, s2]\n"
        "mm: aten.mm(arg0_1, arg1_1) -> f32[s0, s2]\n"
        "output: mm"
    )


@pytest.mark.parametrize(
    "changed", [{"specialize": "never"}, {"fuse": "always"}, {"fuse": "never"}, {"strict": True}]
)
def test_every_option_changes_the_uuid(changed: dict[str, object]):
    assert Pipeline(PassOptions(**changed)).uuid() != Pipeline(PassOptions()).uuid()


def test_the_uuid_is_stable_and_follows_the_dispatch_and_the_workspace():
    plain = Pipeline(PassOptions()).uuid()
    assert Pipeline(PassOptions()).uuid() == plain
    with ops.options(workspace_bytes=1 << 20):
        assert Pipeline(PassOptions()).uuid() != plain
    with ops.use_provider("reference"):
        assert Pipeline(PassOptions()).uuid() != plain


def test_the_uuid_follows_what_a_provider_declares(monkeypatch: pytest.MonkeyPatch):
    plain = Pipeline(PassOptions()).uuid()
    fused = providers.replace(providers.REFERENCE, fused=frozenset({"norm_rope"}))
    monkeypatch.setattr(providers, "PROVIDERS", (fused,))
    assert Pipeline(PassOptions()).uuid() != plain


def test_the_digest_covers_every_source_file_of_the_package(monkeypatch: pytest.MonkeyPatch):
    read: list[str] = []
    original = Path.read_bytes

    def recorded(path: Path) -> bytes:
        read.append(path.as_posix())
        return original(path)

    monkeypatch.setattr(Path, "read_bytes", recorded)
    assert len(source_digest.__wrapped__()) == 64
    names = ("ops/routing.py", "ops/rope.py", "passes/verify.py", "fusion/norm_rope.py")
    for name in (*names, "models/config.py", "dsafx/_backend.py"):
        assert any(path.endswith(name) for path in read), name


def test_a_changed_source_file_changes_the_uuid(monkeypatch: pytest.MonkeyPatch):
    plain = Pipeline(PassOptions()).uuid()
    original = Path.read_bytes

    def changed(path: Path) -> bytes:
        body = original(path)
        return body + b"\n" if path.name == "_cost.py" else body

    monkeypatch.setattr(Path, "read_bytes", changed)
    monkeypatch.setattr(pipeline_module, "source_digest", source_digest.__wrapped__)
    assert Pipeline(PassOptions()).uuid() != plain


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"specialize": "guard"}, "specialize must be one of auto, never, got 'guard'"),
        ({"fuse": "on"}, "fuse must be one of auto, always, never, got 'on'"),
    ],
)
def test_an_option_that_is_not_accepted_is_named(options: dict[str, str], error: str):
    with pytest.raises(ValueError, match=error):
        PassOptions(**options)
