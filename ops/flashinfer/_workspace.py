"""Scratch memory of FlashInfer's kernels: one buffer for each device and stream."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._host import Host
from ._limits import LSE_GUARD_BYTES, LSE_QUERY_TILE, LSE_SLOT_BYTES, WORKSPACE_BYTES

LN2 = math.log(2.0)
"""FlashInfer's log-sum-exp has base 2: times this, it has base e (contract C12)."""


def workspace(host: Host, device: torch.device, extra: int = 0) -> Tensor:
    """uint8, zero when new, of ``WORKSPACE_BYTES`` and as much beyond as any call asked for.

    A graph that is being recorded gets a buffer that is not filled: a fill would be replayed with
    it, and the kernels which it may hold keep their counters elsewhere.
    """
    size = WORKSPACE_BYTES + extra
    if host.capturing():
        return torch.empty(size, dtype=torch.uint8, device=device)
    held = host.per_stream(device, "workspace", lambda: _zeros(size, device))
    if held.numel() < size:
        held = _zeros(size, device)
        host.kept["workspace", device, host.stream(device)] = held
    return held


def lse_bytes(heads: int, requests: int, longest: int) -> int:
    """What trtllm-gen takes of a workspace to return an LSE of ``requests`` with ``longest`` rows.

    (vLLM #50791: 2 KiB a head for a request of one token.)
    """
    tiles = -(-longest // LSE_QUERY_TILE)
    return LSE_GUARD_BYTES + LSE_SLOT_BYTES * LSE_QUERY_TILE * heads * requests * tiles


def _zeros(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)
