"""What a mask in a Dynamo graph says: causality, or a condition that stays a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _recognised import dynamo_graphs
from _tiny import left_padding, tiny_model
from torch import Tensor, fx
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import create_causal_mask

from dsafx.ops._requests import causal_intervals
from dsafx.passes._visibility import causality, condition

Q, KV = 5, 8


def mask_of(build: Callable[..., Tensor], *args: Any, dynamic: bool | None = None) -> fx.Node:
    """The node of the mask that ``build`` returns."""
    (graph,) = dynamo_graphs(build, lambda compiled: compiled(*args), dynamic=dynamic)
    (mask,) = graph.output_node().args[0]
    return mask


def ranges(shift: int = 0) -> tuple[Tensor, Tensor]:
    """Key positions [1, 1, 1, KV] and query positions [1, 1, Q, 1]."""
    return torch.arange(KV)[None, None, None], (torch.arange(Q) + shift)[None, None, :, None]


def plain(start: Tensor) -> Tensor:
    kv, q = ranges()
    return kv <= q + start


def expanded(start: Tensor) -> Tensor:
    return plain(start).expand(2, 1, Q, KV)


def with_a_true_condition(start: Tensor) -> Tensor:
    return plain(start) & start.new_ones((), dtype=torch.bool)


def with_a_true_condition_first(start: Tensor) -> Tensor:
    return start.new_ones((), dtype=torch.bool) & plain(start)


def with_packed_documents_that_are_one(start: Tensor) -> Tensor:
    """As transformers looks for documents in positions: a jump begins one."""
    positions = torch.arange(KV)[None]
    jumps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    document = jumps.cumsum(-1)
    rows = torch.arange(1)[:, None, None, None]
    same = document[rows, ranges()[1]] == document[rows, ranges()[0]]
    return plain(start) & same


def additive(start: Tensor) -> Tensor:
    blank = torch.zeros((), dtype=torch.float32)
    return torch.where(plain(start), blank, torch.finfo(torch.float32).min)


def cast(start: Tensor) -> Tensor:
    return plain(start).to(torch.bool)


@pytest.mark.parametrize(
    "build",
    [
        plain,
        expanded,
        with_a_true_condition,
        with_a_true_condition_first,
        with_packed_documents_that_are_one,
        additive,
        cast,
    ],
)
def test_causality_is_seen_and_its_intervals_say_what_the_mask_says(build: Callable[..., Tensor]):
    start = torch.tensor(2)
    found = causality(mask_of(build, start))
    assert found is not None
    assert found.compare.target.__name__ == "le"
    kv, q = ranges()
    mask = build(start)
    visible = mask if mask.dtype == torch.bool else mask == 0
    assert torch.equal(_marked(causal_intervals(kv, q + start)), visible[:1, 0])


def _marked(intervals: Tensor) -> Tensor:
    keys = torch.arange(KV)
    return (keys >= intervals[..., :1]) & (keys < intervals[..., 1:])


def strictly_before(start: Tensor) -> Tensor:
    kv, q = ranges()
    return kv < q + start


def from_the_second_key(start: Tensor) -> Tensor:
    kv, q = ranges()
    return kv + 1 <= q + start


def every_second_key(start: Tensor) -> Tensor:
    kv = torch.arange(0, 2 * KV, 2)[None, None, None]
    return kv <= ranges()[1] + start


def other_way(start: Tensor) -> Tensor:
    kv, q = ranges()
    return q + start <= kv


def with_another_condition(start: Tensor) -> Tensor:
    return plain(start) & (ranges()[0] > start)


def either_condition(start: Tensor) -> Tensor:
    return plain(start) | (ranges()[0] == 0)


def with_a_false_condition(start: Tensor) -> Tensor:
    positions = torch.arange(KV)[None]
    never = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    return plain(start) & never[:, None, None]


def with_packed_documents(start: Tensor) -> Tensor:
    """The first diff is a jump of two, and the others are none."""
    positions = torch.arange(KV)[None]
    jumps = torch.diff(positions, prepend=positions[:, :1] - 2, dim=-1) != 1
    document = jumps.cumsum(-1)
    rows = torch.arange(1)[:, None, None, None]
    return plain(start) & (document[rows, ranges()[1]] == document[rows, ranges()[0]])


def with_documents_by_second_differences(start: Tensor) -> Tensor:
    """They are 0 where the first ones are 1."""
    positions = torch.arange(KV + 1)[None]
    jumps = torch.diff(positions, 2, prepend=positions[:, :1] - 1, dim=-1) != 1
    document = jumps.cumsum(-1)
    rows = torch.arange(1)[:, None, None, None]
    return plain(start) & (document[rows, ranges()[1]] == document[rows, ranges()[0]])


def written_afterwards(start: Tensor) -> Tensor:
    mask = plain(start)
    mask[..., 0] = False
    return mask


def narrowed_in_place(start: Tensor) -> Tensor:
    mask = plain(start)
    kept = mask
    mask &= ranges()[0] > 0
    return kept


def wrapped_positions(start: Tensor) -> Tensor:
    """Position -1 is the last one, so that the first key has the highest number."""
    kv = (torch.arange(KV) + 1)[torch.arange(KV) - 1]
    return kv[None, None, None] <= ranges()[1] + start


def narrow_integers(start: Tensor) -> Tensor:
    kv = torch.arange(KV, dtype=torch.uint8)[None, None, None]
    return kv <= ranges()[1] + start


def soft(start: Tensor) -> Tensor:
    return torch.where(plain(start), torch.zeros((), dtype=torch.float32), -1.0)


def biased(start: Tensor) -> Tensor:
    return torch.where(plain(start), torch.ones(()), torch.finfo(torch.float32).min)


@pytest.mark.parametrize(
    "build",
    [
        strictly_before,
        from_the_second_key,
        every_second_key,
        other_way,
        with_another_condition,
        either_condition,
        with_a_false_condition,
        with_packed_documents,
        with_documents_by_second_differences,
        written_afterwards,
        narrowed_in_place,
        wrapped_positions,
        narrow_integers,
    ],
)
def test_any_other_condition_stays_a_mask(build: Callable[..., Tensor]):
    mask = mask_of(build, torch.tensor(2))
    assert causality(mask) is None
    assert condition(mask) is mask


@pytest.mark.parametrize("build", [soft, biased])
def test_a_bias_that_hides_no_key_is_no_condition(build: Callable[..., Tensor]):
    mask = mask_of(build, torch.tensor(2))
    assert causality(mask) is None
    assert condition(mask) is None


def test_behind_an_additive_mask_the_graph_shows_the_condition():
    def build(padding: Tensor) -> Tensor:
        blank = torch.zeros((), dtype=torch.float32)
        seen = plain(torch.tensor(2)) & padding[:, None, None]
        return torch.where(seen, blank, torch.finfo(torch.float32).min)

    mask = mask_of(build, torch.ones(2, KV, dtype=torch.bool))
    assert causality(mask) is None
    assert condition(mask) is mask.args[0]


def test_a_mask_from_outside_is_a_condition_only_if_it_is_bool():
    mask = mask_of(lambda mask: mask.contiguous(), torch.ones(2, 1, Q, KV, dtype=torch.bool))
    assert causality(mask) is None
    assert condition(mask) is mask
    assert condition(mask_of(lambda mask: mask + 1, torch.zeros(2, 1, Q, KV))) is None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("cache", [None, DynamicCache, StaticCache])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_the_masks_of_transformers(attention: str, cache: type | None, dynamic: bool, padded: bool):
    config = tiny_model("glm_moe_dsa", num_hidden_layers=1, indexer_types=["full"]).config
    config._attn_implementation = attention
    length = {"max_cache_len": 2 * KV} if cache is StaticCache else {}
    held = None if cache is None else cache(config=config, **length)
    padding = left_padding(KV, 0, 3) if padded else None

    def build(embeddings: Tensor) -> Tensor:
        positions = torch.arange(KV)[None]
        return create_causal_mask(
            config=config,
            inputs_embeds=embeddings,
            attention_mask=padding,
            past_key_values=held,
            position_ids=positions,
            allow_is_causal_skip=False,
        )

    mask = mask_of(build, torch.zeros(2, KV, 4), dynamic=dynamic)
    assert (causality(mask) is None) is padded
    assert condition(mask) is not None
