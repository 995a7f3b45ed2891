"""The cases of the indexer: scores, selections, and what is between them."""

from __future__ import annotations

import _gpu_compare as compare
import _gpu_plain as plain
import torch
from _gpu_peers import COMPILED, compiled, score_and_select
from _gpu_peers import plain as compiled_peer
from _gpu_setting import INDEX_STYLE, Peer, Scene, Work, size_of
from _measure import Floor
from torch import Tensor

from dsafx import ops

_ID = 4
_RANKS = 8


def _score_flops(scene: Scene, pairs: int) -> int:
    return 2 * pairs * scene.dims.index_n_heads * scene.dims.index_head_dim


def index_scores(scene: Scene) -> Work:
    """All scores of a prompt's last rows."""
    q, k, weights = scene.index_operands
    ks, ke = scene.interval
    add = compiled(scene, plain.add_head)
    held = 4 * scene.tokens * scene.keys
    return Work(
        lambda: ops.index_scores(q, k, weights, ks, ke),
        Floor(_score_flops(scene, scene.pairs), size_of(q, k, weights, ks, ke) + held),
        (Peer(COMPILED, lambda: plain.scores(add, q, k, weights), 2 * held),),
        compare.finite,
        compare.VALUES_MOST,
    )


def index_select(scene: Scene) -> Work:
    """The exact selection of a prompt's last rows."""
    q, k, weights = scene.index_operands
    ks, ke = scene.interval
    topk, add = scene.dims.index_topk, compiled(scene, plain.add_head)

    def theirs() -> Tensor:
        return plain.highest(plain.scores(add, q, k, weights), ke, topk)

    held = scene.tokens * scene.keys
    return Work(
        lambda: ops.index_select(q, k, weights, ks, ke, scene.keys, topk),
        Floor(
            _score_flops(scene, scene.scored),
            size_of(q, k, weights, ks, ke) + _ID * scene.tokens * topk,
        ),
        (Peer(COMPILED, theirs, 3 * 4 * held), score_and_select(scene)),
        compare.ids,
        compare.IDS_MOST,
    )


def index_select_paged(scene: Scene) -> Work:
    """The same over an fp8 index cache in pages, for several requests."""
    dims, pages = scene.dims, scene.pages
    topk, heads, dim = dims.index_topk, dims.index_n_heads, dims.index_head_dim
    cache = scene.index_cache()
    q = scene.random(scene.tokens, heads, dim)
    weights = scene.floats(scene.tokens, heads) * (heads * dim) ** -0.5

    def theirs(
        cache: Tensor, q: Tensor, weights: Tensor, slots: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor]:
        k = plain.read_index_keys(cache, slots)
        by_request = q.unflatten(0, (scene.requests, scene.each))
        dots = torch.einsum("bthd,bsd->bths", by_request, k).float().relu()
        total = torch.einsum("bths,bth->bts", dots, weights.view(dots.shape[:3]))
        key = torch.arange(total.shape[2], device=total.device)
        hidden = total.masked_fill(key >= seen[:, None], -torch.inf)
        best = hidden.topk(min(topk, hidden.shape[2]), dim=-1, sorted=False)
        return best.indices.masked_fill(best.values == -torch.inf, -1), best.values

    slots = scene.token_slots
    held = scene.requests * scene.keys * (6 * dim + scene.each * (heads * 10 + 8))
    once = scene.requests * scene.keys * (dim + 4)
    return Work(
        lambda: ops.index_select_paged(
            q,
            cache,
            weights,
            pages.table,
            pages.row_request,
            pages.lens,
            scene.keys,
            topk,
            "ue8m0",
        ),
        Floor(
            _score_flops(scene, scene.scored),
            size_of(q, weights) + (once if scene.scored else 0) + _ID * scene.tokens * topk,
        ),
        (compiled_peer(scene, theirs, cache, q, weights, slots, scene.seen, nbytes=held),),
        compare.ids,
        compare.IDS_MOST,
    )


