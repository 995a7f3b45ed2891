"""Probes of the attention kernels: an empty row, -1 in any lane, packed rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .. import tolerances
from ..cache_layouts import LAYOUTS, new_mla_cache
from ..mla_cache import mla_cache_gather, mla_cache_write
from ..providers import Provider, use_provider
from .inputs import DTYPE, Judge, Probe, int32, normal, off

LATENT, ROPE, BLOCK = 512, 64, 64
SCALE = (128 + ROPE) ** -0.5
# Heads and K, and the same for kernels that serve only the sizes of published models.
SIZES = ((16, 64), (64, 2048), (128, 2048))
# P and V of DeepSeek-V3.2 and of GLM-5.
EXPANDED = ((128, 128), (192, 256))


def _attends(q: Tensor, k: Tensor, v: Tensor, scale: float, lanes: int) -> Judge:
    """out and lse within the tolerances of attention over at most ``lanes`` keys."""
    sizes = [float(x.double().norm(dim=-1).max()) for x in (q, k)]
    logit = scale * sizes[0] * sizes[1]
    value = float(v.double().abs().max())
    width = q.shape[-1]
    out_budget = tolerances.attention_tolerance(q.dtype, width, lanes, logit, value)

    def judge(got: Sequence[Tensor], exact: Sequence[Tensor]) -> str | None:
        wrong = off(got[0], exact[0], out_budget)
        if wrong is not None:
            return f"the output {wrong}"
        size: Tensor = exact[1].double().abs().nan_to_num(posinf=0.0)
        # The tolerance takes both magnitudes as tensors or as numbers.
        logits = torch.full_like(size, logit)
        lse_budget = tolerances.lse_tolerance(q.dtype, width, lanes, logits, size)
        wrong = off(got[1], exact[1], lse_budget)
        return None if wrong is None else f"the log-sum-exp {wrong}"

    return judge


def _selection(seen: Tensor, topk: int) -> Tensor:
    """[T, topk] int32: positions below ``seen`` in no order, -1 between them, each at most once."""
    generator = torch.Generator().manual_seed(0xD5A)
    found = torch.full((seen.shape[0], topk), -1, dtype=torch.int32)
    for row, keys in enumerate(seen.tolist()):
        count = min(keys, topk)
        lanes = torch.randperm(topk, generator=generator)[:count]
        found[row, lanes] = torch.randperm(keys, generator=generator)[:count].int()
    return found


def _latent_inputs(heads: int, topk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, kv, indices and ks."""
    keys = topk + 40
    ks, ke = int32(3, 0, 5, 0), int32(3, 7, keys, keys)
    q = normal(4, heads, LATENT + ROPE) / 2
    kv = normal(keys, LATENT + ROPE, seed=1) / 2
    return q, kv, _selection(ke - ks, topk), ks


def _sparse_mqa(provider: Provider) -> list[Probe]:
    found: list[Probe] = []
    for heads, topk in SIZES:
        q, kv, indices, ks = _latent_inputs(heads, topk)
        judge = _attends(q, kv, kv[:, :LATENT], SCALE, topk)
        args = q, kv, indices, ks, SCALE, LATENT
        found.append(Probe(args, judge, fallback=bool(found)))
    return found


def _sparse_mla(provider: Provider) -> list[Probe]:
    found = []
    for probe in _sparse_mqa(provider):
        q, kv, indices, ks = probe.args[:4]
        assert isinstance(q, Tensor)
        assert isinstance(kv, Tensor)
        # Contiguous parts, as a cache and a projection hold them.
        parts = [
            x.contiguous() for x in (*q.split((LATENT, ROPE), -1), *kv.split((LATENT, ROPE), -1))
        ]
        found.append(replace(probe, args=(*parts, indices, ks, SCALE)))
    return found


