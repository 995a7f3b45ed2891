"""``norm_rope_write`` and ``norm_rope_index_write``: the norms' launch also writes the caches.

The program that makes a row still holds it, rounds it in registers as the returned tensor is
rounded, and stores of that what the cache writes would.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache_layouts import LAYOUTS, SCALE_STORES
from ..mla_cache import require_scale_value
from . import index_cache, mla_cache, norm_rope
from ._norm_rope_write_kernel import write_kernel
from ._paged import check_slot_values, rows_of
from ._variants import Variant, variant
from .norm_rope import ACTIVATIONS, NUM_WARPS, WEIGHTS, row_constexprs


def supports(
    q_c: Tensor,
    q_weight: Tensor,
    kv_c: Tensor,
    kv_weight: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    eps: float,
    style: str,
    layout: str,
    scale: Tensor | None = None,
) -> str | None:
    """None where ``run`` serves the call, else the reason why not."""
    return norm_rope.supports(
        q_c, q_weight, kv_c, kv_weight, k_pe, cos, sin, eps, style
    ) or mla_cache.supports_write(kv_c, k_pe, cache, slot_mapping, layout, scale)


def supports_index(
    q_c: Tensor,
    q_weight: Tensor,
    kv_c: Tensor,
    kv_weight: Tensor,
    k_pe: Tensor,
    index_k: Tensor,
    index_weight: Tensor,
    index_bias: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    index_cache_: Tensor,
    index_slot_mapping: Tensor,
    eps: float,
    style: str,
    index_eps: float,
    index_style: str,
    layout: str,
    scale_store: str,
    hadamard: bool = False,
    scale: Tensor | None = None,
) -> str | None:
    """None where ``run_index`` serves the call, else the reason why not."""
    latents = q_c, q_weight, kv_c, kv_weight, k_pe
    return (
        supports(*latents, cos, sin, cache, slot_mapping, eps, style, layout, scale)
        or norm_rope.supports_index(
            *latents,
            index_k,
            index_weight,
            index_bias,
            cos,
            sin,
            eps,
            style,
            index_eps,
            index_style,
        )
        or index_cache.supports_write(index_k, index_cache_, index_slot_mapping, scale_store)
    )


@torch.no_grad()
def run(
    q_c: Tensor,
    q_weight: Tensor,
    kv_c: Tensor,
    kv_weight: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    eps: float,
    style: str,
    layout: str,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``ops.norm_rope_write``."""
    latents = q_c, q_weight, kv_c, kv_weight, k_pe
    out = _launch(*latents, None, cos, sin, cache, slot_mapping, eps, style, layout, scale)
    return out[0], out[1], out[2]


