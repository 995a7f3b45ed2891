"""What the README tells a new user to type does what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from _tiny import FAMILIES, TOPK, prompt, tiny_model
from transformers import AutoModelForCausalLM

import dsafx

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.skipif(not README.exists(), reason="needs the repository: a wheel holds no README")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_lines_generate_what_transformers_generates_and_disable_undoes_them(
    family: str, tmp_path: Path
):
    tiny_model(family).save_pretrained(tmp_path)
    code = re.search(r"^## Use\n\n```python\n(.*?)^```", README.read_text(), re.M | re.S)
    assert code is not None
    lines = code[1].replace("path/to/a/glm-5-or-deepseek-v3.2-checkpoint", str(tmp_path))
    ids = prompt(1, 3 * TOPK)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    names: dict[str, Any] = {"input_ids": ids}
    exec(lines, names)
    assert dsafx.enabled(names["model"])
    assert names["tokens"].shape[1] == ids.shape[1] + 100
    assert torch.equal(names["tokens"], plain.generate(ids, max_new_tokens=100))
    dsafx.disable(names["model"])
    with torch.no_grad():
        assert torch.equal(names["model"](ids).logits, plain(ids).logits)
