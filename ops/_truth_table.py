"""The tables of the routing contract, made by asking ``decide`` and never written by hand."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ._backends import known_backends
from ._capabilities import KernelCapabilities, LayerCapabilities, declared
from ._cost import thresholds
from ._decide import decide
from ._route_spec import RouteConfig, RouteSpec
from ._route_types import BatchFacts, Compare

_GLM = RouteSpec(
    layer=LayerCapabilities(dense_mha=True, masked_mha=True),
    kernels=KernelCapabilities(dense_mha=True, masked_mha=True, returns_lse=True),
    config=RouteConfig(),
    topk=2048,
    num_heads=64,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    kv_lora_rank=512,
)
_DEEPSEEK = replace(_GLM, num_heads=128, qk_nope_head_dim=128, v_head_dim=128)


class _DenseLayer:
    dsa_capabilities = LayerCapabilities(dense_mha=True, masked_mha=True)
    kv_b_weight = None


class _InheritingLayer(_DenseLayer):
    """Declares nothing; what its base declares does not count."""


@dataclass(frozen=True)
class _Case:
    """Rows of the table: one name, and the lengths (keys, query) that it is asked at."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    spec: RouteSpec = _GLM
    facts: dict[str, object] = field(default_factory=dict)
    le: Compare = operator.le


def _unknown(a: object, b: object) -> bool | None:
    return None


def _config(**settings: object) -> RouteSpec:
    return replace(_GLM, config=RouteConfig(**settings))  # type: ignore[arg-type]


def _kernels(name: str, hardware: str) -> RouteSpec:
    rows = {(backend.name, backend.hardware): backend for backend in known_backends()}
    return replace(_GLM, kernels=rows[name, hardware].kernels)


_SHORT = ((1024, 1024),)
_BOTH = ((2048, 2048), (2049, 2049))
_NO_MASKED = replace(_GLM, layer=LayerCapabilities(dense_mha=True))
_SHARDED = RouteConfig(decode_context_parallel=2)
_NO_LSE = KernelCapabilities(dense_mha=True, masked_mha=True)


def _cases() -> Iterator[_Case]:
    yield _Case("fresh prefill", (*_SHORT, *_BOTH, (3300, 3300), (9000, 9000)))
    yield _Case("chunk behind a cached prefix", ((2048, 16), (2048, 640), (4016, 16)))
    yield _Case("decode row", ((1024, 1), (9000, 1)))
    yield _Case("fresh prefill, no masked MHA", ((2049, 2049),), _NO_MASKED)
    inheriting = replace(_GLM, layer=declared(_InheritingLayer()))
    yield _Case(
        "layer declares nothing, its base declares dense",
        ((97, 97), *_BOTH, (9000, 1)),
        inheriting,
    )
    yield _Case(
        "FlashInfer SM120: kernels declare nothing",
        ((127, 127), (128, 128), (129, 129), (3300, 3300)),
        _kernels("FlashInfer sparse MLA", "SM120"),
    )
    yield _Case(
        "another consumer reads the selection", _BOTH, _NO_MASKED, {"other_consumers": True}
    )
    yield _Case("prefill context parallel", _BOTH, _config(prefill_context_parallel=2))
    yield _Case("keys sharded, kernels return the LSE", _SHORT, replace(_GLM, config=_SHARDED))
    yield _Case("keys sharded, no LSE", _SHORT, replace(_GLM, config=_SHARDED, kernels=_NO_LSE))
    yield _Case("foreign selection", _SHORT, _NO_MASKED, {"own_selection": False})
    yield _Case("mask operand", _SHORT, _NO_MASKED, {"masked": True})
    yield _Case(
        "masked kernel above its workspace", ((3300, 3300),), _GLM, {"masked_bytes": 1 << 40}
    )
    yield _Case('mode="sparse"', _BOTH, _config(mode="sparse"))
    yield _Case("batch_invariant", _SHORT, _config(batch_invariant=True))
    yield _Case('mode="masked"', _BOTH, _config(mode="masked"))
    yield _Case(
        'mode="masked", layer without it',
        _SHORT,
        replace(_NO_MASKED, config=RouteConfig(mode="masked")),
    )
    yield _Case('mode="dense"', (*_BOTH, (1024, 1)), _config(mode="dense"))
    approximate = _config(mode="dense", allow_approximate=True)
    yield _Case('mode="dense", allow_approximate', ((2049, 2049),), approximate)
    yield _Case("the same, another consumer", _BOTH, approximate, {"other_consumers": True})
    yield _Case("dense_threshold=512", ((512, 512), (513, 513)), _config(dense_threshold=512))
    yield _Case(
        "dense_threshold=0", ((1, 1),), replace(_config(dense_threshold=0), layer=_NO_MASKED.layer)
    )
    captured: dict[str, object] = {"captured": True}
    yield _Case("captured, no bound", ((1024, 1024),), _GLM, captured)
    yield _Case("captured, bound 2048", ((1024, 1),), _GLM, captured | {"capture_bound": 2048})
    yield _Case("captured, bound 9000", ((1024, 1),), _GLM, captured | {"capture_bound": 9000})
    yield _Case(
        'captured, bound 2048, mode="dense"',
        ((1024, 1024),),
        _config(mode="dense"),
        captured | {"capture_bound": 2048},
    )
    yield _Case("lengths unknown to the compiler", ((1024, 1024),), _GLM, {}, _unknown)
    yield _Case("the same, layer declares nothing", ((1024, 1024),), inheriting, {}, _unknown)


