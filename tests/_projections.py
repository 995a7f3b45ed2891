"""A model of one projection, plain or with adapters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

IN, OUT = 24, 40
NAME = "kv_b_proj of layer 5"


class Holder(nn.Module):
    """What a library replaces the projection of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.kv_b_proj = nn.Linear(IN, OUT, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.kv_b_proj(x)


def lora(holder: Holder | None = None, **settings: object) -> Holder:
    """Two adapters, both of them active."""
    peft = pytest.importorskip("peft")
    holder = Holder() if holder is None else holder
    config = {"target_modules": ["kv_b_proj"], "init_lora_weights": False, **settings}
    model = peft.get_peft_model(holder, peft.LoraConfig(r=4, lora_alpha=6, **config))
    model.add_adapter("second", peft.LoraConfig(r=3, use_rslora=True, **config))
    model.base_model.set_adapter(["default", "second"])
    return holder.eval()
