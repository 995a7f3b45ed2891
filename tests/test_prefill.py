"""``prefill``: chunks give what one pass gives, ``generate`` goes on, and memory is bounded."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import _tiny
import pytest
import torch
from _tiny import FAMILIES, TOPK, left_padding, prompt
from _uncompiled import Counting, passes_only
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

import dsafx
from dsafx import enabling, prefill
from dsafx.models import record_decisions

LENGTH = 60
CHUNK_SIZES = (7, 25, LENGTH, 2 * LENGTH)
TOLERANCE = 1e-5
MASK = left_padding(LENGTH, 0, 5)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A tiny model of each family; tests leave it disabled."""
    return _tiny.tiny_model(request.param)


def make_cache(kind: str, model: PreTrainedModel, length: int = LENGTH + 10) -> Cache:
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=length)


def one_pass(model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: Cache) -> Tensor:
    """[B, vocab] logits after the last token of ``ids``."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        out = model(ids, attention_mask=mask, position_ids=positions, cache=cache)
    return out.logits[:, -1]


def assert_same_cache(got: Cache, expected: Cache, mask: Tensor) -> None:
    """The same latents and index keys at the real tokens."""
    real = mask.bool()
    compared = 0
    for ours, theirs in zip(got.layers, expected.layers, strict=True):
        for name in ("keys", "values", "indexer_keys"):
            mine, other = getattr(ours, name), getattr(theirs, name)
            if other is None:
                assert mine is None
                continue
            rows = [part.reshape(2, -1, part.shape[-1])[:, :LENGTH] for part in (mine, other)]
            torch.testing.assert_close(rows[0][real], rows[1][real], atol=TOLERANCE, rtol=0)
            compared += 1
    assert compared == 2 * len(expected.layers) + 3


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_chunks_give_the_logits_and_the_cache_of_one_pass(
    model: PreTrainedModel, chunk_size: int, kind: str
):
    ids, theirs = prompt(2, LENGTH), make_cache(kind, model)
    expected = one_pass(model, ids, MASK, theirs)
    with enabling(model), record_decisions() as records:
        ours = make_cache(kind, model)
        logits, cache = prefill(model, ids, ours, chunk_size=chunk_size, attention_mask=MASK)
    assert cache is ours
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    assert_same_cache(cache, theirs, MASK)
    chunks = -(-LENGTH // chunk_size)
    assert len(records) == chunks * model.config.num_hidden_layers
    assert max(record.tokens for record in records) == 2 * min(chunk_size, LENGTH)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_model_that_nobody_enabled_is_prefilled_alike(model: PreTrainedModel, kind: str):
    ids, theirs = prompt(2, LENGTH), make_cache(kind, model)
    expected = one_pass(model, ids, MASK, theirs)
    ours = make_cache(kind, model)
    logits, _ = prefill(model, ids, ours, chunk_size=25, attention_mask=MASK)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    assert_same_cache(ours, theirs, MASK)


def test_without_a_mask_and_a_cache_all_tokens_are_real_and_the_cache_is_dynamic(
    model: PreTrainedModel,
):
    ids = prompt(2, LENGTH)
    expected = one_pass(model, ids, torch.ones_like(ids), DynamicCache(config=model.config))
    with enabling(model):
        prefilled = prefill(model, ids.int(), chunk_size=25)
    torch.testing.assert_close(prefilled.logits, expected, atol=TOLERANCE, rtol=0)
    assert type(prefilled.cache) is DynamicCache
    assert prefilled.cache.get_seq_length() == LENGTH


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_prompt_can_go_on_from_a_cache(model: PreTrainedModel, kind: str):
    ids = prompt(2, LENGTH)
    expected = one_pass(model, ids, MASK, make_cache(kind, model))
    with enabling(model):
        cache = make_cache(kind, model)
        prefill(model, ids[:, :22], cache, chunk_size=9, attention_mask=MASK[:, :22])
        logits, _ = prefill(model, ids[:, 22:], cache, chunk_size=17, attention_mask=MASK)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    assert cache.get_seq_length() == LENGTH


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("chosen", ["by generate", "from the logits"])
def test_generate_goes_on_with_the_tokens_of_one_pass(
    model: PreTrainedModel, kind: str, chosen: str
):
    ids, mask = prompt(2, 50), left_padding(50, 0, 5)
    more = torch.ones((2, 1), dtype=torch.int64)
    settings: Any = {"do_sample": False}
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=5, **settings)
    with enabling(model):
        cache = make_cache(kind, model)
        if chosen == "by generate":
            prefill(model, ids[:, :-1], cache, chunk_size=19, attention_mask=mask[:, :-1])
            got = model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=5)
        else:
            logits, _ = prefill(model, ids, cache, chunk_size=19, attention_mask=mask)
            tokens = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=-1)
            longer = torch.cat([mask, more], dim=-1)
            got = model.generate(tokens, attention_mask=longer, cache=cache, max_new_tokens=4)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_any_dtype_may_hide_tokens_of_the_prompt(
    model: PreTrainedModel, dtype: torch.dtype
):
    ids, mask = prompt(2, 50), left_padding(50, 0, 5)
    mask[0, 11:14] = 0
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=5)
    given = mask.to(dtype)
    with enabling(model):
        cache = DynamicCache(config=model.config)
        prefill(model, ids[:, :-1], cache, chunk_size=19, attention_mask=given[:, :-1])
        got = model.generate(ids, attention_mask=given, cache=cache, max_new_tokens=5)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("wrapped", "backend"),
    [
        (True, "eager"),
        pytest.param(False, passes_only, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_is_prefilled_by_its_compiled_forward(wrapped: bool, backend: Any):
    sizes = {"num_hidden_layers": 1, "indexer_types": ["full"], "first_k_dense_replace": 1}
    plain = _tiny.tiny_model("glm_moe_dsa", **sizes)
    ids, counting = prompt(2, LENGTH), Counting(backend)
    expected = one_pass(plain, ids, MASK, make_cache("static", plain))
    host = dsafx.enable(_tiny.tiny_model("glm_moe_dsa", **sizes))
    compiled: nn.Module = host
    if wrapped:
        compiled = torch.compile(host, backend=counting, dynamic=False)
    else:
        host.compile(backend=counting, dynamic=False)
    cache = make_cache("static", host)
    logits, _ = prefill(compiled, ids, cache, chunk_size=15, attention_mask=MASK)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    # The first chunk also makes the cache's tensors; the other three run one graph.
    assert counting.graphs == 2


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
        ({"input_ids": torch.ones(2, 3)}, TypeError, r"int32 or int64, got torch\.float32"),
        ({"input_ids": prompt(1, 4)[0]}, ValueError, r"must be \[B, T\] .* got \(4,\)"),
        ({"input_ids": prompt(1, 0)}, ValueError, r"at least one token, got \(1, 0\)"),
        ({"input_ids": torch.tensor([[3, 128]])}, ValueError, r"\[0, 128\), .* from 3 to 128"),
        ({"input_ids": torch.tensor([[-1, 5]])}, ValueError, r"\[0, 128\), .* from -1 to 5"),
        ({"cache": ()}, TypeError, "cache must be a transformers Cache, got tuple"),
        ({"cache": "short"}, ValueError, "room for 11 tokens, got 0 cached and 12 new"),
        ({"attention_mask": torch.ones(1, 11)}, ValueError, r"\[1, 12\], .* got \(1, 11\)"),
        ({"attention_mask": MASK[:1, :12].flip(-1) * 0}, ValueError, "padding goes on the left"),
        ({"progress": True}, ImportError, r"needs rich: pip install 'dsafx\[cli\]'"),
    ],
)
def test_bad_input_is_refused_before_the_model_runs(
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
):
    model = _tiny.tiny_model("glm_moe_dsa", num_hidden_layers=1, indexer_types=["full"])
    arguments = {"input_ids": prompt(1, 12), "cache": DynamicCache(config=model.config), **changes}
    if arguments["cache"] == "short":
        arguments["cache"] = make_cache("static", model, 11)
    for name in ("rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    ran: list[object] = []
    model.register_forward_pre_hook(lambda *args: ran.append(args))
    with pytest.raises(error, match=message):
        prefill(model, **arguments)
    assert not ran


def test_what_cannot_generate_is_refused(model: PreTrainedModel):
    with pytest.raises(TypeError, match="PreTrainedModel, got Linear"):
        prefill(nn.Linear(2, 2), prompt(1, 4))
    with pytest.raises(TypeError, match=r"language model head, got .*Model"):
        prefill(model.model, prompt(1, 4))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_forced_mode_that_a_later_chunk_would_break_is_refused_before_the_first(
    model: PreTrainedModel, kind: str
):
    with enabling(model, "dense"):
        cache = make_cache(kind, model, TOPK + 1)
        with pytest.raises(ValueError, match="dense"):
            prefill(model, prompt(1, TOPK + 1), cache, chunk_size=5)
        assert cache.get_seq_length() == 0
        fitting = make_cache(kind, model, TOPK)
        prefill(model, prompt(1, TOPK), fitting, chunk_size=5)
        assert fitting.get_seq_length() == TOPK


def test_a_bar_on_stderr_counts_tokens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("rich")
    model = _tiny.tiny_model("glm_moe_dsa", num_hidden_layers=1, indexer_types=["full"])
    prefill(model, prompt(1, 12), chunk_size=5)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    prefill(model, prompt(1, 12), chunk_size=12)
    prefill(model, prompt(1, 12), chunk_size=5, progress=False)
    assert capsys.readouterr() == ("", "")
    prefill(model, prompt(1, 12), chunk_size=5)
    out, err = capsys.readouterr()
    assert out == ""
    assert "12/12" in err


@pytest.mark.slow
def test_64_ki_tokens_take_under_128_mib_beyond_the_model():
    """The scores of one pass would be 16 GiB for each head of the indexer."""
    tokens, workspace = 64 << 10, 64 << 20
    model = dsafx.enable(
        _tiny.tiny_model(
            "glm_moe_dsa",
            num_hidden_layers=1,
            indexer_types=["full"],
            hidden_size=32,
            num_attention_heads=2,
            num_key_value_heads=2,
            index_n_heads=2,
            index_head_dim=8,
            max_position_embeddings=tokens,
        )
    )
    ids = torch.randint(2, _tiny.VOCAB, (1, tokens))
    prefill(model, ids[:, :512], chunk_size=128)
    measure = measuring()
    with dsafx.ops.options(workspace_bytes=workspace):
        trial = measure.try_out(lambda: prefill(model, ids), measure.Rules())
    if trial.extra_bytes is None:
        pytest.skip("the system does not tell peak memory")
    assert trial.value.cache.get_seq_length() == tokens
    assert bool(trial.value.logits.isfinite().all())
    assert trial.extra_bytes < 128 << 20


def measuring() -> Any:
    """The module that the benchmarks measure with; a wheel does not hold it."""
    folder = Path(__file__).parents[1] / "benchmarks"
    if not folder.is_dir():
        pytest.skip("needs the repository: a wheel holds no benchmarks")
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("_measure")
    finally:
        sys.path.remove(str(folder))
