"""Models on one process and on several: what they answer, and their gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from _ranks import RANKS
from _tiny import TOPK, prompt
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

LENGTH = 3 * TOPK


def whole(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint).eval()


def sharded(checkpoint: Path) -> PreTrainedModel:
    split = DistributedConfig(tp_size=RANKS)
    return AutoModelForCausalLM.from_pretrained(checkpoint, distributed_config=split).eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(prompt(2, LENGTH)).logits


def tokens(model: PreTrainedModel) -> list[list[int]]:
    ids = prompt(2, LENGTH)
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    return out[:, LENGTH:].tolist()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        difference = (grad - expected[name]).abs().max()
        assert difference < 1e-4 * expected[name].abs().max(), name


def language_loss(model: PreTrainedModel) -> Tensor:
    ids = prompt(2, LENGTH)
    return model(ids, labels=ids).loss
