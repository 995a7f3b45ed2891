"""Unmodified transformers models: what Dynamo makes of them, and how they compile and compare."""

from __future__ import annotations

import copy
import importlib
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from _tiny import TOPK, deepseek_config, left_padding, prompt, tiny_model
from torch import Tensor, fx, nn
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from dsafx.passes._report import PassReport

# Two layers, the second of which selects (DeepSeek) or shares the selection of the first (GLM).
TWO_LAYERS: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"num_hidden_layers": 2},
    "glm_moe_dsa": {"num_hidden_layers": 2, "indexer_types": ["full", "shared"]},
}
ONE_LAYER: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"num_hidden_layers": 1},
    "glm_moe_dsa": {"num_hidden_layers": 1, "indexer_types": ["full"]},
}
CACHE_LENGTH = 64


def small_model(
    family: str, attention: str = "sdpa", sizes: dict[str, Any] | None = None, **changes: Any
) -> PreTrainedModel:
    """A model of two layers, or of other ``sizes``, that nobody enabled."""
    model = tiny_model(family, **(TWO_LAYERS[family] if sizes is None else sizes), **changes)
    model.set_attn_implementation(attention)
    return model


def make_cache(kind: str, model: PreTrainedModel) -> Cache | None:
    """A ``none``, ``dynamic`` or ``static`` cache."""
    if kind == "none":
        return None
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=CACHE_LENGTH)


def dynamo_graphs(
    function: Callable[..., Any], run: Callable[[Callable[..., Any]], Any], **settings: Any
) -> list[fx.Graph]:
    """What Dynamo hands to a backend while ``run`` calls the compiled ``function``, run eagerly."""
    graphs: list[fx.Graph] = []

    def keep(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(gm.graph)
        return gm.forward

    run(torch.compile(function, backend=keep, fullgraph=True, **settings))
    return graphs


def graph_of(
    model: PreTrainedModel,
    phase: str = "prefill",
    cache: str = "none",
    length: int = 2 * TOPK,
    padded: bool = False,
    dynamic: bool | None = None,
    **arguments: Any,
) -> fx.Graph:
    """The Dynamo graph of a prefill, or of the decode step after an eager one."""
    held = make_cache(cache, model)
    start = length if phase == "decode" else 0
    stop = start + 1 if phase == "decode" else length
    mask = left_padding(stop, 0, 5) if padded else None
    settings = {"cache": held, "use_cache": held is not None, **arguments}

    def run(compiled: Callable[..., Any]) -> None:
        if start:
            seen = None if mask is None else mask[:, :start]
            model(prompt(2, start), attention_mask=seen, **settings)
        given = {"attention_mask": mask, **settings}
        compiled(prompt(2, stop)[:, start:], **given)

    with torch.no_grad():
        (graph,) = dynamo_graphs(model, run, dynamic=dynamic)
    return graph


@cache
def _known_graph(family: str, attention: str, settings: tuple[tuple[str, Any], ...]) -> fx.Graph:
    return graph_of(small_model(family, attention), **dict(settings))


def small_graph(family: str, attention: str = "sdpa", **settings: Any) -> fx.Graph:
    """A copy of the graph of a model of two layers, which is traced once."""
    return copy.deepcopy(_known_graph(family, attention, tuple(sorted(settings.items()))))


def became(report: PassReport) -> dict[str, Counter[str]]:
    """The ops that stand in each layer now, by the number of the layer or else its path."""
    found: dict[str, Counter[str]] = {}
    for path, text in report.became:
        number = re.search(r"layers\.(\d+)\.self_attn$", path)
        ops = found.setdefault(number[1] if number else path, Counter())
        for part in text.split(", "):
            count, _, op = part.rpartition(" ")
            ops[op] += int(count or 1)
    return found


def groups(report: PassReport) -> dict[str, str]:
    """For each recognised layer, whether it selects and attends; norms and rotations aside."""
    names = {"index_select": "selects", "mla_attention": "attends"}
    return {
        layer: " and ".join(
            f"{does}" if ops[op] == 1 else f"{does} {ops[op]} times"
            for op, does in names.items()
            if ops[op]
        )
        for layer, ops in became(report).items()
    }


def calls(graph: fx.Graph, name: str) -> list[fx.Node]:
    """Nodes that call the function or method ``name``."""
    return [
        node
        for node in graph.nodes
        if node.op in ("call_function", "call_method")
        and (node.target if node.op == "call_method" else node.target.__name__) == name
    ]


class Wrapped(nn.Module):
    """A module around an attention layer, so that its graph says what the layer is."""

    def __init__(self, self_attn: nn.Module) -> None:
        super().__init__()
        self.self_attn = self_attn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.self_attn(*args, **kwargs)


def layer_inputs(model: PreTrainedModel, length: int, batch: int = 2) -> tuple[Tensor, Any, Tensor]:
    """Hidden states, RoPE angles and a causal mask [batch, 1, length, length] for one layer."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(batch, length, model.config.hidden_size, generator=generator)
    positions = torch.arange(length)
    mask = (positions <= positions[:, None]).expand(batch, 1, length, length)
    return hidden, model.model.rotary_emb(hidden, positions[None]), mask


def other_model(module: str, name: str, config: str, **changes: Any) -> PreTrainedModel:
    """A tiny model of another class of transformers: two layers, no experts, in eval mode."""
    source = f"transformers.models.{module}"
    known = deepseek_config(num_hidden_layers=2).to_dict()
    sizes = {key: known[key] for key in _COMMON_SIZES} | {"mlp_layer_types": ["dense"] * 2}
    config_class = getattr(importlib.import_module(f"{source}.configuration_{module}"), config)
    model_class = getattr(importlib.import_module(f"{source}.modeling_{module}"), name)
    torch.manual_seed(0)
    model: PreTrainedModel = model_class(config_class(**sizes | changes))
    return model.eval()


_COMMON_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "n_routed_experts"),
    *("num_experts_per_tok", "n_group", "topk_group", "q_lora_rank", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_n_heads", "index_head_dim"),
    *("index_topk", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"),
)
