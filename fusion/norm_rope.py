"""The norms and rotations of one layer as one kernel.

Between a layer's down-projections and its caches stand two RMSNorms and a RoPE, and in a layer with
an indexer also a LayerNorm whose first dims are rotated. All read one token and write one token, so
one launch can do them::

    q_c  = rms_norm(q_a(x))            q_c, kv_c, k_pe, index_k = norm_rope_index(
    kv_c = rms_norm(kv_a(x)[:, :L])        q_a(x), ..., kv_a(x)[:, :L], ..., kv_a(x)[:, L:],
    k_pe = rope(kv_a(x)[:, L:])            wk(x), ...)
    n    = layer_norm(wk(x))
    index_k = cat(rope(n[:, :R]), n[:, R:])
"""

from __future__ import annotations

from ._fusion import Fusion

# One value that is wider than the activations stays in registers from LayerNorm to RoPE.
INDEX_KEY_ROUNDING = {
    "index_k": "rounded once, after RoPE; the parts round after LayerNorm and again after RoPE"
}

NORM_ROPE = Fusion("norm_rope", ("rms_norm", "rms_norm", "rope"), ("q_c", "kv_c", "k_pe"))

NORM_ROPE_INDEX = Fusion(
    "norm_rope_index",
    (*NORM_ROPE.parts, "layer_norm", "rope", "cat"),
    (*NORM_ROPE.outputs, "index_k"),
    INDEX_KEY_ROUNDING,
)
