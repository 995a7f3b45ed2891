"""Intervals, operands and selections that attention kernels are tried on."""

from __future__ import annotations

import torch
from _reference import causal_intervals, int32

LONG = 40

INTERVALS = {
    "a fresh prompt": causal_intervals([LONG]),
    "packed prompts with context": causal_intervals([20, 1, 17, 3], cached=5),
    "decode steps": (int32(0, 9, 11, 30), int32(9, 11, 30, 31)),
    "two tokens a request": (int32(0, 0, 20, 20), int32(19, 20, 39, 40)),
    "full attention": (int32(*[2] * 20), int32(*[30] * 20)),
    "a sliding window": (int32(*range(30)), int32(*range(8, 38))),
    "ends that shrink": (int32(*[0] * 20), int32(*range(40, 20, -1))),
    "rows without a key": (int32(*[0] * 20, 7, 3), int32(*range(-2, 18), 7, 2)),
    "a row without a key between like rows": (int32(0, 0, 0, 3, 0, 0), int32(5, 5, 5, 3, 5, 5)),
    "rows that overlap in part": (int32(*[0] * 8, *[10] * 4), int32(*[9] * 8, *[12] * 4)),
    "only rows without a key": (int32(4, 5), int32(4, 1)),
    "no row": (int32(), int32()),
}


def expanded(tokens, keys, heads=3, qk=10, v=6, dtype=torch.float32):
    shapes = [(tokens, heads, qk), (keys, heads, qk), (keys, heads, v)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def selection(ks, ke, topk, holes=1):
    """[T, topk]: visible positions in random order, and ``holes`` lanes of -1 among them."""
    rows = torch.full((ks.shape[0], topk), -1, dtype=torch.int32)
    for row, length in enumerate((ke - ks).clamp(min=0).tolist()):
        chosen = torch.randperm(length)[: topk - holes].int()
        rows[row, torch.randperm(topk)[: chosen.shape[0]]] = chosen
    return rows
