"""What the kit is pointed at: five functions, and what is promised about them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..ops import index_cache, mla_cache, providers, routing

Function = Callable[..., Any]

FUNCTIONS: dict[str, tuple[str, ...]] = {
    "scores": ("q", "k", "weights", "ks", "ke", "mask"),
    "select": ("q", "k", "weights", "ks", "ke", "max_kv_len", "topk", "mask"),
    "attend": ("q", "kv", "indices", "ks", "scale", "v_dim"),
    "write": ("rows", "cache", "slot_mapping", "layout", "scale"),
    "gather": ("cache", "block_table", "cu_seqlens", "total", "layout", "scale"),
    "dense": ("q", "k", "v", "ks", "ke", "max_kv_len", "scale"),
    "masked": ("q", "k", "v", "indices", "ks", "ke", "scale"),
    "compact": ("indices", "lengths"),
    "slots": ("indices", "block_table", "row_request", "block_size", "lens"),
    "decide": ("spec", "facts"),
}
"""The functions of ``Adapters`` and their arguments, in order; the cases pass them by position."""

LAYOUTS = ("bf16", "fp8", "fp8_ds_mla", "index_fp32", "index_ue8m0")
"""MLA cache layouts, then the two scale stores of the index cache."""

_SCALE_STORES = {"index_fp32": "fp32", "index_ue8m0": "ue8m0"}


@dataclass(frozen=True)
class Dims:
    """Sizes that random inputs have where a case does not need its own.

    index_heads, index_dim: H and D of the indexer; at least 4 and 8.
    heads: N; latent, rope: L and R, so that a row of ``kv`` has ``latent + rope`` numbers.
    """

    index_heads: int = 4
    index_dim: int = 32
    heads: int = 4
    latent: int = 32
    rope: int = 8


@dataclass(frozen=True)
class Declaration:
    """What an engine says of one layer and its kernels, for the routing cases.

    layer: the layer object, whose class may declare ``dsa_capabilities``.
    kernels: what its attention kernels offer besides top-k MQA.
    """

    layer: object
    kernels: routing.KernelCapabilities


@dataclass(frozen=True)
class Adapters:
    """The functions under test. Those left out are skipped, with the reason in the report.

    Shapes, dtypes and meaning are those of the ops named; adapters take their arguments by
    position and return new tensors. A function may raise ``NotImplementedError`` for sizes it does
    not serve; the case is then skipped with the message.

    scores: ``ops.index_scores(q, k, weights, ks, ke, mask)``.
    select: ``ops.index_select(q, k, weights, ks, ke, max_kv_len, topk, mask)``.
    attend: ``ops.sparse_mqa(q, kv, indices, ks, scale, v_dim)`` -> (out, lse).
    write: ``write(rows, cache, slot_mapping, layout, scale)`` -> None. ``rows`` is ``(kv_c, k_pe)``
        for an MLA layout and ``(index_k,)`` for an index layout; ``scale`` is None save for "fp8".
    gather: ``gather(cache, block_table, cu_seqlens, total, layout, scale)`` -> packed rows as such
        a tuple, dequantised.
    dense, masked: ``ops.dense_mha(q, k, v, ks, ke, max_kv_len, scale)`` and
        ``ops.masked_mha(q, k, v, indices, ks, ke, scale)`` -> (out, lse), where they exist.
    compact, slots, decide: the package's own helpers, unless replaced.
    declaration: what the engine declares, for the routing cases.
    batch_invariant: the adapters of a mode in which a row is bit-equal alone and in any batch
        (contract C11); None where there is no such mode.
    layouts: the cache layouts, of ``LAYOUTS``, that write and gather serve.
    dtypes: dtypes of queries and keys, of float32, bfloat16 and float16.
    lowest_tie: the lowest position wins a tie; otherwise any of equal scores may be taken.
    sorted_ids: positions are ascending, then -1; otherwise rows are compared as sets.
    returns_lse: attention returns the log-sum-exp.
    fp8_scores: queries or keys are rounded to fp8 before they are scored, so that only
        ``ops.tolerances.least_recall`` is owed and cases of exact scores are skipped.
    fp8_operands: scores and select also take queries and keys in float8_e4m3fn, as they are.
    """

    name: str
    scores: Function | None = None
    select: Function | None = None
    attend: Function | None = None
    write: Function | None = None
    gather: Function | None = None
    dense: Function | None = None
    masked: Function | None = None
    compact: Function = ops.compact
    slots: Function = ops.slots
    decide: Function = routing.decide
    declaration: Declaration | None = None
    batch_invariant: Adapters | None = None
    layouts: tuple[str, ...] = LAYOUTS
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    device: str = "cpu"
    dims: Dims = Dims()
    lowest_tie: bool = True
    sorted_ids: bool = True
    returns_lse: bool = True
    fp8_scores: bool = False
    fp8_operands: bool = False

    def __post_init__(self) -> None:
        unknown = sorted(set(self.layouts) - set(LAYOUTS))
        if unknown:
            raise ValueError(f"layouts accepts {', '.join(LAYOUTS)}, got {', '.join(unknown)}")
        if not self.dtypes:
            raise ValueError("dtypes must name at least one dtype, got ()")

    def function(self, name: str) -> Function:
        """The function ``name``, which the case declared to need."""
        found: Function | None = vars(self)[name]
        if found is None:
            raise NotImplementedError(f"{self.name} has no {name}")
        return found


def adapters_for(name: str) -> Adapters:
    """Adapters of one of this package's providers, or those found at ``module:attribute``.

    The attribute is an ``Adapters`` or a function without arguments that returns one.

    Raises:
        ValueError: no provider has that name.
        TypeError: what lies at ``module:attribute`` is not an ``Adapters``.
    """
    if ":" in name:
        return _imported(name)
    known = {provider.name: provider for provider in providers.PROVIDERS}
    if name not in known:
        raise ValueError(f"name must be {', '.join(known)} or module:attribute, got {name!r}")
    provider = known[name]
    within = functools.partial(_within, name)
    invariant = Adapters(
        f"{name}, batch_invariant=True",
        select=within(functools.partial(ops.index_select, batch_invariant=True)),
        attend=within(functools.partial(ops.sparse_mqa, batch_invariant=True)),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        device="cpu" if provider.supports("cpu") is None else provider.devices[0],
        fp8_scores=not provider.fp32_scores,
    )
    return replace(
        invariant,
        name=name,
        scores=within(ops.index_scores),
        select=within(ops.index_select),
        attend=within(ops.sparse_mqa),
        write=within(_write),
        gather=within(_gather),
        dense=within(ops.dense_mha),
        masked=within(ops.masked_mha),
        declaration=Declaration(_Layer(), provider.kernels),
        fp8_operands=True,
        batch_invariant=invariant,
        lowest_tie=provider.lowest_tie,
        sorted_ids=provider.sorted_ids,
    )


class _Layer:
    """The layer of this package's models, as far as the routing cases look at it."""

    dsa_capabilities = routing.LayerCapabilities(dense_mha=True, masked_mha=True)

    def kv_b_weight(self) -> Tensor:
        raise NotImplementedError("declared for the routing cases alone")


