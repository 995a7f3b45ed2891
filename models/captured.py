"""A step captured in several sizes, and which of them serves a batch (contract C6).

An engine captures its step once for each of a few static sizes and pads every batch to one of
them. A graph holds one route, so lengths must be known to choose it: each variant declares the
most keys that a row may see, and ``routing.decide`` chooses from what is declared. A short prefill
then keeps its dense route without scoring, a long one scores, and no batch is ever replayed on a
graph whose bound it exceeds::

    def step(rows: Mapping[str, Tensor], facts: BatchFacts) -> Outputs:
        return layer(
            rows["hidden_states"], rows["cos"], rows["sin"], rows["ks"], rows["ke"],
            facts.max_kv_len, facts.max_query_len,
            **caches, write_positions=rows["write_positions"],
        )

    captured = CapturedStep(
        step,
        variants=[
            CapturedVariant("decode", tokens=64, capture_bound=131072, max_query_len=1),
            CapturedVariant("short", tokens=2048, capture_bound=2048),
            CapturedVariant("long", tokens=2048, capture_bound=131072),
        ],
        inputs={"hidden_states": RowInput((hidden,), torch.bfloat16), ...},
        spec=spec,
        device="cuda",
    )
    out, indices = captured(rows, max_kv_len=1500, max_query_len=700)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ..ops import routing
from ..ops._options import current
from ._cuda_graphs import Capture, CUDAGraphs, Outputs
from ._row_inputs import RowBuffers, RowInput

__all__ = [
    "EAGER",
    "Capture",
    "CapturedStep",
    "CapturedVariant",
    "Outputs",
    "Plan",
    "RowInput",
    "Step",
]

EAGER = "eager"
"""Under which ``CapturedStep.counts`` counts batches that no variant serves."""

Step: TypeAlias = Callable[[Mapping[str, Tensor], routing.BatchFacts], Outputs]


@dataclass(frozen=True)
class CapturedVariant:
    """One captured form of a step, by its static sizes.

    Attributes:
        name: in plans and counts.
        tokens: rows of the graph.
        capture_bound: most keys that a row may see, cached ones included.
        max_query_len: most query tokens of a request: 1 for decode. None means ``tokens``.

    Raises:
        ValueError: a size below 1, more query tokens in a request than tokens, or a name that is
            empty or ``EAGER``.
    """

    name: str
    tokens: int
    capture_bound: int
    max_query_len: int | None = None

    def __post_init__(self) -> None:
        if self.name in ("", EAGER):
            raise ValueError(f"name must be neither empty nor {EAGER!r}, got {self.name!r}")
        for name in ("tokens", "capture_bound", "max_query_len"):
            value = vars(self)[name]
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.max_query_len is not None and self.max_query_len > self.tokens:
            raise ValueError(
                f"max_query_len must be at most tokens={self.tokens}, got {self.max_query_len}"
            )

    @property
    def query_bound(self) -> int:
        """``max_query_len``, given or not."""
        return self.tokens if self.max_query_len is None else self.max_query_len

    def refusal(self, tokens: int, max_kv_len: int, max_query_len: int) -> str | None:
        """Why a replay cannot serve a batch of these sizes, or None."""
        for got, most, what in (
            (tokens, self.tokens, "tokens"),
            (max_kv_len, self.capture_bound, "keys a row"),
            (max_query_len, self.query_bound, "query tokens a request"),
        ):
            if got > most:
                return f"{self.name} was captured for at most {most} {what}, got {got}"
        return None


@dataclass(frozen=True)
class Plan:
    """How a batch runs.

    Attributes:
        variant: which is replayed; None means that the step runs eagerly.
        decision: route and selection of what runs.
        reason: of the choice, as a sentence.
    """

    variant: CapturedVariant | None
    decision: routing.Decision
    reason: str


@dataclass(frozen=True)
class _Recorded:
    variant: CapturedVariant
    decision: routing.Decision
    replay: Callable[[], object]
    outputs: Outputs


class CapturedStep:
    """A step function, captured once for each variant; not for use by two threads at once.

    A graph is given its variant's declared sizes as the facts of its batch. They are constants, and
    bounds of every batch it is replayed for, so that nothing in it depends on a batch's lengths;
    and unlike ``captured=True``, which knows no query length, they let a prefill be seen as fresh.

    Args:
        step: takes the inputs and the host facts ``max_kv_len`` and ``max_query_len``, and must
            take both from there alone. What else it reads (weights, caches, a block table) must
            keep its address. Returns tensors of one row a token, or a tuple of such and None. On
            padding alone, which it is captured on, it must write nothing that matters.
        variants: captured from the largest to the smallest.
        inputs: what differs from batch to batch, by name.
        spec: of the layers in the step; see ``DSAConfig.route_spec``.
        device: where the step runs.
        other_consumers: whether anyone but a layer's own route reads its selection.
        capture: records a graph; None means CUDA graphs. On a CUDA device every op of the step must
            leave the device's values there. In ``mla_attention_paged`` dense and masked MHA then
            expand keys for every row of the block table: give each variant a table of its own size.

    Attributes:
        counts: batches served, by name of the variant, and by ``EAGER``.
        last: the plan of the last batch, or None before the first.

    Raises:
        ValueError: no variants or inputs, two variants of one name, a variant for which a forced
            mode is illegal, a step that returns something else, or ``capture=None`` where the
            device is not CUDA.
        NotImplementedError: the provider in use cannot be captured.
    """

    @torch.no_grad()
    def __init__(
        self,
        step: Step,
        variants: Sequence[CapturedVariant],
        inputs: Mapping[str, RowInput],
        spec: routing.RouteSpec,
        device: torch.device | str,
        other_consumers: bool = False,
        capture: Capture | None = None,
    ) -> None:
        device = torch.device(device)
        if not variants:
            raise ValueError("variants must name at least one, got none")
        (name, times), *_ = Counter(each.name for each in variants).most_common(1)
        if times > 1:
            raise ValueError(f"variants must have names of their own, got {name!r} {times} times")
        if capture is None and device.type != "cuda":
            raise ValueError(f"capture must be given on a device without CUDA graphs, got {device}")
        self._step = step
        self._spec = spec
        self._other_consumers = other_consumers
        decisions = {each.name: self._decision(each) for each in variants}
        by_size = sorted(variants, key=lambda each: each.tokens, reverse=True)
        self._buffers = RowBuffers(inputs, by_size[0].tokens, device)
        self.counts: Counter[str] = Counter()
        self.last: Plan | None = None
        record = CUDAGraphs(device) if capture is None else capture
        self._recorded = [self._record(each, decisions[each.name], record) for each in by_size]

    @torch.no_grad()
    def __call__(
        self, inputs: Mapping[str, Tensor], max_kv_len: int, max_query_len: int
    ) -> Outputs:
        """Run the step on a batch: on the cheapest graph that may, else eagerly.

        Args:
            inputs: [tokens, ...] each, of the dtypes and on the device that were declared.
            max_kv_len: host upper bound on the keys that a row sees, cached ones included.
            max_query_len: host upper bound on the query tokens of a request.

        Returns:
            What the step returns, for these tokens alone. The results of a replay are views that
            the next call overwrites.

        Raises:
            ValueError: names, shapes or devices of ``inputs`` that do not fit, a negative length,
                or a forced mode that is illegal for this batch. Nothing is written then.
            TypeError: a dtype that does not fit.
        """
        tokens = self._buffers.check(inputs)
        recorded, plan = self._plan(tokens, max_kv_len, max_query_len)
        self.last = plan
        if recorded is None:
            outputs = self._step(inputs, self._facts(max_kv_len, max_query_len))
        else:
            self._buffers.fill(inputs, tokens, recorded.variant.tokens)
            recorded.replay()
            outputs = _first_rows(recorded.outputs, tokens)
        self.counts[EAGER if plan.variant is None else plan.variant.name] += 1
        return outputs

    def plan(self, tokens: int, max_kv_len: int, max_query_len: int) -> Plan:
        """How a batch of these sizes would run.

        A variant is legal if none of its bounds is exceeded. Among these the fewest rows are
        cheapest; among variants of equal rows that which holds what ``routing.decide`` answers for
        the batch itself, and then the lowest bound.

        Raises:
            ValueError: a negative size, or a forced mode that is illegal for this batch.
        """
        if tokens < 0:
            raise ValueError(f"tokens must be at least 0, got {tokens}")
        return self._plan(tokens, max_kv_len, max_query_len)[1]

    @property
    def decisions(self) -> dict[str, routing.Decision]:
        """Route and selection that each variant's graph holds, by name."""
        return {each.variant.name: each.decision for each in self._recorded}

    def _plan(
        self, tokens: int, max_kv_len: int, max_query_len: int
    ) -> tuple[_Recorded | None, Plan]:
        wanted = routing.decide(self._spec, self._facts(max_kv_len, max_query_len))
        sizes = (tokens, max_kv_len, max_query_len)
        refusals = [each.variant.refusal(*sizes) for each in self._recorded]
        serving = [
            each for each, refusal in zip(self._recorded, refusals, strict=True) if refusal is None
        ]
        if not serving:
            return None, Plan(None, wanted, "; ".join(map(str, refusals)))
        chosen = min(
            serving,
            key=lambda each: (
                each.variant.tokens,
                _differs(each.decision, wanted),
                each.variant.capture_bound,
                each.variant.query_bound,
            ),
        )
        padding = chosen.variant.tokens - tokens
        reason = f"{chosen.variant.name} serves it with {padding} rows of padding"
        return chosen, Plan(chosen.variant, chosen.decision, reason)

    def _facts(self, max_kv_len: int, max_query_len: int) -> routing.BatchFacts:
        return routing.BatchFacts(
            max_kv_len=max_kv_len,
            max_query_len=max_query_len,
            other_consumers=self._other_consumers,
            workspace_bytes=current().workspace_bytes,
        )

    def _declared(self, variant: CapturedVariant) -> routing.BatchFacts:
        return self._facts(variant.capture_bound, variant.query_bound)

    def _decision(self, variant: CapturedVariant) -> routing.Decision:
        try:
            return routing.decide(self._spec, self._declared(variant))
        except ValueError as error:
            raise ValueError(f"variants: {variant.name} cannot be captured: {error}") from error

    def _record(
        self, variant: CapturedVariant, decision: routing.Decision, capture: Capture
    ) -> _Recorded:
        rows, facts = self._buffers.first(variant.tokens), self._declared(variant)
        replay, outputs = capture(lambda: self._step(rows, facts))
        _check_outputs(outputs, variant.tokens)
        return _Recorded(variant, decision, replay, outputs)


def _differs(a: routing.Decision, b: routing.Decision) -> bool:
    return (a.route, a.selection) != (b.route, b.selection)


def _first_rows(outputs: Outputs, rows: int) -> Outputs:
    if isinstance(outputs, Tensor):
        return outputs[:rows]
    return tuple(None if each is None else each[:rows] for each in outputs)


def _check_outputs(outputs: object, rows: int) -> None:
    each = outputs if isinstance(outputs, tuple) else (outputs,)
    for value in each:
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == rows:
            continue
        if value is None and isinstance(outputs, tuple):
            continue
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"step must return tensors of {rows} rows, or a tuple of them, got {got}")
