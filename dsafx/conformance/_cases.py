"""Every case of the kit, in reading order."""

from __future__ import annotations

from . import (
    _cases_attend,
    _cases_attend_calls,
    _cases_batches,
    _cases_cache,
    _cases_fp8,
    _cases_mha,
    _cases_routing,
    _cases_rows,
    _cases_scores,
    _cases_slots,
    _cases_topk,
)
from ._case import Case

CASES: tuple[Case, ...] = (
    *_cases_scores.CASES,
    *_cases_topk.CASES,
    *_cases_fp8.CASES,
    *_cases_rows.CASES,
    *_cases_batches.CASES,
    *_cases_attend.CASES,
    *_cases_attend_calls.CASES,
    *_cases_mha.CASES,
    *_cases_slots.CASES,
    *_cases_cache.CASES,
    *_cases_routing.CASES,
)