def _imported(name: str) -> Adapters:
    module, _, attribute = name.partition(":")
    found = vars(importlib.import_module(module)).get(attribute)
    if not isinstance(found, Adapters) and callable(found):
        found = found()
    if not isinstance(found, Adapters):
        raise TypeError(f"{name} must be an Adapters or return one, got {type(found).__name__}")
    return found


def _within(name: str, function: Function) -> Function:
    def call(*args: Any) -> Any:
        with ops.use_provider(name):
            return function(*args)

    return call


def _write(
    rows: tuple[Tensor, ...],
    cache: Tensor,
    slot_mapping: Tensor,
    layout: str,
    scale: Tensor | None = None,
) -> None:
    if layout in _SCALE_STORES:
        (index_k,) = rows
        index_cache.index_cache_write(index_k, cache, slot_mapping, _SCALE_STORES[layout])
    else:
        kv_c, k_pe = rows
        mla_cache.mla_cache_write(kv_c, k_pe, cache, slot_mapping, layout, scale)


def _gather(
    cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    total: int,
    layout: str,
    scale: Tensor | None = None,
) -> tuple[Tensor, ...]:
    pages = cache, block_table, cu_seqlens, total
    if layout in _SCALE_STORES:
        return (index_cache.index_cache_gather(*pages, _SCALE_STORES[layout]),)
    return mla_cache.mla_cache_gather(*pages, layout, scale)
