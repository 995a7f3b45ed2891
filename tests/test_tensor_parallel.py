"""Tensor parallelism: two processes share the heads and give what one process gives."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _ranks import RANKS, Raised, Ranks
from _recognised import groups, small_model
from _sharded import (
    LENGTH,
    assert_same_gradients,
    gradients,
    language_loss,
    logits,
    sharded,
    tokens,
    whole,
)
from _tiny import TOPK, prompt, tiny_model
from _uncompiled import passes_only
from test_families import tiny_axk2
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.integrations.finegrained_fp8 import FP8Linear

import dsafx
from dsafx import ops
from dsafx.models import record_decisions
from dsafx.models._weights import effective_weight
from dsafx.passes import _torch_compat as compat
from dsafx.passes import collect


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make = {"axk2": tiny_axk2}.get(request.param, functools.partial(tiny_model, request.param))
    make().save_pretrained(tmp_path)
    return tmp_path


all_families = pytest.mark.parametrize(
    "checkpoint", ["axk2", "deepseek_v32", "glm_moe_dsa"], indirect=True
)
one_family = pytest.mark.parametrize("checkpoint", ["glm_moe_dsa"], indirect=True)
gathers_experts = pytest.mark.xfail(
    compat._VERSION < (2, 12),
    reason="torch 2.11 cannot gather experts as transformers shards them, with dsafx or without",
    raises=AssertionError,
    strict=True,
)


def answers(rank: int, checkpoint: Path) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Logits in one pass, those of the last token by chunks, and generated tokens."""
    model = dsafx.enable(sharded(checkpoint))
    last, _ = dsafx.prefill(model, prompt(2, LENGTH), chunk_size=TOPK + 3)
    return logits(model), last, tokens(model)


@all_families
def test_an_enabled_sharded_model_gives_the_logits_and_tokens_of_one_process(
    ranks: Ranks, checkpoint: Path
):
    one = whole(checkpoint)
    expected, generated = logits(one), tokens(one)
    for found, last, found_tokens in ranks.run(answers, checkpoint):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(last, expected[:, -1], rtol=0, atol=1e-4)
        assert found_tokens == generated


def saved_and_disabled(rank: int, checkpoint: Path, folder: Path) -> bool:
    model = sharded(checkpoint)
    before = logits(model)
    dsafx.enable(model).save_pretrained(folder)
    return torch.equal(logits(dsafx.disable(model)), before)


@gathers_experts
@one_family
def test_a_sharded_model_is_saved_whole_while_enabled_and_disabled_bit_for_bit(
    ranks: Ranks, checkpoint: Path
):
    assert ranks.run(saved_and_disabled, checkpoint, checkpoint / "saved") == [True, True]
    expected, found = whole(checkpoint).state_dict(), whole(checkpoint / "saved").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def attention_rows(rank: int, checkpoint: Path) -> dict[str, int]:
    attention = dsafx.enable(sharded(checkpoint)).model.layers[0].self_attn
    return {
        name: (p.to_local() if isinstance(p, DTensor) else p).shape[0]
        for name, p in attention.named_parameters()
    } | {"heads": attention.dsa_layer.config.num_heads}


@one_family
def test_the_heads_are_sharded_and_the_indexer_and_latents_are_not(ranks: Ranks, checkpoint: Path):
    attention = whole(checkpoint).model.layers[0].self_attn
    whole_rows = {name: p.shape[0] for name, p in attention.named_parameters()}
    for rows in ranks.run(attention_rows, checkpoint):
        assert rows.pop("heads") == 2
        halved = {name for name in whole_rows if rows[name] * RANKS == whole_rows[name]}
        assert halved == {"q_b_proj.weight", "kv_b_proj.weight"}
        assert {name for name in whole_rows if rows[name] == whole_rows[name]} == (
            set(whole_rows) - halved
        )


def routes(rank: int, checkpoint: Path) -> list[tuple[int, str, str]]:
    model = dsafx.enable(sharded(checkpoint))
    with record_decisions() as records:
        logits(model)
        tokens(model)
    return [(r.layer_idx, str(r.decision), r.provider) for r in records]


@one_family
def test_all_ranks_take_the_same_routes(ranks: Ranks, checkpoint: Path):
    first, second = ranks.run(routes, checkpoint)
    assert first == second
    assert {layer for layer, _, _ in first} == {0, 1, 2, 3}


def checked_logits(rank: int, checkpoint: Path, planted: bool) -> Tensor:
    model = dsafx.enable(sharded(checkpoint))
    if planted and rank == 1:
        with torch.no_grad():
            model.model.layers[1].self_attn.indexer.wq_b.weight.neg_()
    with ops.options(check=True):
        return logits(model)


@one_family
def test_the_check_of_selections_passes_on_equal_indexers(ranks: Ranks, checkpoint: Path):
    expected = logits(whole(checkpoint))
    for found in ranks.run(checked_logits, checkpoint, False):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@one_family
def test_the_check_of_selections_names_the_layer_and_the_rank_that_differs(
    ranks: Ranks, checkpoint: Path
):
    for answer in ranks.answers(checked_logits, checkpoint, True):
        assert isinstance(answer, Raised)
        assert answer.kind == "RuntimeError"
        assert answer.message.startswith("layer 1: rank 1 selected other keys than rank 0")


def enabled_of_three_heads(rank: int, checkpoint: Path) -> None:
    dsafx.enable(sharded(checkpoint))


