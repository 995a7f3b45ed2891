"""The kernel of ``norm_rope_write`` and its kin: a program makes one row of one result."""

from __future__ import annotations

import triton
import triton.language as tl

from ._norm_rows import index_key, rms_normed, rotated_key, store_row
from ._token_rows import store_index_key, store_latent, store_rope


@triton.jit
def write_kernel(
    q_c,
    q_weight,
    kv_c,
    kv_weight,
    k_pe,
    index_k,
    index_weight,
    index_bias,
    cos,
    sin,
    q_out,
    kv_out,
    pe_out,
    index_out,
    cache,
    slot_mapping,
    index_cache,
    index_slot_mapping,
    scale,
    q_width,
    index_width,
    half,
    q_row,
    kv_row,
    pe_row,
    index_row,
    cos_row,
    sin_row,
    slot_stride,
    index_slot_stride,
    block_stride,
    index_block_stride,
    block_size,
    index_block_size,
    capacity,
    index_capacity,
    eps,
    index_eps,
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    INDEX_READ: tl.constexpr,
    INDEX_WRITE: tl.constexpr,
    HADAMARD: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    INDEX_STEPS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    LAYOUT: tl.constexpr,
    LATENT_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    UE8M0: tl.constexpr,
    DIM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cos += row * cos_row
    sin += row * sin_row
    if part == 0:
        q = rms_normed(q_c + row * q_row, q_weight, q_width, eps, Q_BLOCK)
        store_row(q_out, row, q_width, q, Q_BLOCK)
    elif part == 1:
        kv = rms_normed(kv_c + row * kv_row, kv_weight, LATENT, eps, LATENT_PAD)
        store_row(kv_out, row, LATENT, kv, LATENT_PAD)
        pe = rotated_key(k_pe + row * pe_row, cos, sin, half, READ, WRITE, ROPE_PAD)
        store_row(pe_out, row, ROPE, pe, ROPE_PAD)
        slot = tl.load(slot_mapping + row * slot_stride)
        if (slot >= 0) & (slot < capacity):
            place = cache + (slot // block_size) * block_stride + (slot % block_size) * WIDTH
            latent = kv.to(kv_out.dtype.element_ty).to(tl.float32)
            if LAYOUT == "fp8_ds_mla":
                tiles = tl.reshape(latent, (LATENT_PAD // 128, 128))
                store_latent(tiles, place, scale, LATENT, LAYOUT, LATENT_PAD)
            else:
                store_latent(latent, place, scale, LATENT, LAYOUT, LATENT_PAD)
            rope = pe.to(pe_out.dtype.element_ty).to(tl.float32)
            store_rope(rope, place, scale, LATENT, ROPE, LAYOUT, ROPE_PAD)
    else:
        key = index_key(
            index_k + row * index_row,
            index_weight,
            index_bias,
            cos,
            sin,
            index_width,
            half,
            index_eps,
            INDEX_READ,
            INDEX_WRITE,
            HADAMARD,
            INDEX_STEPS,
        )
        store_row(index_out, row, index_width, key, 2**INDEX_STEPS)
        index_slot = tl.load(index_slot_mapping + row * index_slot_stride)
        if (index_slot >= 0) & (index_slot < index_capacity):
            rounded = key.to(index_out.dtype.element_ty).to(tl.float32)
            inside = tl.arange(0, 2**INDEX_STEPS) < index_width
            block = index_cache + (index_slot // index_block_size) * index_block_stride
            store_index_key(
                tl.where(inside, rounded, 0.0),
                block,
                index_slot % index_block_size,
                index_block_size,
                DIM,
                UE8M0,
                2**INDEX_STEPS,
            )
