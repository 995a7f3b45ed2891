"""Rows that see like keys, put together for one product."""

from __future__ import annotations

from _attention_operands import INTERVALS

from dsafx.ops.cpu._runs import Form, runs


def test_runs_keep_causality_and_put_like_rows_together():
    def forms(name):
        return [
            (run.start, run.stop, run.first, run.last, run.form) for run in runs(*INTERVALS[name])
        ]

    causal, full, ragged = Form
    assert forms("a fresh prompt") == [(0, 40, 0, 40, causal)]
    assert forms("packed prompts with context") == [
        (0, 20, 0, 25, causal),
        (20, 21, 25, 31, full),
        (21, 38, 31, 53, causal),
        (38, 41, 53, 61, causal),
    ]
    assert forms("two tokens a request") == [(0, 2, 0, 20, causal), (2, 4, 20, 40, causal)]
    assert forms("full attention") == [(0, 20, 2, 30, full)]
    assert forms("a sliding window")[0] == (0, 3, 0, 10, ragged)
    assert forms("rows without a key") == [(3, 20, 0, 17, causal)]
    assert forms("no row") == []