def index_select_partial(scene: Scene) -> Work:
    """The best of one rank's keys, where two ranks hold them by turns."""
    q, k, weights = scene.index_operands
    ks, ke = scene.interval
    topk, add = scene.dims.index_topk, compiled(scene, plain.add_head)
    positions = 2 * torch.arange(scene.keys, dtype=torch.int32, device=q.device)
    everywhere = 2 * ke

    def theirs() -> tuple[Tensor, Tensor]:
        total = plain.scores(add, q, k, weights)
        found = plain.highest(total, ke, topk)
        taken = found.clamp(min=0)
        return positions[taken].masked_fill(found < 0, -1), total.gather(1, taken)

    scored = int((ke.long()[everywhere > topk]).sum())
    return Work(
        lambda: ops.index_select_partial(
            q, k, weights, ks, ke, positions, everywhere, 2 * scene.keys, topk
        ),
        Floor(_score_flops(scene, scored), size_of(q, k, weights) + 2 * _ID * scene.tokens * topk),
        (Peer(COMPILED, theirs, 3 * 4 * scene.tokens * scene.keys),),
        compare.ids,
        compare.IDS_MOST,
    )


def merge_selection(scene: Scene) -> Work:
    """The selection over the best keys of eight ranks."""
    topk, device = scene.dims.index_topk, scene.machine.device
    shape = (_RANKS, scene.tokens, topk)
    lane = torch.arange(topk, dtype=torch.int32, device=device) * _RANKS
    rank = torch.arange(_RANKS, dtype=torch.int32, device=device)
    positions = (lane + rank[:, None, None]).expand(shape).contiguous()
    scores = scene.floats(*shape)

    def theirs(positions: Tensor, scores: Tensor) -> Tensor:
        ids, values = (x.transpose(0, 1).flatten(1) for x in (positions, scores))
        best = values.topk(topk, dim=-1, sorted=False).indices
        return ids.gather(1, best).sort(dim=-1).values

    held = 6 * size_of(scores)
    return Work(
        lambda: ops.merge_selection(positions, scores, topk),
        Floor(0, size_of(positions, scores) + _ID * scene.tokens * topk),
        (compiled_peer(scene, theirs, positions, scores, nbytes=held),),
        compare.ids,
        compare.IDS_MOST,
    )


def select_topk(scene: Scene) -> Work:
    """The exact selection from scores that are there."""
    scores = scene.floats(scene.tokens, scene.keys)
    ks, ke = scene.interval
    topk = min(scene.dims.index_topk, scene.keys)

    def theirs() -> Tensor:
        found: Tensor = scores.topk(topk, dim=-1, sorted=False).indices
        return found

    whole = torch.full_like(ke, scene.keys)
    return Work(
        lambda: ops.select_topk(scores, ks, whole, topk),
        Floor(0, size_of(scores) + _ID * scene.tokens * topk),
        (Peer("torch.topk(sorted=False)", theirs, 12 * scene.tokens * topk + size_of(scores)),),
        compare.ids,
        compare.IDS_MOST,
    )


def causal_positions(scene: Scene) -> Work:
    """The closed form."""
    ks, ke = scene.interval
    topk = scene.dims.index_topk

    def theirs(ks: Tensor, ke: Tensor) -> Tensor:
        lane = torch.arange(topk, dtype=torch.int32, device=ks.device)
        return torch.where(lane < (ke - ks)[:, None], lane, -1)

    out = _ID * scene.tokens * topk
    return Work(
        lambda: ops.causal_positions(ks, ke, scene.keys, topk),
        Floor(0, size_of(ks, ke) + out),
        (compiled_peer(scene, theirs, ks, ke, nbytes=out),),
        compare.ids,
    )


def index_query(scene: Scene) -> Work:
    """Rotated queries with folded weights; the variant ``fp8`` quantises them."""
    heads, dim = scene.dims.index_n_heads, scene.dims.index_head_dim
    q, weights = scene.random(scene.tokens, heads, dim), scene.floats(scene.tokens, heads)
    cos, sin = scene.angles
    style, quantize = INDEX_STYLE[scene.case.family], scene.case.variant == "fp8"
    out = q.numel() * (1 if quantize else q.itemsize) + size_of(weights)
    args = (q, weights, cos, sin, style, quantize)
    return Work(
        lambda: ops.index_query(*args),
        Floor(0, size_of(q, weights, cos, sin) + out),
        (compiled_peer(scene, plain.index_query, *args, nbytes=2 * size_of(q)),),
        compare.weighted,
        # One step of e4m3 is an eighth of a value.
        0.13 if quantize else compare.VALUES_MOST,
    )
