"""What a case of ``gpu.py`` is made of: an op, a model's dimensions, lengths, and the operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from _dims import REAL, Dims, Family
from _gpu_machine import Machine
from _measure import Call, Floor
from torch import Tensor

from dsafx import ops

BLOCK = 64
"""Tokens in a block of a cache."""

EPS = 1e-6
# What lengths are divided by in a dry run: a selection of 2048 keys becomes one of 32.
_SHRINK = 64

# A latent of 128 is the narrowest that the layout fp8_ds_mla holds.
TINY = {
    Family.GLM: Dims(64, 4, 48, 128, 24, 8, 32, 8, 16, 32),
    Family.DEEPSEEK: Dims(64, 8, 32, 128, 16, 8, 16, 8, 16, 32),
}
INDEX_STYLE = {Family.GLM: "interleaved", Family.DEEPSEEK: "half"}
STYLE = "interleaved"


@dataclass(frozen=True)
class Case:
    """One op at one size, for a real device.

    tokens: query tokens of the step, in equal parts of ``requests`` requests.
    keys: tokens that the last row of each request sees.
    heads: of the attention, None for the model's own; fewer stand for a rank of several.
    variant: what else distinguishes it, such as the layout of a cache.
    """

    op: str
    family: Family
    tokens: int
    keys: int
    requests: int = 1
    heads: int | None = None
    variant: str = ""

    def __str__(self) -> str:
        parts = [self.op, *([self.variant] if self.variant else []), self.family.value]
        of = f" in {self.requests} requests" if self.requests > 1 else ""
        parts.append(f"{self.tokens} x {self.keys}{of}")
        if self.heads is not None:
            parts.append(f"{self.heads} heads")
        return ", ".join(parts)


Compare = Callable[[Any, Any], float]


@dataclass(frozen=True)
class Peer:
    """What a user has today for the same.

    call: on the operands of the case, or None where it is not to be had, for this reason.
    bytes: computed peak over its inputs; it is not run where that is not free.
    """

    name: str
    call: Call | None
    bytes: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Work:
    """Calls of one case, on tensors that exist.

    floor: the least work of ``ours``.
    compare: how far the results of ours and of a peer lie apart, or None where they are not alike.
    most: of that, more is an error.
    """

    ours: Call
    floor: Floor
    peers: tuple[Peer, ...] = ()
    compare: Compare | None = None
    most: float = 0.0


@dataclass(frozen=True)
class Pages:
    """Requests in a paged cache.

    table: [B, blocks] int32, in random order; row_request, lens: [T] int32; slots: [T] int64, where
    the new tokens lie; cu_seqlens: [B + 1] int32; total: tokens of all requests.
    """

    table: Tensor
    row_request: Tensor
    lens: Tensor
    slots: Tensor
    cu_seqlens: Tensor
    total: int


@dataclass(frozen=True)
class Scene:
    """A case on a machine, and its operands; lengths and dimensions are tiny in a dry run."""

    machine: Machine
    case: Case
    dtype: torch.dtype = field(default=torch.bfloat16)

    @cached_property
    def dims(self) -> Dims:
        """Of the family, with the heads of the case."""
        dims = (TINY if self.machine.dry else REAL)[self.case.family]
        heads = self.case.heads
        if heads is None:
            return dims
        return replace(dims, num_attention_heads=min(8, heads) if self.machine.dry else heads)

    @property
    def requests(self) -> int:
        return self._length(self.case.requests)

    @property
    def tokens(self) -> int:
        """Query tokens, a multiple of the requests."""
        return self.requests * self.each

    @property
    def each(self) -> int:
        """Query tokens of one request."""
        return max(1, self._length(self.case.tokens) // self.requests)

    @property
    def keys(self) -> int:
        """Tokens that the last row of each request sees, as many as its query tokens at least."""
        return max(self.each, self._length(self.case.keys))

    def _length(self, real: int) -> int:
        return max(1, real // _SHRINK) if self.machine.dry else real

    def random(self, *shape: int) -> Tensor:
        """Normal values of the activations' dtype."""
        return torch.randn(shape, device=self.machine.device, dtype=self.dtype)

    def floats(self, *shape: int) -> Tensor:
        """Normal values, float32."""
        return torch.randn(shape, device=self.machine.device)

    @cached_property
    def seen(self) -> Tensor:
        """[each] int32: what each row of a request sees, its last rows."""
        last = self.keys + 1
        return torch.arange(last - self.each, last, dtype=torch.int32, device=self.machine.device)

    @property
    def pairs(self) -> int:
        """Rows times the keys that each sees."""
        return self.requests * int(self.seen.sum())

    @property
    def scored(self) -> int:
        """The same over the rows that see more than ``index_topk`` keys."""
        return self.requests * int(self.seen[self.seen > self.dims.index_topk].sum())

    @property
    def selected(self) -> int:
        """Rows times the keys that each selects."""
        return self.requests * int(self.seen.clamp(max=self.dims.index_topk).sum())

    @cached_property
    def interval(self) -> tuple[Tensor, Tensor]:
        """ks and ke [T] int32, of one request whose keys are packed."""
        return torch.zeros_like(self.seen), self.seen

    @cached_property
    def indices(self) -> Tensor:
        """[T, K] int32: a random key of each of K parts of what a row sees, or all of it; -1."""
        topk = self.dims.index_topk
        seen = self.seen.repeat(self.requests).long()[:, None]
        lane = torch.arange(topk, device=seen.device)
        first = lane * seen // topk
        width = (lane + 1) * seen // topk - first
        part = torch.rand(seen.shape[0], topk, device=seen.device)
        taken = torch.minimum((part * width).long(), width - 1) + first
        return torch.where(seen > topk, taken, torch.where(lane < seen, lane, -1)).int()

    @cached_property
    def angles(self) -> tuple[Tensor, Tensor]:
        """cos and sin [T, R / 2] float32."""
        angle = self.floats(self.tokens, self.dims.qk_rope_head_dim // 2)
        return angle.cos(), angle.sin()

    @cached_property
    def index_operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, H, D], k [S, D] and folded weights [T, H] float32."""
        heads, dim = self.dims.index_n_heads, self.dims.index_head_dim
        weights = self.floats(self.tokens, heads) * (heads * dim) ** -0.5
        return self.random(self.tokens, heads, dim), self.random(self.keys, dim), weights

    @cached_property
    def pages(self) -> Pages:
        """Blocks of all requests, in random order."""
        device, blocks = self.machine.device, -(-self.keys // BLOCK)
        order = torch.randperm(self.requests * blocks, device=device)
        table = order.view(self.requests, blocks)
        place = self.seen.long() - 1
        starts = torch.arange(self.requests + 1, device=device) * self.keys
        request = torch.arange(self.requests, dtype=torch.int32, device=device)
        return Pages(
            table.int(),
            request.repeat_interleave(self.each),
            self.seen.repeat(self.requests),
            (table[:, place // BLOCK] * BLOCK + place % BLOCK).flatten(),
            starts.int(),
            self.requests * self.keys,
        )

    @cached_property
    def token_slots(self) -> Tensor:
        """[B, S] int64: where each token of each request lies in a cache."""
        place = torch.arange(self.keys, device=self.machine.device)
        return self.pages.table.long()[:, place // BLOCK] * BLOCK + place % BLOCK

    def mla_cache(self, layout: str) -> Tensor:
        """A cache in which the tokens of all requests lie."""
        pages, dims = self.pages, self.dims
        cache = ops.new_mla_cache(
            pages.table.numel(),
            BLOCK,
            layout,
            dims.kv_lora_rank,
            dims.qk_rope_head_dim,
            self.dtype,
            self.machine.device,
        )
        if layout == "bf16":
            return cache.normal_()
        for slots in self._parts(cache):
            rows = slots.shape[0]
            latents = self.random(rows, dims.kv_lora_rank)
            ops.mla_cache_write(
                latents, self.random(rows, dims.qk_rope_head_dim), cache, slots, layout
            )
        return cache

    def index_cache(self) -> Tensor:
        """An index cache in which the tokens of all requests lie."""
        dim = self.dims.index_head_dim
        cache = ops.new_index_cache(self.pages.table.numel(), BLOCK, dim, self.machine.device)
        for slots in self._parts(cache):
            ops.index_cache_write(self.random(slots.shape[0], dim), cache, slots, "ue8m0")
        return cache

    def _parts(self, cache: Tensor) -> tuple[Tensor, ...]:
        """All slots of a cache, some at a time."""
        slots = torch.arange(cache.shape[0] * BLOCK, device=self.machine.device)
        return slots.split(1 << 17)


def size_of(*tensors: Tensor) -> int:
    """Bytes of all values together."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)
