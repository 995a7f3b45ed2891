"""The attention and the indexer of transformers' DSA models as Dynamo traces them.

One form of each serves ``deepseek_v32``, ``glm_moe_dsa``, ``axk2`` and ``dots3_note``, in prefill
and decode, for each kind of cache, above and below K, static or dynamic. Source: transformers 5.24,
``modeling_deepseek_v32.py`` and ``modeling_glm_moe_dsa.py``.
"""

from __future__ import annotations

import torch

from ._match import Either, Rest, Var, call

_HEAD = slice(None)

# relu(q . k * scale) of each head, summed with the weights of the heads.
_SCORES = call(
    "squeeze",
    call(
        "matmul",
        call("unsqueeze", Var("weights"), -2),
        call(
            "relu",
            call(
                "mul",
                call(
                    "matmul",
                    call("float", Var("query")),
                    call("unsqueeze", call("float", call("transpose", Var("keys"), -1, -2)), 1),
                ),
                Var("index_scale"),
            ),
        ),
    ),
    -2,
)
_MASK_ROWS = Either(
    (
        call("getitem", Var("mask"), (_HEAD, 0, _HEAD, _HEAD)),
        call("getitem", Var("mask"), (_HEAD, 0)),
    )
)

SELECTION = call(
    "to",
    call(
        "getitem",
        call(
            "topk",
            Either(
                (
                    call("masked_fill", _SCORES, call("invert", _MASK_ROWS), float("-inf")),
                    call("add", _SCORES, _MASK_ROWS),
                )
            ),
            Var("width"),
            dim=-1,
        ),
        1,
    ),
    torch.int32,
)

# The latents up-projected, as keys without their rotated part and values.
_EXPANDED = call(
    "split",
    call(
        "transpose",
        call(
            "view",
            call("linear", Var("kv_c"), Var("kv_b_weight"), None),
            (Var("batch"), Var("key_len"), -1, Var("expanded")),
        ),
        1,
        2,
        bind="kv",
    ),
    [Var("nope"), Var("v")],
    dim=-1,
)
_VALUES = call("getitem", _EXPANDED, 1)
_KEYS = call("new_empty", Var("kv"), Rest(), bind="keys")
KEY_WRITES = (
    call(
        "copy_",
        call("getitem", Var("keys"), (..., slice(None, Var("nope"), None))),
        call("getitem", _EXPANDED, 0),
        bind="nope_write",
    ),
    call(
        "copy_",
        call("getitem", Var("keys"), (..., slice(Var("nope"), None, None))),
        call("expand", Var("k_pe"), -1, Rest()),
        bind="rotated_write",
    ),
)
_QUERY = call("cat", (Var("q_nope"), Var("q_pe")), dim=-1)

_UNSELECTED = call(
    "unsqueeze",
    call(
        "scatter",
        call("new_ones", Var("indices"), Var("mask_shape"), dtype=torch.bool),
        -1,
        call("long", Var("indices")),
        False,
    ),
    1,
)

SDPA_ATTENTION = call(
    "scaled_dot_product_attention",
    _QUERY,
    _KEYS,
    _VALUES,
    attn_mask=call("and_", Var("mask"), call("invert", _UNSELECTED)),
    dropout_p=0.0,
    scale=Var("scale"),
    is_causal=False,
)

EAGER_ATTENTION = call(
    "matmul",
    call(
        "dropout",
        call(
            "to",
            call(
                "softmax",
                call(
                    "add",
                    call(
                        "mul",
                        call("matmul", _QUERY, call("transpose", _KEYS, 2, 3)),
                        Var("scale"),
                    ),
                    call("masked_fill", Var("mask"), _UNSELECTED, Var("minimum")),
                ),
                dim=-1,
                dtype=torch.float32,
            ),
            Var("dtype"),
        ),
        p=0.0,
        training=Var("training"),
    ),
    _VALUES,
)