def _sparse_mqa_paged(provider: Provider) -> list[Probe]:
    """Each layout; the reference reads the same stored rows, so that they are exact."""
    found: list[Probe] = []
    for layout in LAYOUTS:
        for number, (heads, topk) in enumerate(SIZES):
            q, kv, indices, _ = _latent_inputs(heads, topk)
            lens = int32(0, 12, kv.shape[0], kv.shape[0])
            request = int32(0, 0, 0, -1)
            blocks = -(-kv.shape[0] // BLOCK)
            table = torch.arange(blocks - 1, -1, -1, dtype=torch.int32)[None]
            position = torch.arange(kv.shape[0])
            slots = table[0, position // BLOCK].long() * BLOCK + position % BLOCK
            cache = new_mla_cache(blocks, BLOCK, layout)
            by = torch.tensor([1 / 64], dtype=torch.float32) if layout == "fp8" else None
            with use_provider("reference"):
                mla_cache_write(kv[:, :LATENT], kv[:, LATENT:], cache, slots, layout, by)
                bounds = int32(0, kv.shape[0])
                stored = mla_cache_gather(cache, table, bounds, kv.shape[0], layout, by)
            indices = _selection(lens, topk)
            judge = _attends(q, torch.cat(stored, -1), stored[0], SCALE, topk)
            args = (q, cache, indices, table, request, lens, SCALE, LATENT, layout, by)
            found.append(Probe(args, judge, wide=False, fallback=number > 0))
    return found


def _expanded(nope: int, value: int, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, ks and ke: two packed requests and an empty row."""
    q = normal(6, heads, nope + ROPE) / 2
    k = normal(150, heads, nope + ROPE, seed=1) / 2
    v = normal(150, heads, value, seed=2)
    return q, k, v, int32(0, 0, 9, 70, 70, 70), int32(1, 70, 9, 148, 149, 150)


def _dense_mha(provider: Provider) -> list[Probe]:
    found = []
    for nope, value in EXPANDED:
        q, k, v, ks, ke = _expanded(nope, value, 16)
        scale = float((nope + ROPE) ** -0.5)
        args = q, k, v, ks, ke, 80, scale
        found.append(Probe(args, _attends(q, k, v, scale, 80)))
    return found


def _masked_mha(provider: Provider) -> list[Probe]:
    found = []
    for nope, value in EXPANDED:
        q, k, v, ks, ke = _expanded(nope, value, 16)
        scale = float((nope + ROPE) ** -0.5)
        args = q, k, v, _selection(ke - ks, 32), ks, ke, scale
        found.append(Probe(args, _attends(q, k, v, scale, 32)))
    return found


def _merge_attention(provider: Provider) -> list[Probe]:
    """Sides without keys, in front of NaN."""
    found = []
    for value in (128, LATENT):
        outs = normal(4, 16, value), normal(4, 16, value, seed=1)
        lses = [4 * normal(4, 16, seed=seed, dtype=torch.float32) for seed in (2, 3)]
        lses[0][1:3] = -torch.inf
        lses[1][2] = -torch.inf
        outs[0][1] = torch.nan
        top = max(float(lse.nan_to_num(neginf=0.0).abs().max()) for lse in lses)
        size = max(float(out.nan_to_num().abs().max()) for out in outs)
        budgets = (
            tolerances.value_tolerance(DTYPE, 16, size) + size * top * 2**-20,
            (top + 1) * tolerances.sum_error(torch.float32, 16),
        )

        def judge(
            got: Sequence[Tensor],
            exact: Sequence[Tensor],
            budgets: tuple[float, float] = budgets,
        ) -> str | None:
            wrong = off(got[0], exact[0], budgets[0]) or off(got[1], exact[1], budgets[1])
            return None if wrong is None else f"the merged result {wrong}"

        found.append(Probe((outs[0], lses[0], outs[1], lses[1]), judge))
    return found


ATTENTION: dict[str, Callable[[Provider], list[Probe]]] = {
    "sparse_mqa": _sparse_mqa,
    "sparse_mla": _sparse_mla,
    "sparse_mqa_paged": _sparse_mqa_paged,
    "dense_mha": _dense_mha,
    "masked_mha": _masked_mha,
    "merge_attention": _merge_attention,
}
