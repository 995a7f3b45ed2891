"""Layers and models in the four ways to run them give the same; what does not fit is left out."""

from __future__ import annotations

import json

import pytest
import torch
from _benchmarks import load

pytest.importorskip("transformers")
pytest.importorskip("rich")
typer = pytest.importorskip("typer")

cases, command, families, measure, report, running = load(
    "_model_cases", "models", "_families", "_measure", "_model_report", "_model_run"
)
EAGER, INDUCTOR, ENABLE, COMPILE = cases.Subject
UNCOMPILED = (EAGER, ENABLE)


def pair(family, scope):
    torch.manual_seed(0)
    return cases.models(family, scope, families.TINY[family], torch.float32)


def rows_of(family, scope, phase, subjects, length=80):
    case = cases.Case(family, scope, phase, length)
    return running.run(case, pair(family, scope), subjects, measure.QUICK)


@pytest.mark.parametrize("family", families.Family)
@pytest.mark.parametrize("scope", cases.Scope)
@pytest.mark.parametrize("phase", cases.Phase)
def test_enabled_and_plain_give_the_same_above_k(family, scope, phase):
    assert families.TINY[family].index_topk < 80
    plain, enabled = rows_of(family, scope, phase, UNCOMPILED)
    assert (plain.status, enabled.status) == ("measured", "measured")
    assert plain.speedup is None
    assert enabled.speedup.low <= enabled.speedup.median <= enabled.speedup.high
    assert enabled.difference < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("scope", cases.Scope)
@pytest.mark.parametrize("phase", cases.Phase)
def test_compiled_ways_give_what_eager_ones_give(scope, phase):
    rows = rows_of(families.Family.GLM, scope, phase, list(cases.Subject))
    assert [row.subject for row in rows] == [EAGER, INDUCTOR, ENABLE, COMPILE]
    assert all(row.difference < 1e-5 for row in rows[1:])


def test_each_decode_step_writes_the_same_place_of_its_cache():
    family = families.Family.GLM
    case = cases.Case(family, cases.Scope.MODEL, cases.Phase.DECODE, 80)
    both = pair(family, cases.Scope.MODEL)
    for subject in UNCOMPILED:
        call = cases.prepare(case, subject, both)
        with torch.no_grad():
            first = call()
            assert torch.equal(call(), first)


def test_transformers_is_listed_and_not_run_where_it_does_not_fit(monkeypatch):
    monkeypatch.setattr(measure, "free_bytes", lambda: 1000)
    plain, enabled = rows_of(
        families.Family.DEEPSEEK, cases.Scope.LAYER, cases.Phase.PREFILL, UNCOMPILED
    )
    assert plain.status == "the peer does not fit"
    assert plain.extra_bytes == plain.case.peer_bytes(
        families.TINY[families.Family.DEEPSEEK], torch.float32
    )
    assert (enabled.status, enabled.speedup) == ("measured", None)
    assert enabled.tokens_per_second > 0


def test_the_computed_peak_of_transformers_is_that_of_its_largest_tensors():
    real = families.REAL
    glm = cases.Case(families.Family.GLM, cases.Scope.LAYER, cases.Phase.PREFILL, 4096)
    assert glm.peer_bytes(real[glm.family], torch.float32) == 2 * 4 * 4096**2 * 32
    deepseek = cases.Case(families.Family.DEEPSEEK, cases.Scope.LAYER, cases.Phase.PREFILL, 4096)
    probabilities = 2 * 4 * 4096**2 * 128
    expanded = 4 * 4096 * 128 * (2 * 128 + 2 * 192)
    assert deepseek.peer_bytes(real[deepseek.family], torch.float32) == probabilities + expanded


def invoke(*options):
    from typer.testing import CliRunner

    app = typer.Typer()
    app.command()(command.main)
    return CliRunner().invoke(app, options)


def test_a_quick_run_writes_a_table_json_and_a_plot(tmp_path):
    document, plot = tmp_path / "result.json", tmp_path / "result.png"
    options = ["--quick", "--family", "glm", "--scope", "layer", "--json", str(document)]
    options += ["--plot", str(plot), "--subject", "eager", "--subject", "enable"]
    result = invoke(*options)
    assert result.exit_code == 0, result.output
    assert "GLM-5.2, layer decode 80, float32" in result.output
    assert "largest difference to transformers" in result.output
    written = json.loads(document.read_text())
    assert [(row["case"]["length"], row["subject"]) for row in written["results"]] == [
        (length, subject) for length in (16, 80, 80) for subject in ("eager", "enable")
    ]
    assert plot.stat().st_size > 10_000


def test_a_run_that_is_taken_up_again_measures_what_is_missing_or_was_discarded(tmp_path):
    path = tmp_path / "result.json"
    options = ["--quick", "--family", "glm", "--scope", "layer", "--phase", "prefill"]
    options += ["--subject", "enable", "--json", str(path)]

    def output_of(*more):
        return invoke(*options, *more).output

    def results():
        return json.loads(path.read_text())["results"]

    output_of("--length", "16")
    first = results()
    output = output_of("--resume")
    assert "prefill 16, float32: known" in output
    assert "prefill 80, float32: known" not in output
    assert results()[:1] == first
    written = json.loads(path.read_text())
    written["results"][0]["status"] = "discarded: the machine's rates moved"
    path.write_text(json.dumps(written))
    output = output_of("--resume")
    assert "prefill 16, float32: known" not in output
    assert "prefill 80, float32: known" in output
    assert {row["status"] for row in results()} == {"measured"}
    path.write_text(json.dumps(written | {"quick": False}))
    assert "holds results of quick False, this is True" in " ".join(output_of("--resume").split())
    assert "needs --json" in invoke("--resume").output


def test_a_run_without_transformers_says_that_nothing_was_compared():
    assert report.differences([]) == "no result was compared with transformers"
