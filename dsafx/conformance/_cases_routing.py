"""Cases of routing: what a declaration must have, and which routes are illegal (class A)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..ops import routing
from ..ops.routing import BatchFacts, KernelCapabilities, LayerCapabilities, Route, Selection
from ._adapters import Adapters, Declaration
from ._case import Case, Fault, Size
from ._faults import around
from ._inputs import int32

TOPK = 2048
_MHA = (Route.DENSE_MHA, Route.MASKED_MHA)
_LENGTHS = (1, 118, 205, TOPK - 1, TOPK, TOPK + 1, 10_000)


def _spec(
    layer: LayerCapabilities | None = None,
    kernels: KernelCapabilities | None = None,
    **config: Any,
) -> routing.RouteSpec:
    return routing.RouteSpec(
        layer=LayerCapabilities(True, True) if layer is None else layer,
        kernels=KernelCapabilities(True, True, True) if kernels is None else kernels,
        config=routing.RouteConfig(**config),
        topk=TOPK,
        num_heads=64,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        kv_lora_rank=512,
    )


def _prefills(**facts: Any) -> tuple[BatchFacts, ...]:
    return tuple(BatchFacts(length, length, **facts) for length in _LENGTHS)


@dataclass(frozen=True)
class _Ruling:
    """Facts for which some routes, or some forms of a selection, are illegal."""

    spec: routing.RouteSpec
    facts: tuple[BatchFacts, ...]
    routes: tuple[Route, ...] = ()
    selections: tuple[Selection, ...] = ()

    def check(self, adapters: Adapters, size: Size) -> None:
        for facts in self.facts:
            decision = adapters.decide(self.spec, facts)
            assert decision.route is not Route.DEFER, f"nothing is decided for {facts}"
            assert decision.route not in self.routes, f"{decision} is illegal for {facts}"
            assert decision.selection not in self.selections, f"{decision} is wrong for {facts}"


def _ruling(
    name: str,
    rules: tuple[str, ...],
    classes: tuple[str, ...],
    ruling: _Ruling,
    fault: Fault,
) -> Case:
    return Case(name, rules, classes, ("decide",), ruling.check, fault)


def _blind_to(**changes: Any) -> Fault:
    """A decision that takes these facts for other ones."""
    return around("decide", lambda right, a: right(a["spec"], replace(a["facts"], **changes)))


def _respecified(change: Callable[[routing.RouteSpec], routing.RouteSpec]) -> Fault:
    return around("decide", lambda right, a: right(change(a["spec"]), a["facts"]))


def _reconfigured(**changes: Any) -> Fault:
    return _respecified(lambda spec: replace(spec, config=replace(spec.config, **changes)))


def _own(adapters: Adapters) -> Declaration:
    if adapters.declaration is None:
        raise NotImplementedError(f"{adapters.name} has no declaration")
    return adapters.declaration


def _check_layer(adapters: Adapters, size: Size) -> None:
    try:
        routing.check_declaration(_own(adapters).layer)
    except TypeError as error:
        raise AssertionError(str(error)) from error


def _check_kernels(adapters: Adapters, size: Size) -> None:
    kernels, dims = _own(adapters).kernels, adapters.dims
    q = torch.ones(2, dims.heads, dims.latent + dims.rope, device=adapters.device)
    v = q[..., : dims.latent].contiguous()
    ks, ke = int32(adapters, [0, 0]), int32(adapters, [1, 2])
    table = torch.tensor([[0, -1], [0, 1]], dtype=torch.int32, device=adapters.device)
    calls = {
        "dense": (kernels.dense_mha, (q, q, v, ks, ke, 2, 0.1)),
        "masked": (kernels.masked_mha, (q, q, v, table, ks, ke, 0.1)),
    }
    for name, (claimed, args) in calls.items():
        if claimed:
            function = vars(adapters)[name]
            assert function is not None, f"{name}_mha is declared, and there is no {name}"
            _, lse = function(*args)
            given = lse is not None and tuple(lse.shape) == (2, dims.heads)
            assert given or not kernels.returns_lse, f"returns_lse is declared, {name} has none"


def _check_subclass(adapters: Adapters, size: Size) -> None:
    """A subclass of the layer, which declares nothing itself, takes no route but top-k MQA."""
    kind = type(_own(adapters).layer)
    heir: object = object.__new__(type(f"HeirOf{kind.__name__}", (kind,), {}))
    layer = routing.declared(heir)
    _Ruling(_spec(layer=layer), _prefills(), routes=_MHA).check(adapters, size)


class _Unfed:
    """Declares dense MHA and has nothing to expand its latents with."""

    dsa_capabilities = LayerCapabilities(dense_mha=True)


def _all_layers(spec: routing.RouteSpec) -> routing.RouteSpec:
    return replace(spec, layer=LayerCapabilities(True, True))


def _without_kernels(adapters: Adapters) -> Adapters:
    layer = None if adapters.declaration is None else adapters.declaration.layer
    everything = Declaration(layer, KernelCapabilities(True, True, True))
    return replace(adapters, dense=None, masked=None, declaration=everything)


def _undeclared_layer(adapters: Adapters) -> Adapters:
    return replace(adapters, declaration=Declaration(_Unfed(), _own(adapters).kernels))


def _closed_above_topk(right: Any, a: Any) -> routing.Decision:
    decision: routing.Decision = right(a["spec"], a["facts"])
    return replace(decision, selection=Selection.CLOSED)


def _length_of_the_new_tokens(right: Any, a: Any) -> routing.Decision:
    facts = a["facts"]
    decision: routing.Decision = right(a["spec"], replace(facts, max_kv_len=facts.max_query_len))
    return decision


CASES = (
    Case(
        "a layer has what its declaration requires",
        rules=("C2",),
        classes=("A3", "A13"),
        needs=("declaration",),
        check=_check_layer,
        fault=_undeclared_layer,
    ),
    Case(
        "kernels that are declared are there and return what is declared",
        rules=("C2",),
        classes=("A3", "H5"),
        needs=("declaration",),
        check=_check_kernels,
        fault=_without_kernels,
    ),
    Case(
        "a subclass of the layer inherits no capability",
        rules=("C2",),
        classes=("A1", "A3"),
        needs=("declaration", "decide"),
        check=_check_subclass,
        fault=_respecified(_all_layers),
    ),
    _ruling(
        "a layer that declares nothing takes top-k MQA at every length",
        ("C2", "C3"),
        ("A1",),
        _Ruling(_spec(layer=LayerCapabilities()), _prefills(), routes=_MHA),
        _respecified(_all_layers),
    ),
    _ruling(
        "kernels that declare nothing take top-k MQA at every length",
        ("C2", "C3"),
        ("A3", "A12"),
        _Ruling(_spec(kernels=KernelCapabilities()), _prefills(), routes=_MHA),
        _respecified(lambda spec: replace(spec, kernels=KernelCapabilities(True, True, True))),
    ),
    _ruling(
        "sharded keys need a log-sum-exp",
        ("C3", "C16"),
        ("A4", "H5"),
        _Ruling(
            _spec(kernels=KernelCapabilities(True, True), decode_context_parallel=2),
            _prefills(),
            routes=_MHA,
        ),
        _reconfigured(decode_context_parallel=1),
    ),
    _ruling(
        "a cached prefix counts as keys",
        ("C3",),
        ("A5", "E9"),
        _Ruling(
            _spec(layer=LayerCapabilities(dense_mha=True)),
            tuple(BatchFacts(TOPK + new, new) for new in (16, 500, TOPK)),
            routes=(Route.DENSE_MHA,),
        ),
        around("decide", _length_of_the_new_tokens),
    ),
    _ruling(
        "dense attention ends at index_topk whatever the tokens packed",
        ("C3",),
        ("A6", "A11"),
        _Ruling(
            _spec(),
            tuple(BatchFacts(length, length) for length in (TOPK + 1, 4096, 10_000)),
            routes=(Route.DENSE_MHA,),
        ),
        _respecified(lambda spec: replace(spec, topk=10_240)),
    ),
    _ruling(
        "a selection of rows above index_topk is scored",
        ("C1", "C3"),
        ("A1", "A2"),
        _Ruling(
            _spec(mode="sparse"),
            tuple(BatchFacts(length, length) for length in (TOPK + 1, 10_000)),
            selections=(Selection.NONE, Selection.CLOSED),
        ),
        around("decide", _closed_above_topk),
    ),
    _ruling(
        "nothing captured without a bound depends on the batch's lengths",
        ("C6",),
        ("A7",),
        _Ruling(_spec(), _prefills(captured=True), _MHA, (Selection.NONE, Selection.CLOSED)),
        _blind_to(captured=False),
    ),
    _ruling(
        "a captured step may meet rows as long as its bound",
        ("C6",),
        ("A7",),
        _Ruling(
            _spec(),
            (BatchFacts(4, 4, captured=True, capture_bound=TOPK + 1),),
            (Route.DENSE_MHA,),
            (Selection.NONE, Selection.CLOSED),
        ),
        _blind_to(captured=False),
    ),
    _ruling(
        "a selection from elsewhere is read",
        ("C3", "C15"),
        ("A9", "F3"),
        _Ruling(
            _spec(),
            _prefills(own_selection=False),
            (Route.DENSE_MHA,),
            (Selection.NONE, Selection.CLOSED),
        ),
        _blind_to(own_selection=True),
    ),
    _ruling(
        "a mask operand rules out dense attention and the closed form",
        ("C3", "C13"),
        ("E8", "B6"),
        _Ruling(
            _spec(),
            _prefills(masked=True),
            (Route.DENSE_MHA,),
            (Selection.NONE, Selection.CLOSED),
        ),
        _blind_to(masked=False),
    ),
    _ruling(
        "a selection is produced while anyone else consumes it",
        ("C5",),
        ("A2", "A9"),
        _Ruling(_spec(), _prefills(other_consumers=True), selections=(Selection.NONE,)),
        _blind_to(other_consumers=False),
    ),
    _ruling(
        "a selection is produced under prefill context parallel",
        ("C5",),
        ("A2", "H2"),
        _Ruling(_spec(prefill_context_parallel=2), _prefills(), selections=(Selection.NONE,)),
        _reconfigured(prefill_context_parallel=1),
    ),
    _ruling(
        'mode="sparse" takes top-k MQA at every length',
        ("C4",),
        ("A4",),
        _Ruling(_spec(mode="sparse"), _prefills(), routes=_MHA),
        _reconfigured(mode="auto"),
    ),
    _ruling(
        "batch invariance takes top-k MQA at every length",
        ("C11",),
        ("C7",),
        _Ruling(_spec(batch_invariant=True), _prefills(), routes=_MHA),
        _reconfigured(batch_invariant=False),
    ),
)