def truth_table() -> str:
    """The answers of ``decide`` for GLM-5.2's dimensions and K = 2048, as a Markdown table.

    ``keys`` and ``query`` are ``max_kv_len`` and ``max_query_len`` of the segment. What a case
    does not name is full capability, ``mode="auto"`` and a selection of this step's own.
    """
    rows = []
    for case in _cases():
        for keys, query in case.lengths:
            facts = BatchFacts(keys, query, **case.facts)  # type: ignore[arg-type]
            rows.append((case.name, str(keys), str(query), *_answer(case, facts)))
    return table(("case", "keys", "query", "route", "selection", "reason"), rows)


def _answer(case: _Case, facts: BatchFacts) -> tuple[str, str, str]:
    try:
        decision = decide(case.spec, facts, case.le)
    except ValueError as error:
        _, _, refusal = str(error).partition(": ")
        return "ValueError", "", refusal.partition(";")[0]
    selection = decision.selection.name.lower()
    return decision.route.value, selection, decision.reason.value


def backend_table() -> str:
    """``known_backends()`` as a Markdown table."""
    mark: Callable[[bool], str] = {True: "yes", False: "no"}.__getitem__
    rows = [
        (
            backend.name,
            backend.hardware,
            mark(backend.kernels.dense_mha),
            mark(backend.kernels.masked_mha),
            mark(backend.kernels.returns_lse),
            backend.reason,
        )
        for backend in known_backends()
    ]
    return table(("kernels", "hardware", "dense MHA", "masked MHA", "LSE", "reason"), rows)


def threshold_table() -> str:
    """The integers of the cost model for two models, as a Markdown table."""
    rows = []
    for name, spec in (("DeepSeek-V3.2", _DEEPSEEK), ("GLM-5.2", _GLM)):
        limits = thresholds(spec)
        rows.append(
            (
                name,
                str(limits.dense_limit),
                str(limits.dense_min_query),
                str(limits.masked_max_kv),
            )
        )
    header = ("model", "dense_limit (keys)", "dense_min_query (tokens)", "masked_max_kv (keys)")
    return table(header, rows)


def document() -> str:
    """The text of ``docs/routing.md``: every table of the contract."""
    return f"""\
# Routing

Which kernel computes the attention of a segment, and what becomes of its selection. This page is
generated: `python -c "from dsafx import routing; print(routing.document(), end='')"`.

- **top-k MQA** absorbs the query and reads the selected latents. It is always legal.
- **dense MHA** expands the latents of all keys. It is the same function only while no row sees
  more than K = `index_topk` keys, and needs no selection.
- **masked MHA** expands them too and attends to the selected keys. It reads the selection.

A selection is *none* (nobody reads it), *closed* (every row is short: positions 0, 1, ... without
scoring) or *scored* (the selection op scores long rows and closes short ones; or the indices come
from elsewhere). Lengths are the longest request's, cached prefix included: a maximum, never a mean
or a packed sum.

## Decisions

Dimensions of GLM-5.2, K = 2048. Where a case says nothing else, the layer and its kernels declare
every route, `mode="auto"`, and the selection is this step's own.

{truth_table()}

## Thresholds

Computed once from the dimensions, with the weights of the `reference` provider. Dense MHA is
cheaper for a fresh prefill of any legal length, and behind a cached prefix from `dense_min_query`
new tokens on. Masked MHA is cheaper for a fresh prefill of at most `masked_max_kv` keys.

{threshold_table()}

## Known kernels

Flags are opt-in: what is not known to work counts as "no".

{backend_table()}
"""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, readable in a terminal; no newline at its end."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def text(cells: Sequence[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    return "\n".join([text(header), rule, *(text(row) for row in rows)])