def test_heads_that_the_ranks_cannot_share_are_refused(ranks: Ranks, tmp_path: Path):
    model = tiny_model("deepseek_v32", num_attention_heads=3, num_key_value_heads=3)
    model.save_pretrained(tmp_path)
    for answer in ranks.answers(enabled_of_three_heads, tmp_path):
        assert isinstance(answer, Raised)
        assert answer.kind == "ValueError"
        assert "got 3 heads and 2 ranks" in answer.message


def sharded_but_for_queries(rank: int, checkpoint: Path) -> None:
    plan = {"model.layers.*.self_attn.q_b_proj": "replicate"}
    split = DistributedConfig(tp_size=RANKS, tp_plan=plan)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, distributed_config=split)
    logits(dsafx.enable(model))


def sharded_when_enabled(rank: int, checkpoint: Path) -> None:
    model = dsafx.enable(whole(checkpoint))
    config, _, mesh = model.prepare_distribute_model(DistributedConfig(tp_size=RANKS))
    logits(model.maybe_distribute_model(model, config, mesh))


@one_family
@pytest.mark.parametrize(
    ("make", "queries", "keys"), [(sharded_but_for_queries, 4, 2), (sharded_when_enabled, 2, 4)]
)
def test_query_heads_that_do_not_fit_those_of_the_keys_are_an_error(
    ranks: Ranks, checkpoint: Path, make: Callable[[int, Path], None], queries: int, keys: int
):
    for answer in ranks.answers(make, checkpoint):
        assert isinstance(answer, Raised)
        assert answer.kind == "ValueError"
        assert f"layer 0 has {queries} query heads on this rank" in answer.message
        assert f"kv_b_proj had {keys} when it was enabled" in answer.message


def dequantised_rows(rank: int, rows: int) -> tuple[Tensor, Tensor]:
    """The effective weight of an fp8 layer with ``rows`` rows, whole and sharded."""
    torch.manual_seed(0)
    projection = FP8Linear(40, rows, (128, 128))
    with torch.no_grad():
        projection.weight.copy_(torch.randn(rows, 40).to(torch.float8_e4m3fn))
        projection.weight_scale_inv.copy_(torch.rand(projection.weight_scale_inv.shape))
    expected = effective_weight(projection, "kv_b_proj", torch.float32)
    mesh = init_device_mesh("cpu", (RANKS,))
    for name, parameter in list(projection.named_parameters()):
        local = parameter.detach().chunk(RANKS)[rank]
        split = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        projection.register_parameter(name, nn.Parameter(split, requires_grad=False))
    return expected.chunk(RANKS)[rank], effective_weight(projection, "kv_b_proj", torch.float32)


def test_a_block_scaled_weight_is_dequantised_where_it_is_sharded(ranks: Ranks):
    for expected, found in ranks.run(dequantised_rows, 512):
        assert torch.equal(found, expected)
    for answer in ranks.answers(dequantised_rows, 384):
        assert isinstance(answer, Raised)
        assert answer.kind == "NotImplementedError"
        assert "between blocks of 128 rows" in answer.message


def sharded_gradients(rank: int, checkpoint: Path) -> dict[str, Tensor]:
    model = dsafx.enable(sharded(checkpoint))
    return gradients(model, language_loss(model))


@gathers_experts
@one_family
def test_gradients_of_a_sharded_model_are_those_of_one_process(ranks: Ranks, checkpoint: Path):
    one = whole(checkpoint)
    expected = gradients(one, language_loss(one))
    for found in ranks.run(sharded_gradients, checkpoint):
        assert_same_gradients(found, expected)


def compiled(checkpoint: Path, enable: bool) -> PreTrainedModel:
    model = sharded(checkpoint)
    if enable:
        dsafx.enable(model)
    torch._dynamo.reset()
    counters.clear()
    model.compile(backend=passes_only)
    model.generation_config.disable_compile = True
    return model


def compiled_enabled(rank: int, checkpoint: Path) -> tuple[Any, ...]:
    model = compiled(checkpoint, enable=True)
    return logits(model), tokens(model), dict(counters["graph_break"])


@pytest.mark.slow
def test_a_compiled_sharded_model_gives_the_logits_and_tokens_of_one_process(
    ranks: Ranks, tmp_path: Path
):
    one = small_model("glm_moe_dsa")
    one.save_pretrained(tmp_path)
    expected, generated = logits(one), tokens(one)
    for found, found_tokens, breaks in ranks.run(compiled_enabled, tmp_path):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        assert (found_tokens, breaks) == (generated, {})


def compiled_unmodified(rank: int, checkpoint: Path) -> tuple[Tensor, list[dict[str, str]]]:
    with collect() as reports:
        found = logits(compiled(checkpoint, enable=False))
    recognised = [each.of("recognise") for each in reports if each.stage == "pre_grad"]
    return found, [groups(each) for each in recognised]


@pytest.mark.slow
def test_a_sharded_model_that_nobody_enabled_is_recognised(ranks: Ranks, tmp_path: Path):
    one = small_model("glm_moe_dsa")
    one.save_pretrained(tmp_path)
    expected = logits(one)
    for found, recognised in ranks.run(compiled_unmodified, tmp_path):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        assert recognised == [{"0": "selects and attends", "1": "attends"}]


EXAMPLE = Path(__file__).parents[1] / "examples" / "tensor_parallel.py"


@pytest.mark.slow
def test_the_example_runs_by_torchrun_and_gets_the_tokens_of_one_process():
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    done = subprocess.run(
        [sys.executable, *command, EXAMPLE], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["2 processes", "one process", "all equal"]


@pytest.mark.slow
def test_the_example_says_how_it_is_started():
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "start it with torchrun --nproc-per-node 2" in done.stderr
