"""Start a process that compiles a model, and say what took how long: run as a program by a parent.

    python benchmarks/_pipeline_start.py '{"backend": "dsafx", "layers": 8, "tokens": 64}'

The model is GLM-5.2 of transformers, unmodified, at tiny dimensions, with the schedule of the real
one: three full layers, then one in four. The last line of the output is the answer as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from _families import TINY, Family
from transformers import GlmMoeDsaConfig, GlmMoeDsaModel, PreTrainedModel

from dsafx import routing


@dataclass(frozen=True)
class Order:
    """What a child is to compile.

    backend: "dsafx" or "inductor"; tokens: of the prompt.
    """

    backend: str
    layers: int
    tokens: int


@dataclass(frozen=True)
class Answer:
    """What a child found.

    start: seconds from ``torch.compile`` to the first result; passes: those of them in which the
        passes of this package ran.
    layers: attention layers that became ops of this package. graphs: how many were compiled.
    hits: how many of them came from the cache. refused: why a graph was put back as it came.
    """

    start: float
    passes: float
    layers: int
    graphs: int
    hits: int
    refused: list[str]


def model(layers: int) -> PreTrainedModel:
    """GLM-5.2 with dense MLPs, the same weights in each process."""
    torch.manual_seed(0)
    schedule = routing.index_schedule(layers, index_topk_freq=4, index_skip_topk_offset=3)
    config = GlmMoeDsaConfig(
        **asdict(TINY[Family.GLM]),
        vocab_size=128,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_key_value_heads=TINY[Family.GLM].num_attention_heads,
        first_k_dense_replace=layers,
        mlp_layer_types=["dense"] * layers,
        indexer_types=list(schedule),
        attn_implementation="sdpa",
    )
    return GlmMoeDsaModel(config).eval()


@contextlib.contextmanager
def timed_passes() -> Iterator[list[float]]:
    """Seconds of each run of a pass object of this package over one graph."""
    from dsafx.passes import pipeline

    seconds: list[float] = []

    def timed(run: Any) -> Any:
        @functools.wraps(run)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            start = time.perf_counter()
            run(*args, **kwargs)
            seconds.append(time.perf_counter() - start)

        return wrapper

    classes: tuple[Any, ...] = (pipeline.Recogniser, pipeline.Pipeline)
    originals = [each.__call__ for each in classes]
    for each in classes:
        each.__call__ = timed(each.__call__)
    try:
        yield seconds
    finally:
        for each, original in zip(classes, originals, strict=True):
            each.__call__ = original


def start(order: Order) -> Answer:
    """Compile the model and run it once."""
    from torch._dynamo.utils import counters

    from dsafx.passes import collect

    subject = model(order.layers)
    tokens = torch.arange(order.tokens)[None] % 128
    with torch.no_grad(), collect() as reports, timed_passes() as seconds:
        begin = time.perf_counter()
        compiled = torch.compile(subject, backend=order.backend, fullgraph=True)
        compiled(tokens, use_cache=False)
        total = time.perf_counter() - begin
    found = counters["inductor"]
    hits, misses = found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]
    return Answer(
        start=total,
        passes=sum(seconds),
        layers=sum(report.before.count("dsafx.mla_attention(") for report in reports),
        graphs=hits + misses,
        hits=hits,
        refused=[report.problem for report in reports if report.problem is not None],
    )


if __name__ == "__main__":
    print(json.dumps(asdict(start(Order(**json.loads(sys.argv[1]))))))
