"""A captured step that is one attention layer on packed caches, and batches for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from _capture import Recorder
from _packed_layer import CAPACITY
from _tiny import TOPK
from torch import Tensor

from dsafx.models import DSAAttention
from dsafx.models.captured import CapturedStep, CapturedVariant, Outputs, RowInput
from dsafx.ops import providers, routing

DECODE = CapturedVariant("decode", tokens=4, capture_bound=CAPACITY, max_query_len=1)
SHORT = CapturedVariant("short", tokens=TOPK, capture_bound=TOPK)
LONG = CapturedVariant("long", tokens=32, capture_bound=CAPACITY)
VARIANTS = (DECODE, SHORT, LONG)

# The layer writes every row, those of padding to this row of the caches, which nobody sees.
NOWHERE = CAPACITY
ROWS = {
    "hidden_states": RowInput((64,), torch.float32),
    "cos": RowInput((4,), torch.float32),
    "sin": RowInput((4,), torch.float32),
    "ks": RowInput((), torch.int32),
    "ke": RowInput((), torch.int32),
    "write_positions": RowInput((), torch.int64, padding=NOWHERE),
}

# Requests of two prompts, which fill the cache from row 0 and from row 40: the first cache row, the
# cached tokens and the new ones. A step is the variant that serves it, and its requests.
STEPS = (
    ("short", [(0, 0, 10)]),
    ("short", [(40, 0, 12)]),
    ("long", [(0, 10, 22), (40, 12, 8)]),
    ("decode", [(0, 32, 1), (40, 20, 1)]),
    ("long", [(0, 33, 5)]),
    ("decode", [(40, 21, 1)]),
)


def new_caches() -> dict[str, Tensor]:
    widths = {"kv_c_cache": 32, "k_pe_cache": 8, "index_k_cache": 16}
    return {name: torch.full((CAPACITY + 1, width), float("nan")) for name, width in widths.items()}


def batch(*requests: tuple[int, int, int]) -> tuple[dict[str, Tensor], int, int]:
    """The inputs and facts of a step; the tokens of a request are a function of their place."""
    hidden = torch.randn(CAPACITY, 64, generator=torch.Generator().manual_seed(7))
    angles = torch.arange(CAPACITY * 4).view(CAPACITY, 4) * 0.1
    places = [torch.arange(first + old, first + old + new) for first, old, new in requests]
    firsts = [torch.full((new,), first) for first, _, new in requests]
    at, first = torch.cat(places), torch.cat(firsts)
    rows = {
        "hidden_states": hidden[at],
        "cos": angles[at - first].cos(),
        "sin": angles[at - first].sin(),
        "ks": first.int(),
        "ke": (at + 1).int(),
        "write_positions": at,
    }
    return rows, max(old + new for _, old, new in requests), max(new for _, _, new in requests)


def layer_step(layer: DSAAttention, caches: dict[str, Tensor]):
    def step(rows: Mapping[str, Tensor], facts: routing.BatchFacts) -> Outputs:
        return layer(
            rows["hidden_states"],
            rows["cos"],
            rows["sin"],
            rows["ks"],
            rows["ke"],
            facts.max_kv_len,
            facts.max_query_len,
            **caches,
            write_positions=rows["write_positions"],
        )

    return step


def spec_of(layer: DSAAttention) -> routing.RouteSpec:
    kernels = providers.kernel_capabilities("cpu")
    return layer.config.route_spec(layer.routing.capabilities, kernels, layer.routing.route)


def captured_layer(
    layer: DSAAttention, caches: dict[str, Tensor], variants=VARIANTS, strict: bool = False
) -> tuple[CapturedStep, Recorder]:
    recorder = Recorder(strict)
    step = CapturedStep(
        layer_step(layer, caches),
        variants,
        ROWS,
        spec_of(layer),
        "cpu",
        other_consumers=layer.config.is_followed(layer.layer_idx),
        capture=recorder,
    )
    return step, recorder
