"""The norms and rotations of one layer as one kernel: which parts, which op, and when it pays.

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

from dataclasses import dataclass

from ..ops import providers


@dataclass(frozen=True)
class Fusion:
    """A fused op and its parts.

    op: the fused kernel op.
    parts: the semantic ops that it stands for, in the order of its outputs.
    """

    op: str
    parts: tuple[str, ...]


NORM_ROPE = Fusion("norm_rope", ("rms_norm", "rms_norm", "rope"))
NORM_ROPE_INDEX = Fusion("norm_rope_index", (*NORM_ROPE.parts, "layer_norm", "rope"))


def reason_not_to_fuse(fusion: Fusion, fuse: str, device_type: str) -> str | None:
    """None where the fused op is wanted, else why it is not.

    Args:
        fusion: what would be fused.
        fuse: ``"always"``, ``"never"``, or ``"auto"``, which asks the device's provider.
        device_type: where the tensors are.
    """
    if fuse == "always":
        return None
    if fuse == "never":
        return 'fuse="never"'
    provider = providers.dispatch(device_type)
    if fusion.op in provider.fused:
        return None
    return f"{fusion.op} of the {provider.name} provider is not faster than its parts"
