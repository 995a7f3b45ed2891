"""``merge_attention`` on FlashInfer's merge of two attention states."""

from __future__ import annotations

import torch
from torch import Tensor

from .._host import Host
from ._limits import (
    MERGE_ARCHITECTURES,
    MERGE_DTYPES,
    MERGE_HEAD_DIMS,
    MERGE_THREADS,
)
from ._probe import unavailable
from ._workspace import LN2

CALL = "flashinfer.merge_state"


def supports(host: Host, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> str | None:
    """None where the call is served, else the reason why not."""
    reason = unavailable(host, CALL)
    if reason is not None:
        return reason
    architecture = host.architecture(out_a.device)
    if architecture not in MERGE_ARCHITECTURES:
        return f"FlashInfer has no merge for sm_{architecture}"
    if out_a.dtype != out_b.dtype or out_a.dtype not in MERGE_DTYPES:
        return f"both sides must be bfloat16 or float16, got {out_a.dtype} and {out_b.dtype}"
    if lse_a.dtype != torch.float32 or lse_b.dtype != torch.float32:
        return f"both lse must be float32, got {lse_a.dtype} and {lse_b.dtype}"
    heads, width = out_a.shape[1:]
    if width not in MERGE_HEAD_DIMS:
        return f"no kernel for values of {width}"
    threads = width // max(16 // out_a.element_size(), width // 32)
    if heads * threads > MERGE_THREADS:
        return f"a block has at most {MERGE_THREADS} threads, and {heads} heads need more"
    return None


def run(
    host: Host, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """``merge_attention``; a side without keys is blanked first, since the kernel multiplies it."""
    empty_a, empty_b = torch.isinf(lse_a), torch.isinf(lse_b)
    empty = empty_a & empty_b
    out, base2 = host.function(CALL)(
        _blanked(out_a, empty_a),
        _base2(lse_a, empty_a),
        _blanked(out_b, empty_b),
        _base2(lse_b, empty_b),
    )
    lse = (base2 * LN2).masked_fill_(empty, float("-inf"))
    return out.masked_fill(empty[..., None], 0.0), lse


def _blanked(out: Tensor, empty: Tensor) -> Tensor:
    return out.masked_fill(empty[..., None], 0.0).contiguous()


def _base2(lse: Tensor, empty: Tensor) -> Tensor:
    """What the kernel takes: contiguous, base 2, and -inf where there are no keys."""
    return (lse / LN2).masked_fill_(empty, float("-inf")).contiguous()
