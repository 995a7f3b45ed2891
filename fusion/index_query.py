"""The indexer's query and its head weights as one kernel, ready for scoring.

The query's first dims are rotated, it may be quantised, and everything that scales a score moves
into the head weights, because ``relu(a * x) = a * relu(x)`` for a positive ``a``::

    q = wq_b(q_c).view(T, H, D)                          q, w = index_query(
    q = cat(rope(q[..., :R]), q[..., R:])                    wq_b(q_c), weights_proj(x), ...)
    w = weights_proj(x).float() * (D**-0.5 * H**-0.5)
"""

from __future__ import annotations

from ._fusion import Fusion

_WEIGHTS_ROUNDING = (
    "times D**-0.5 and then times H**-0.5, each rounded in float32; the parts may round their"
    " product once"
)

INDEX_QUERY = Fusion(
    "index_query", ("rope", "cat", "mul"), ("q", "weights"), {"weights": _WEIGHTS_ROUNDING}
)

INDEX_QUERY_FP8 = Fusion(
    INDEX_QUERY.op,
    ("rope", "cat", "quantise_index_key", "mul", "mul"),
    INDEX_QUERY.outputs,
    {
        "q": "rounded to fp8 from float32; the parts round to the activation dtype before",
        "weights": _WEIGHTS_ROUNDING,
    },
)
