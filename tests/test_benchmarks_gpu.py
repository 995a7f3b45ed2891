"""The GPU benchmark's dry run does what its real run does, on tiny CPU tensors."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace

import pytest
import torch
from _benchmarks import load

from dsafx import ops
from dsafx.ops.libraries import how_to_install, installed

pytest.importorskip("rich")
typer = pytest.importorskip("typer")

command, cases, checks, compare, machines, report, running, settings, steps = load(
    "gpu",
    "_gpu_cases",
    "_gpu_checks",
    "_gpu_compare",
    "_gpu_machine",
    "_gpu_report",
    "_gpu_run",
    "_gpu_setting",
    "_gpu_step",
)
GLM, DEEPSEEK = settings.Family
Case = settings.Case


def invoke(*options):
    from typer.testing import CliRunner

    app = typer.Typer()
    app.command()(command.main)
    return CliRunner().invoke(app, list(options), catch_exceptions=False)


def scene(op, family, tokens, keys, *args, **kwargs):
    return settings.Scene(machines.dry_machine(), Case(op, family, tokens, keys, *args, **kwargs))


def built(*args, **kwargs):
    made = scene(*args, **kwargs)
    with ops.use_provider("reference"):
        return cases.BUILDERS[made.case.op](made)


def measured(case, machine):
    return running.run(case, machine, machines.Yardstick(machine))


def test_without_a_gpu_one_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke()
    assert result.exit_code == 2
    assert " ".join(result.output.split()) == command.NO_GPU


def test_a_dry_run_writes_json_table_and_plot_and_says_what_it_is(tmp_path):
    pytest.importorskip("matplotlib")
    written, drawn = tmp_path / "result.json", tmp_path / "result.png"
    chosen = ("sparse_mla", "norm_rope", "select_topk")
    only = [word for name in chosen for word in ("--only", name)]
    result = invoke(
        *("--dry-run", "--no-check", "--family", "glm", *only),
        *("--json", str(written), "--plot", str(drawn)),
    )
    assert result.exit_code == 0, result.output
    assert result.output.startswith(machines.DRY_RUN)
    assert "than" in result.output
    if not installed("flashinfer"):
        assert how_to_install("flashinfer") in result.output
    assert drawn.stat().st_size > 1000
    document = json.loads(written.read_text())
    assert document["dry_run"] is True
    assert "nothing here is a measurement" in document["note"]
    assert document["not_run"] == []
    assert document["versions"]["torch"] == torch.__version__
    rows = document["results"]
    assert {row["case"]["op"] for row in rows} == set(chosen)
    for row in rows:
        assert row["status"] == "measured", row
        assert row["share_of_roof"]["median"] > 0
        ran = [peer for peer in row["peers"] if peer["speedup"] is not None]
        assert row["best_peer"] in [peer["name"] for peer in ran]
        assert all(peer["speedup"] or peer["reason"] for peer in row["peers"])


def test_every_op_that_launches_kernels_has_a_case():
    # Registered ops are what a provider can have kernels for; the rest are helpers in Python.
    launching = {name for name in ops.__all__ if f"dsafx::{name}" in _registered()}
    assert len(launching) >= 27
    assert launching == set(cases.BUILDERS)
    assert launching == {case.op for case in cases.CASES}


def _registered():
    return {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}


def test_the_cases_cover_lengths_contexts_heads_and_both_models():
    tokens = {case.tokens for case in cases.CASES}
    assert {1, 8192} <= tokens <= set(range(1, 8193))
    assert max(case.keys for case in cases.CASES) == 131_072
    assert {8, 16, 32, 128} <= {case.heads for case in cases.CASES if case.heads}
    assert {case.family for case in cases.CASES} == {GLM, DEEPSEEK}
    assert any(case.variant == "skip" for case in cases.CASES)
    assert len(set(cases.CASES)) == len(cases.CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_each_case_gives_what_its_peers_give(case):
    result = measured(case, machines.dry_machine())
    assert result.status == "measured", result.reason
    assert result.best is not None


def test_the_floor_of_sparse_attention_is_that_of_its_selected_keys():
    # Tiny GLM: 4 heads, latents of 128 and 8 rotated dims, 32 keys selected of 64; bfloat16.
    floor = built("sparse_mla", GLM, 1, 4096).floor
    assert floor.flops == 2 * 32 * 4 * ((128 + 8) + 128)
    query, ids, rows, out = 4 * 136 * 2, 32 * 4, 32 * 136 * 2, 4 * 128 * 2
    assert floor.bytes == query + ids + rows + out


def test_the_floor_of_a_selection_counts_no_row_that_is_closed():
    # Tiny DeepSeek: 8 index heads of 16; 64 rows of a prompt of 64, of which 33 .. 64 are scored.
    floor = built("index_select", DEEPSEEK, 4096, 4096).floor
    assert floor.flops == 2 * sum(range(33, 65)) * 8 * 16
    query, keys, weights, interval = 64 * 8 * 16 * 2, 64 * 16 * 2, 64 * 8 * 4, 2 * 64 * 4
    assert floor.bytes == query + keys + weights + interval + 64 * 32 * 4


def test_the_computed_peak_of_gathered_rows_is_that_of_rows_logits_and_weights():
    (peer,) = built("sparse_mqa", GLM, 64 * 4, 4096).peers
    assert peer.bytes == 4 * 32 * (2 * 2 * 136 + (4 + 4 + 2) * 4)


def test_the_selected_keys_are_valid_and_fewer_than_those_seen():
    made = scene("sparse_mla", GLM, 4096, 8192)
    assert made.keys > made.dims.index_topk
    ops.check_indices(made.indices, *made.interval, made.dims.index_topk)


def test_the_budget_stops_the_run_and_what_is_left_is_listed(monkeypatch, tmp_path):
    written = tmp_path / "result.json"
    ticks = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    result = invoke(
        *("--dry-run", "--no-check", "--budget", "2", "--family", "glm", "--only", "rms_norm"),
        *("--only", "layer_norm", "--only", "rope", "--json", str(written)),
    )
    assert result.exit_code == 0, result.output
    document = json.loads(written.read_text())
    assert len(document["results"]) == 1
    assert [case["op"] for case in document["not_run"]] == ["rms_norm", "layer_norm"]
    assert "layer_norm, glm, 8192 x 8192: not run, the budget was spent" in result.output


def test_a_peer_that_does_not_fit_is_listed_and_not_run():
    machine = replace(machines.dry_machine(), free_bytes=lambda: 100)
    result = measured(Case("rms_norm", GLM, 4096, 4096), machine)
    assert result.status == "measured"
    assert result.best is None
    assert [peer.reason for peer in result.peers[:2]] == ["does not fit"] * 2
    assert "torch's own: not run, does not fit" in report.remarks(result)


def test_a_wrong_result_and_a_failure_are_told(monkeypatch):
    case, machine = Case("rms_norm", GLM, 4096, 4096), machines.dry_machine()
    build = cases.BUILDERS["rms_norm"]

    def wrong(made):
        work = build(made)
        return replace(work, ours=lambda: 2 * work.ours())

    def failing(made):
        raise ValueError("no such thing")

    monkeypatch.setattr(running, "BUILDERS", {"rms_norm": wrong})
    found = measured(case, machine)
    assert found.status == "the result differs from a peer's"
    assert found.reason.startswith("by 1 from torch's own")
    monkeypatch.setattr(running, "BUILDERS", {"rms_norm": failing})
    found = measured(case, machine)
    assert (found.status, found.reason) == ("failed", "ValueError: no such thing")


def test_a_run_in_which_the_rates_moved_is_discarded():
    machine = machines.dry_machine()
    strict = replace(machine, rules=replace(machine.rules, drift=-1.0, attempts=2))
    result = measured(Case("rms_norm", GLM, 4096, 4096), strict)
    assert result.status == "discarded: the device's rates moved"
    assert result.best is None
    assert result.share_of_roof is None


def test_ids_are_compared_as_sets_and_padding_is_no_key():
    ours = torch.tensor([[0, 2, 5, -1]])
    assert compare.ids(ours, torch.tensor([[5, 0, 2, 7]])) == 0.0
    assert compare.ids(ours, torch.tensor([[5, 0, 3, -1]])) == pytest.approx(1 / 3)
    assert compare.values(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")


def test_the_checks_find_a_dead_selection_dead():
    with torch.no_grad(), ops.use_provider("reference"):
        check = checks.dead_selection(machines.dry_machine())
    assert (check.outcome, check.detail.count("none of the indexer's")) == ("passed", 1)


def test_the_checks_find_an_indexer_that_runs_for_nobody(monkeypatch):
    real = steps.Prompt.__call__

    def also_scores(self):
        rows = self.hidden[:, :16].contiguous()
        weights = torch.ones(rows.shape[0], 1)
        ops.index_select(rows[:, None], rows, weights, *self.interval, rows.shape[0], 4)
        return real(self)

    monkeypatch.setattr(steps.Prompt, "__call__", also_scores)
    with torch.no_grad(), ops.use_provider("reference"):
        check = checks.dead_selection(machines.dry_machine())
    assert check.outcome == "failed"
    assert "index_select" in check.detail


def test_a_decode_step_gives_the_same_twice_and_is_not_captured_without_cuda():
    with torch.no_grad(), ops.use_provider("reference"):
        check = checks.captured_decode(machines.dry_machine())
    assert (check.outcome, check.detail) == ("not run", "needs CUDA; the step gives the same twice")


def test_the_dimensions_are_those_of_the_other_benchmarks():
    pytest.importorskip("transformers")
    (families,) = load("_families")
    for family, dims in settings.REAL.items():
        assert asdict(dims) == asdict(families.REAL[families.Family(family.value)])


def test_an_op_without_a_kernel_of_the_provider_is_said_to_be_the_reference():
    machine = replace(machines.dry_machine(), provider="cpu")
    assert running.computes("dense_mha", machine) == "cpu"
    assert running.computes("mla_attention", machine) == "cpu"
    assert running.computes("rms_norm", machine) == "reference"


def test_quantised_queries_are_compared_with_their_scales():
    q, weights = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[3.0]])
    fp8 = torch.float8_e4m3fn
    assert compare.weighted((q.to(fp8), weights), ((2 * q).to(fp8), weights / 2)) == 0.0
    assert compare.weighted((q, weights), ((2 * q), weights)) == pytest.approx(0.5)
