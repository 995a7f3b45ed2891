"""Masks given to traced code: it sees what eager code sees, and refuses what eager code refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _masks import (
    DOCUMENTS,
    LENGTH,
    ONE_ROW,
    SEEN,
    additive,
    assert_close,
    biased,
    logits,
    with_holes,
)
from _recognised import ONE_LAYER, small_model
from _tiny import left_padding, prompt
from torch import Tensor

from dsafx import enable

TRACED: dict[str, dict[str, Any]] = {
    "bool": {"attention_mask": SEEN},
    "one row for all tokens": {"attention_mask": ONE_ROW},
    "additive": {"attention_mask": additive(SEEN, -torch.inf)},
    "dict": {"attention_mask": {"indexed_attention": additive(SEEN, -torch.inf)}},
    "bool padding": {"attention_mask": left_padding(LENGTH, 0, 5).bool()},
    "float padding with holes": {"attention_mask": with_holes().float()},
    "documents": {"position_ids": DOCUMENTS},
    "looking ahead": {"is_causal": False},
}


SELDOM = ("bool", "dict", "bool padding", "one row for all tokens")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SELDOM else ()) for name in TRACED],
)
def test_traced_code_sees_what_eager_code_sees(name: str):
    check_traced("glm_moe_dsa", name, backend="eager")


@pytest.mark.slow
def test_inductor_code_sees_what_eager_code_sees():
    check_traced("deepseek_v32", "documents", backend="dsafx")


def check_traced(family: str, name: str, backend: str) -> None:
    model = small_model(family, sizes=ONE_LAYER[family])
    ids, given = prompt(2, LENGTH), {"use_cache": False, **TRACED[name]}
    expected = logits(model, ids, **given)
    compiled = torch.compile(enable(model), backend=backend, fullgraph=True)
    mask = given.get("attention_mask")
    rows = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
    assert_close(logits(compiled, ids, **given), expected, rows)


@pytest.mark.parametrize("backend", ["eager", pytest.param("dsafx", marks=pytest.mark.slow)])
def test_traced_code_refuses_a_bias_when_it_runs(backend: str):
    """The values are not known before; without a check they would be dropped silently."""
    model = enable(small_model("glm_moe_dsa", sizes=ONE_LAYER["glm_moe_dsa"]))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    ids, allowed = prompt(2, LENGTH), additive(SEEN, -torch.inf)
    logits(compiled, ids, attention_mask=allowed, use_cache=False)
    with pytest.raises(RuntimeError, match="bias on visible keys"):
        logits(compiled, ids, attention_mask=biased(), use_cache=False)
