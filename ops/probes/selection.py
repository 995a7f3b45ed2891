"""Probes of the indexer: whole numbers, so that scores are exact and the lowest tie decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache_layouts import new_index_cache
from ..index_cache import index_cache_write
from ..providers import Provider, use_provider
from .inputs import Judge, Probe, equal, int32, integers

DIM, BLOCK = 128, 64
# Heads and K, and the same for kernels that serve only the sizes of published models.
SIZES = ((32, 64), (64, 2048))


class _Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    weights: Tensor
    ks: Tensor
    ke: Tensor
    longest: int
    topk: int

    @property
    def scores(self) -> Tensor:
        """[T, S] float64, exact."""
        dots = torch.einsum("thd,sd->ths", self.q.double(), self.k.double()).relu()
        return torch.einsum("th,ths->ts", self.weights.double(), dots)


def _inputs(heads: int, topk: int) -> _Inputs:
    """An empty row, a short one, one that sees exactly K, and two long ones."""
    keys = topk + 100
    return _Inputs(
        integers(5, heads, DIM, most=2),
        integers(keys, DIM, most=2, seed=1),
        integers(5, heads, most=8, seed=2, dtype=torch.float32) / 8,
        int32(4, 0, 3, 0, 10),
        int32(4, 7, 3 + topk, keys, keys - 1),
        keys,
        topk,
    )


def _selected(provider: Provider, scores: Tensor, ks: Tensor) -> Judge:
    """Equal, or of equal scores where ``provider`` promises neither order nor the lowest tie."""
    if provider.lowest_tie and provider.sorted_ids:
        return equal

    def judge(got: Sequence[Tensor], exact: Sequence[Tensor]) -> str | None:
        found, right = (_taken(each[0], scores, ks) for each in (got, exact))
        return None if torch.equal(found, right) else "selects keys of lower scores"

    return judge


def _taken(indices: Tensor, scores: Tensor, ks: Tensor) -> Tensor:
    """[T, K] the scores of the selected keys in order; a key that is taken twice counts once."""
    key = (indices.long() + ks[:, None]).clamp(0, scores.shape[1] - 1)
    chosen = torch.zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where(indices < 0, scores.shape[1], key), True)
    taken = scores.masked_fill(~chosen[:, :-1], -torch.inf)
    return taken.sort(dim=1, descending=True).values


def _index_select(provider: Provider) -> list[Probe]:
    found: list[Probe] = []
    for heads, topk in SIZES:
        given = _inputs(heads, topk)
        judge = _selected(provider, given.scores, given.ks)
        found.append(Probe(tuple(given), judge, fallback=bool(found)))
    return found


def _index_select_paged(provider: Provider) -> list[Probe]:
    found: list[Probe] = []
    for heads, topk in SIZES:
        given = _inputs(heads, topk)
        blocks = -(-given.k.shape[0] // BLOCK)
        table = torch.arange(blocks - 1, -1, -1, dtype=torch.int32)[None]
        position = torch.arange(given.k.shape[0])
        slots = table[0, position // BLOCK].long() * BLOCK + position % BLOCK
        cache = new_index_cache(blocks, BLOCK, DIM)
        with use_provider("reference"):
            index_cache_write(given.k, cache, slots, "ue8m0")
        # Keys of small whole numbers are exact in the cache. The last row is padding.
        lens, request = given.ke.masked_fill(given.ks == given.ke, 0), int32(0, 0, 0, 0, -1)
        pages = table, request, lens, given.longest, topk, "ue8m0"
        judge = _selected(provider, given.scores, torch.zeros_like(given.ks))
        args = (given.q, cache, given.weights, *pages)
        found.append(Probe(args, judge, wide=False, fallback=bool(found)))
    return found


def _index_select_partial(provider: Provider) -> list[Probe]:
    given = _inputs(*SIZES[0])
    positions = torch.arange(given.k.shape[0], dtype=torch.int32) * 2 + 1
    visible = (given.ke - given.ks) * 2
    args = (*given[:5], positions, visible, 2 * given.longest, given.topk)
    return [Probe(args, _positions_and_scores)]


def _positions_and_scores(got: Sequence[Tensor], exact: Sequence[Tensor]) -> str | None:
    wrong = equal(got[:1], exact[:1])
    if wrong is not None:
        return wrong
    same = torch.equal(got[1].double(), exact[1].double())
    return None if same else "the scores of the selected keys differ"


def _index_scores(provider: Provider) -> list[Probe]:
    def judge(got: Sequence[Tensor], exact: Sequence[Tensor]) -> str | None:
        return None if torch.equal(got[0].double(), exact[0].double()) else "scores differ"

    return [Probe(_inputs(*SIZES[0])[:5], judge)]


def _select_topk(provider: Provider) -> list[Probe]:
    given = _inputs(*SIZES[0])
    scores = given.scores.float()
    scores[3, ::5] = -torch.inf
    args = scores, given.ks, given.ke, given.topk
    return [Probe(args, _selected(provider, scores.double(), given.ks), wide=False)]


def _merge_selection(provider: Provider) -> list[Probe]:
    positions = torch.stack((torch.arange(64) * 2, torch.arange(64) * 2 + 1)).int()
    positions = positions[:, None].repeat(1, 3, 1)
    positions[0, 1, 5:] = -1
    positions[:, 2] = -1
    scores = integers(2, 3, 64, most=9, dtype=torch.float32)
    return [Probe((positions, scores, 48), equal, wide=False)]


def _causal_positions(provider: Provider) -> list[Probe]:
    return [Probe((int32(0, 3, 5), int32(7, 3, 69), 64, 64), equal)]


SELECTION: dict[str, Callable[[Provider], list[Probe]]] = {
    "index_select": _index_select,
    "index_select_paged": _index_select_paged,
    "index_select_partial": _index_select_partial,
    "index_scores": _index_scores,
    "select_topk": _select_topk,
    "merge_selection": _merge_selection,
    "causal_positions": _causal_positions,
}
