"""What each layer of an eager forward decided, for whoever asks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from ..ops import routing


@dataclass(frozen=True)
class LayerRecord:
    """One layer's decision over one step.

    Attributes:
        layer_idx: of the model.
        decision: route, selection and reason.
        provider: whose kernels ran.
        tokens: query tokens of the step, all requests together.
        max_kv_len: the bound on visible keys that was decided with.
    """

    layer_idx: int
    decision: routing.Decision
    provider: str
    tokens: int
    max_kv_len: int


_records: ContextVar[list[LayerRecord] | None] = ContextVar("dsafx_records", default=None)


@contextlib.contextmanager
def record_decisions() -> Iterator[list[LayerRecord]]:
    """Gather the decisions of the eager forwards inside the ``with`` block, in order.

    Compiled forwards decide when they are compiled: their reports come from the passes.
    """
    records: list[LayerRecord] = []
    token = _records.set(records)
    try:
        yield records
    finally:
        _records.reset(token)


def recording() -> bool:
    """Whether somebody gathers decisions; not to be asked in traced code."""
    return _records.get() is not None


def record(entry: LayerRecord) -> None:
    """Hand ``entry`` to the innermost ``record_decisions``, if there is one."""
    records = _records.get()
    if records is not None:
        records.append(entry)