@torch.no_grad()
def run_index(
    q_c: Tensor,
    q_weight: Tensor,
    kv_c: Tensor,
    kv_weight: Tensor,
    k_pe: Tensor,
    index_k: Tensor,
    index_weight: Tensor,
    index_bias: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    index_cache_: Tensor,
    index_slot_mapping: Tensor,
    eps: float,
    style: str,
    index_eps: float,
    index_style: str,
    layout: str,
    scale_store: str,
    hadamard: bool = False,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``ops.norm_rope_index_write``."""
    index = _Index(
        index_k,
        index_weight,
        index_bias,
        index_cache_,
        index_slot_mapping,
        index_eps,
        index_style,
        scale_store,
        hadamard,
    )
    latents = q_c, q_weight, kv_c, kv_weight, k_pe
    return _launch(*latents, index, cos, sin, cache, slot_mapping, eps, style, layout, scale)


class _Index(NamedTuple):
    """The operands of the index key, in the order of the schema."""

    key: Tensor
    weight: Tensor
    bias: Tensor
    cache: Tensor
    slot_mapping: Tensor
    eps: float
    style: str
    scale_store: str
    hadamard: bool


def _launch(
    q_c: Tensor,
    q_weight: Tensor,
    kv_c: Tensor,
    kv_weight: Tensor,
    k_pe: Tensor,
    index: _Index | None,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    eps: float,
    style: str,
    layout: str,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    require_scale_value(scale)
    check_slot_values("slot_mapping", slot_mapping, cache)
    parts = 2
    if index is not None:
        check_slot_values("index_slot_mapping", index.slot_mapping, index.cache)
        parts = 3
    else:
        # No program makes an index key: the latent stands in for it, and the cache for its cache.
        index = _Index(
            kv_c, kv_weight, kv_weight, cache, slot_mapping, eps, style, SCALE_STORES[0], False
        )
    q_c, kv_c, k_pe, index_k, cos, sin = map(rows_of, (q_c, kv_c, k_pe, index.key, cos, sin))
    q_out, kv_out, pe_out = (x.new_empty(x.shape) for x in (q_c, kv_c, k_pe))
    index_out = index_k.new_empty(index_k.shape if parts == 3 else (0,))
    tokens = q_c.shape[0]
    if tokens:
        write_kernel[(tokens, parts)](
            q_c,
            q_weight.contiguous(),
            kv_c,
            kv_weight.contiguous(),
            k_pe,
            index_k,
            index.weight.contiguous(),
            index.bias.contiguous(),
            cos,
            sin,
            q_out,
            kv_out,
            pe_out,
            index_out,
            mla_cache.as_bytes(cache, layout),
            slot_mapping,
            index.cache,
            index.slot_mapping,
            scale,
            q_c.shape[1],
            index_k.shape[1],
            cos.shape[1],
            q_c.stride(0),
            kv_c.stride(0),
            k_pe.stride(0),
            index_k.stride(0),
            cos.stride(0),
            sin.stride(0),
            slot_mapping.stride(0),
            index.slot_mapping.stride(0),
            cache.stride(0),
            index.cache.stride(0),
            cache.shape[1],
            index.cache.shape[1],
            cache.shape[0] * cache.shape[1],
            index.cache.shape[0] * index.cache.shape[1],
            eps,
            index.eps,
            **_constexprs(
                q_c.shape[1],
                kv_c.shape[1],
                k_pe.shape[1],
                index_k.shape[1],
                style,
                index.style,
                layout,
                index.scale_store,
                index.hadamard,
            ),
            num_warps=NUM_WARPS,
        )
    return q_out, kv_out, pe_out, index_out


def _constexprs(
    q_width: int,
    kv_width: int,
    pe_width: int,
    index_width: int,
    style: str,
    index_style: str,
    layout: str,
    scale_store: str,
    hadamard: bool,
) -> dict[str, Any]:
    return {
        **row_constexprs(q_width, index_width, style, index_style, hadamard),
        "UE8M0": scale_store == "ue8m0",
        "DIM": index_width,
        **mla_cache.layout_sizes(layout, kv_width, pe_width),
    }


_DIVISIBLE = (
    *("q_width", "index_width", "half", "q_row", "kv_row", "pe_row", "index_row"),
    *("cos_row", "sin_row", "block_stride", "index_block_stride", "block_size"),
    *("index_block_size", "capacity", "index_capacity"),
)


def variants(arch: int) -> list[Variant]:
    """The forms of the kernel at the widths of GLM-5.2, for every layout and scale store."""
    found = []
    for layout in LAYOUTS:
        for scale_store in SCALE_STORES:
            scaled = {"scale": "fp32"} if layout == "fp8" else {}
            sizes = _constexprs(
                *(2048, 512, 64, 128, "interleaved", "interleaved"), layout, scale_store, False
            )
            found.append(
                variant(
                    f"norm_rope_index_write {layout} {scale_store} bf16",
                    write_kernel,
                    {
                        **dict.fromkeys((*ACTIVATIONS, *WEIGHTS), "bf16"),
                        **dict.fromkeys(("cos", "sin"), "fp32"),
                        **dict.fromkeys(("slot_mapping", "index_slot_mapping"), "i64"),
                        "cache": "bf16" if layout == "bf16" else "u8",
                        "index_cache": "u8",
                        **scaled,
                    },
                    {
                        **sizes,
                        "slot_stride": 1,
                        "index_slot_stride": 1,
                        **({} if scaled else {"scale": None}),
                    },
                    divisible=_DIVISIBLE,
                    floats=("eps", "index_eps"),
                    num_warps=NUM_WARPS,
                )
            )
    return found
