"""``index_scores`` and ``index_select`` on ``fp8_mqa_logits``: queries and keys rounded to e4m3.

The scale of a query leaves through the head weights, since ``relu(a * x) = a * relu(x)``; that of a
key is an operand of the kernel. Operands that are e4m3 already are taken as they are. Dots and
scores are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import routing
from .._blocks import check_interval_values, row_blocks
from .._host import Host
from ..cache_layouts import FP8, quantise_index_key
from ..causal_positions import closed_form
from ..index_scores import visible_keys
from ..select_topk import select_topk
from ._limits import HEAD_DIMS, HEADS, ROW_ELEMENTS

CALL = "deep_gemm.fp8_mqa_logits"

# Workspace of one key: its logit, and the int64 lanes and masks of a selection by the reference.
_KEY_BYTES = 52
# Workspace of one selected lane while ``select_topk`` works.
_CHOSEN_BYTES = 64


def supports_scores(
    host: Host,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    mask: Tensor | None = None,
) -> str | None:
    """None where ``index_scores`` is served, else the reason why not."""
    return _refusal(host, q, k, weights)


def supports_select(
    host: Host,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    max_kv_len: int,
    topk: int,
    mask: Tensor | None = None,
    batch_invariant: bool = False,
) -> str | None:
    """None where ``index_select`` is served, else the reason why not."""
    if mask is not None:
        return "no kernel takes a mask"
    if batch_invariant:
        return "DeepGEMM does not promise that a row is bit-equal alone and in any batch"
    return _refusal(host, q, k, weights)


@torch.no_grad()
def index_scores(
    host: Host,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """``index_scores`` of fp8 operands."""
    keys = k.shape[0]
    if q.shape[0] == 0 or keys == 0:
        return q.new_empty((q.shape[0], keys), dtype=torch.float32)
    logits = host.function(CALL)(
        *_operands(q, k, weights),
        ks.clamp(0, keys),
        ke.clamp(0, keys),
        # Columns that a row does not see are filled below, a mask's with them.
        clean_logits=False,
    )
    hidden = ~visible_keys(ks, ke, 0, keys, mask)
    scores: Tensor = logits.masked_fill(hidden, float("-inf")).contiguous()
    return scores


@torch.no_grad()
def index_select(
    host: Host,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    max_kv_len: int,
    topk: int,
    mask: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """``index_select`` of fp8 operands, in blocks of rows whose logits fit the workspace."""
    check_interval_values(ks, ke, k.shape[0], max_kv_len)
    longest = min(max_kv_len, k.shape[0])
    if routing.selection_form(longest, topk) is routing.Selection.CLOSED:
        return closed_form(ks, ke, topk)
    indices = ks.new_empty((q.shape[0], topk))
    q8, keys, folded = _operands(q, k, weights)
    starts, ends = ks.clamp(0, k.shape[0]), ke.clamp(0, k.shape[0])
    blocks = -(-longest // ROW_ELEMENTS)
    bytes_per_row = _KEY_BYTES * ROW_ELEMENTS * blocks + _CHOSEN_BYTES * topk
    for block in row_blocks(q.shape[0], bytes_per_row):
        first = starts[block]
        # Column c of a row is its key ``first + c``.
        logits = host.function(CALL)(
            q8[block],
            keys,
            folded[block],
            first,
            ends[block],
            clean_logits=False,
            max_seqlen_k=longest,
        )
        lengths = (ends[block] - first).clamp_(0, longest)
        indices[block] = select_topk(logits, torch.zeros_like(first), lengths, topk)
    return indices


def _operands(
    q: Tensor, k: Tensor, weights: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """Queries, keys with their scales, and the weights that hold the scales of the queries."""
    q8, q_scale = _quantised(q)
    k8, k_scale = _quantised(k)
    folded = weights.to(torch.float32) * q_scale
    return q8.contiguous(), (k8.contiguous(), k_scale.contiguous()), folded.contiguous()


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 of the rows of ``x`` and the scale of each; 1 where ``x`` is e4m3 itself."""
    if x.dtype == FP8:
        return x, x.new_ones(x.shape[:-1], dtype=torch.float32)
    return quantise_index_key(x)


def _refusal(host: Host, q: Tensor, k: Tensor, weights: Tensor) -> str | None:
    if not host.available():
        return "there is no CUDA device"
    architecture = host.architecture(q.device)
    if architecture not in HEADS:
        return f"DeepGEMM has no fp8_mqa_logits for sm_{architecture}"
    if torch.float64 in (q.dtype, k.dtype, weights.dtype):
        return "float64 scores are computed in float64"
    heads, width = q.shape[1:]
    if heads not in HEADS[architecture] or width not in HEAD_DIMS:
        return f"no kernel for {heads} index heads of {width} on sm_{architecture}"
    return host.lacks(CALL)
