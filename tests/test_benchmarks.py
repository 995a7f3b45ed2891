"""The benchmarks run at tiny dimensions, their peers are transformers, and their rules hold."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from _benchmarks import load

import dsafx

pytest.importorskip("transformers")
pytest.importorskip("rich")
typer = pytest.importorskip("typer")

cases, dispatched, families, measure, peers, running, settings = load(
    "_cases", "_dispatched", "_families", "_measure", "_peers", "_run", "_setting"
)
command, starts, pipeline = load("ops", "_pipeline_start", "pipeline")

FAMILIES = list(families.Family)


def setting(family, dtype=torch.float32):
    return settings.Setting(family, dtype, quick=True)


def operands(case, tokens: int):
    """One layer, and inputs of its forward for a prompt of ``tokens``."""
    layer = case.layer
    cache = families.GrownCache(case.dims, tokens, case.dtype)
    hidden = case.random(1, tokens, case.dims.hidden_size)
    return layer.step(layer.plain, cache, hidden), layer.step(layer.enabled, cache, hidden)


def test_a_quick_run_writes_what_it_promises(tmp_path):
    from typer.testing import CliRunner

    app = typer.Typer()
    app.command()(command.main)
    written = tmp_path / "result.json"
    options = ["--quick", "--family", "glm", "--json", str(written)]
    chosen = ("short_prefill", "decode_layer", "index_select", "routed")
    for name in chosen:
        options += ["--only", name]
    result = CliRunner().invoke(app, options, catch_exceptions=False)
    assert result.exit_code == 0
    assert "short_prefill (glm float32, provider" in result.output
    document = json.loads(written.read_text())
    assert document["quick"] is True
    assert set(document) == {"versions", "machine", "quick", "rules", "results"}
    assert [row["case"] for row in document["results"]] == list(chosen)
    short, decode, select, routed = document["results"]
    for row in document["results"]:
        assert row["status"] == "measured"
        assert row["speedup"]["low"] <= row["speedup"]["median"] <= row["speedup"]["high"]
        assert row["provider"]
    assert short["asserted"] == "C8 on all rows; no GEMM and no top-k is dispatched"
    assert short["reduction"] == pytest.approx(1 - 1 / short["speedup"]["median"])
    assert select["asserted"].startswith("C8 on all rows, C10 on")
    assert set(decode["notes"]) == {
        "share of the ceiling",
        "the ceiling over transformers",
        "growth of a dynamic cache over the step",
    }
    assert decode["difference"] < 1e-5
    assert routed["difference"] < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name.startswith("compiled") else name
        for name in cases.CASES
    ],
)
def test_a_case_runs_and_gives_what_its_peer_gives(name, family):
    result = running.run(name, setting(family), measure.QUICK)
    assert result.status is running.Status.MEASURED
    assert (result.speedup is None) == name.startswith("decode_layer_long")
    assert result.difference is None or result.difference < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_peers_are_the_lines_of_transformers(family):
    case = setting(family)
    tokens = 2 * case.dims.index_topk
    step, _ = operands(case, tokens)
    attention, indexer = step.attention, step.attention.indexer
    seen = {}

    def keep(name):
        return lambda module, args, result: seen.setdefault(name, result)

    handles = [
        indexer.register_forward_hook(keep("indices")),
        attention.q_b_proj.register_forward_hook(keep("q_b")),
        attention.o_proj.register_forward_pre_hook(
            lambda module, args: seen.setdefault("before_o", args[0])
        ),
        indexer.wq_b.register_forward_hook(keep("index_q")),
        indexer.weights_proj.register_forward_hook(keep("head_weights")),
    ]
    # Angles of 0 leave every rotated part as it is, up to the order of its dimensions.
    cos, sin = torch.ones_like(step.angles[0]), torch.zeros_like(step.angles[1])
    step.attention(step.hidden, (cos, sin), step.mask, cache=step.cache)
    for handle in handles:
        handle.remove()

    rope = case.dims.qk_rope_head_dim
    order = torch.cat([torch.arange(0, rope, 2), torch.arange(1, rope, 2)])
    index_q = seen["index_q"].view(1, tokens, case.dims.index_n_heads, -1).clone()
    if family is families.Family.GLM:
        index_q[..., :rope] = index_q[..., order]
    weights = seen["head_weights"].float() * case.dims.index_n_heads**-0.5
    mask = step.mask[:, 0]
    indices = peers.score_and_select(indexer, index_q, step.cache.index_keys, weights, mask)
    assert torch.equal(indices, seen["indices"])

    q = seen["q_b"].view(1, tokens, case.dims.num_attention_heads, -1).transpose(1, 2).clone()
    q[..., -rope:] = q[..., -rope:][..., order]
    out = peers.attend(attention, q, step.cache.latents, step.cache.rotated, indices, step.mask)
    assert torch.equal(out.flatten(2), seen["before_o"])


def test_both_layers_share_their_weights_and_only_one_is_enabled():
    layer = setting(families.Family.GLM).layer
    plain, enabled = (dict(model.named_parameters()) for model in (layer.plain, layer.enabled))
    assert all(plain[name] is enabled[name] for name in plain)
    assert not dsafx.enabled(layer.plain)
    assert dsafx.enabled(layer.enabled)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_enabled_layer_is_given_intervals_and_a_plain_one_a_mask(family):
    case = setting(family)
    plain, enabled = operands(case, 40)
    assert plain.mask.shape == (1, 1, 40, 40)
    assert enabled.mask.shape == (1, 1, 40, 2)


def test_an_op_inside_of_an_op_is_seen():
    case = setting(families.Family.GLM)
    prepared = cases.index_select(case)
    with pytest.raises(AssertionError, match=r"got .*(mm|matmul)"):
        dispatched.assert_neither_gemm_nor_topk(prepared.ours)


def test_a_selection_that_leaves_out_a_better_key_is_found():
    case = setting(families.Family.GLM)
    prepared = cases.index_select(case)
    indices = prepared.ours()
    assert prepared.check(indices).startswith("C8")
    last = int(
        (~torch.isin(torch.arange(prepared.keys, dtype=torch.int32), indices[-1])).nonzero()[0]
    )
    worse = indices.clone()
    worse[-1, -1] = last
    worse[-1] = worse[-1].sort().values
    with pytest.raises(AssertionError, match="leaves out a key that scores higher"):
        prepared.check(worse)


def test_a_peer_that_does_not_fit_is_listed_and_not_run(monkeypatch):
    monkeypatch.setattr(measure, "free_bytes", lambda: 1000)
    result = running.run("routed", setting(families.Family.DEEPSEEK), measure.QUICK)
    assert result.status is running.Status.DOES_NOT_FIT
    assert result.speedup is None
    assert result.share_of_floor is not None
    assert result.peer_extra_bytes > 1000


def test_a_run_on_a_machine_that_changed_speed_is_repeated_once_and_discarded(monkeypatch):
    measured = iter(measure.Rates(flops, 1.0) for flops in (1.0, 1.2, 1.0, 1.16, 1.0, 1.1))
    monkeypatch.setattr(measure, "measure_rates", lambda dtype, rules: next(measured))
    ran = []
    calls = {"ours": lambda: ran.append("ours"), "peer": lambda: ran.append("peer")}
    timed = measure.take_turns(calls, 0.0, torch.float32, measure.Rules())
    assert ran == ["ours", "peer"] * 14
    assert timed.moved == pytest.approx(0.16)
    steady = measure.take_turns(calls, 11.0, torch.float32, measure.Rules())
    assert steady.rounds == 3
    assert steady.moved == pytest.approx(0.1)


def test_ratios_are_medians_of_pairs():
    rates = measure.Rates(4.0, 2.0)
    timed = measure.Timed({"peer": [2.0, 9.0, 4.0], "ours": [1.0, 3.0, 4.0]}, rates, rates)
    assert timed.ratio("peer", "ours") == measure.Spread(2.0, 1.0, 3.0)
    assert timed.share(measure.Floor(flops=2.0, bytes=2.0), "ours").high == 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_peak_memory_counts_what_a_call_held_and_gave_back():
    size = 64 << 20
    trial = measure.try_out(lambda: int(torch.ones(size, dtype=torch.uint8)[-1]), measure.QUICK)
    assert trial.value == 1
    assert 0.9 * size < trial.extra_bytes < 1.5 * size


def answer(**changed):
    said = {"start": 2.0, "passes": 0.02, "layers": 4, "graphs": 1, "hits": 0, "refused": []}
    return starts.Answer(**{**said, **changed})


def test_starts_take_turns_and_only_ratios_are_kept(monkeypatch, tmp_path):
    started = []

    def start(order, cache, *, warm):
        started.append((order.backend, warm, cache))
        return answer(start=2.0 if order.backend == "dsafx" else 1.6, passes=0.0 if warm else 0.02)

    monkeypatch.setattr(pipeline, "_start", start)
    cold, warm = (pipeline.run(case, 4, 64, measure.QUICK, tmp_path) for case in pipeline.CaseName)
    assert [backend for backend, _, _ in started] == ["dsafx", "inductor"] * 5
    assert [was_warm for _, was_warm, _ in started] == [False] * 6 + [True] * 4
    assert len({cache for _, _, cache in started[:4]}) == 4
    assert {cache for _, _, cache in started[4:]} == {
        str(tmp_path / "dsafx"),
        str(tmp_path / "inductor"),
    }
    assert cold.passes_share.median == pytest.approx(0.01)
    assert cold.passes_ms_per_layer.median == pytest.approx(5)
    assert (cold.recognised, warm.recognised) == (4, None)
    assert warm.start == measure.Spread.of([1.25, 1.25])
    document = json.loads(pipeline.document([cold, warm], measure.QUICK, True, tokens=64))
    assert set(document) == {"versions", "machine", "quick", "tokens", "rules", "results"}
    assert document["results"][0]["passes_share"]["high"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("said", "warm", "error"),
    [
        (answer(hits=1), False, "1 of 1 graphs from the cache"),
        (answer(hits=0), True, "0 of 1 graphs from the cache"),
        (answer(refused=["a write is gone"]), False, "put back as it came: a write is gone"),
    ],
)
def test_a_start_that_is_not_what_it_should_be_is_an_error(monkeypatch, said, warm, error):
    class Done:
        returncode = 0
        stdout = json.dumps(vars(said))

    monkeypatch.setattr(pipeline.subprocess, "run", lambda *args, **kwargs: Done)
    with pytest.raises(RuntimeError, match=error):
        pipeline._start(starts.Order("dsafx", 4, 64), "cache", warm=warm)


@pytest.mark.slow
def test_the_model_of_the_pipeline_benchmark_is_recognised_and_found_in_the_cache(tmp_path):
    order = starts.Order("dsafx", 1, 64)
    cold = pipeline._start(order, str(tmp_path), warm=False)
    assert cold.layers == 1
    assert 0 < cold.passes < cold.start
    assert pipeline._start(order, str(tmp_path), warm=True).passes == 0
