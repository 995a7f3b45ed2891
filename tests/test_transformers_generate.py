"""``generate`` compiles its decode step through this package, by way of ``CompileConfig``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _tiny import TOPK, prompt, tiny_model
from _uncompiled import passes_only
from torch import Tensor
from torch._inductor.utils import fresh_cache
from transformers import CompileConfig, PreTrainedModel

import dsafx
from dsafx.passes import PipelineReport, collect

SHORT, LONG = TOPK - 7, 2 * TOPK
FEW_LAYERS = {"num_hidden_layers": 2, "indexer_types": ["full", "shared"]}


def generate(model: PreTrainedModel, length: int, compile_config: CompileConfig | None) -> Tensor:
    """Six greedy tokens after a prompt of ``length``, with a static cache."""
    if compile_config is not None:
        # Without it, generate compiles on accelerators only.
        compile_config._compile_all_devices = True
    ids = prompt(1, length)
    settings: Any = {"do_sample": False, "cache_implementation": "static", "max_new_tokens": 6}
    with torch.no_grad():
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), compile_config=compile_config, **settings
        )


def check_generate(*lengths: int, **compile_config: Any) -> list[PipelineReport]:
    plain = tiny_model("glm_moe_dsa", **FEW_LAYERS)
    ours = dsafx.enable(tiny_model("glm_moe_dsa", **FEW_LAYERS))
    with fresh_cache(), collect() as reports:
        for length in lengths:
            found = generate(ours, length, CompileConfig(**compile_config))
            assert torch.equal(found, generate(plain, length, None))
    return [report for report in reports if "dsafx." in report.before]


def test_generate_takes_our_backend_and_options_from_a_compile_config():
    options = {"fuse": "always", "strict": True}
    (report,) = check_generate(LONG, backend=passes_only, mode=None, options=options)
    assert report.of("verify").declined == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compile_config", "ours"),
    [
        ({"backend": "dsafx"}, False),
        ({"backend": "dsafx", "mode": "max-autotune-no-cudagraphs", "fullgraph": True}, False),
        ({"backend": "dsafx", "mode": None, "options": {"fuse": "always", "strict": True}}, False),
        ({"backend": "inductor", "mode": None}, True),
    ],
)
def test_generate_through_inductor_compiles_its_decode_step_once(
    compile_config: dict[str, Any], ours: bool
):
    """The first is the default of transformers: it sends ``mode="reduce-overhead"``."""
    options = {"options": dsafx.inductor_options()} if ours else {}
    assert len(check_generate(SHORT, SHORT, **compile_config, **options)) == 1
