"""``norm_rope`` and ``norm_rope_index``: one launch; a program makes one row of one result.

The latents' programs norm; that of the key-value latent also rotates k_pe; that of the index key
norms, rotates and transforms. All compute in float32 and round once.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ._dtypes import unserved
from ._norm_rows import index_key, rms_normed, rotated_key, steps_of, store_row
from ._paged import rows_of
from ._rotation import READS, WRITES
from ._variants import Variant, variant

NUM_WARPS = 4
ACTIVATIONS = ("q_c", "kv_c", "k_pe", "index_k", "q_out", "kv_out", "pe_out", "index_out")
WEIGHTS = ("q_weight", "kv_weight", "index_weight", "index_bias")
WIDEST = 16384
"""Most columns of a row: a program holds one row, 128 values a thread."""


@triton.jit
def _norm_rope(
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
    q_width,
    kv_width,
    half,
    index_width,
    q_row,
    kv_row,
    pe_row,
    index_row,
    cos_row,
    sin_row,
    eps,
    index_eps,
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    INDEX_READ: tl.constexpr,
    INDEX_WRITE: tl.constexpr,
    HADAMARD: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    PE_BLOCK: tl.constexpr,
    INDEX_STEPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cos += row * cos_row
    sin += row * sin_row
    if part == 0:
        q = rms_normed(q_c + row * q_row, q_weight, q_width, eps, Q_BLOCK)
        store_row(q_out, row, q_width, q, Q_BLOCK)
    elif part == 1:
        kv = rms_normed(kv_c + row * kv_row, kv_weight, kv_width, eps, KV_BLOCK)
        store_row(kv_out, row, kv_width, kv, KV_BLOCK)
        pe = rotated_key(k_pe + row * pe_row, cos, sin, half, READ, WRITE, PE_BLOCK)
        store_row(pe_out, row, 2 * half, pe, PE_BLOCK)
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


def supports(
    q_c: Tensor,
    q_weight: Tensor,
    kv_c: Tensor,
    kv_weight: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    style: str,
) -> str | None:
    """None where ``run`` serves the call, else the reason why not."""
    return too_wide(q_c=q_c, kv_c=kv_c, k_pe=k_pe) or unserved(
        q_c=q_c, q_weight=q_weight, kv_c=kv_c, kv_weight=kv_weight, k_pe=k_pe, cos=cos, sin=sin
    )


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
    eps: float,
    style: str,
    index_eps: float,
    index_style: str,
    hadamard: bool = False,
) -> str | None:
    """None where ``run_index`` serves the call, else the reason why not."""
    return (
        supports(q_c, q_weight, kv_c, kv_weight, k_pe, cos, sin, eps, style)
        or too_wide(index_k=index_k)
        or unserved(index_k=index_k, index_weight=index_weight, index_bias=index_bias)
    )


def too_wide(**rows: Tensor) -> str | None:
    """None where a program can hold a row of each, else which is too wide."""
    for name, tensor in rows.items():
        if tensor.shape[-1] > WIDEST:
            return f"{name} has {tensor.shape[-1]} columns, served are at most {WIDEST}"
    return None


def run(
    q_c: Tensor,
    q_weight: Tensor,
    kv_c: Tensor,
    kv_weight: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    style: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``ops.norm_rope``."""
    out = _launch(
        q_c, q_weight, kv_c, kv_weight, k_pe, None, cos, sin, eps, style, 0.0, style, False
    )
    return out[0], out[1], out[2]


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
    eps: float,
    style: str,
    index_eps: float,
    index_style: str,
    hadamard: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``ops.norm_rope_index``."""
    index = index_k, index_weight, index_bias
    return _launch(
        q_c,
        q_weight,
        kv_c,
        kv_weight,
        k_pe,
        index,
        cos,
        sin,
        eps,
        style,
        index_eps,
        index_style,
        hadamard,
    )


def _launch(
    q_c: Tensor,
    q_weight: Tensor,
    kv_c: Tensor,
    kv_weight: Tensor,
    k_pe: Tensor,
    index: tuple[Tensor, Tensor, Tensor] | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    style: str,
    index_eps: float,
    index_style: str,
    hadamard: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = q_c.shape[0]
    # Where no program makes an index key, the latent stands in for it.
    index_k, index_weight, index_bias = index or (kv_c, kv_weight, kv_weight)
    q_c, kv_c, k_pe, index_k, cos, sin = map(rows_of, (q_c, kv_c, k_pe, index_k, cos, sin))
    q_weight, kv_weight = q_weight.contiguous(), kv_weight.contiguous()
    index_weight, index_bias = index_weight.contiguous(), index_bias.contiguous()
    q_out, kv_out, pe_out = (x.new_empty(x.shape) for x in (q_c, kv_c, k_pe))
    index_out = index_k.new_empty(index_k.shape if index else (0,))
    if tokens:
        _norm_rope[(tokens, 3 if index else 2)](
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
            q_c.shape[1],
            kv_c.shape[1],
            cos.shape[1],
            index_k.shape[1],
            q_c.stride(0),
            kv_c.stride(0),
            k_pe.stride(0),
            index_k.stride(0),
            cos.stride(0),
            sin.stride(0),
            eps,
            index_eps,
            **_constexprs(
                q_c.shape[1],
                kv_c.shape[1],
                k_pe.shape[1],
                index_k.shape[1],
                style,
                index_style,
                hadamard,
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
    hadamard: bool,
) -> dict[str, Any]:
    return {
        **row_constexprs(q_width, index_width, style, index_style, hadamard),
        "KV_BLOCK": triton.next_power_of_2(kv_width),
        "PE_BLOCK": triton.next_power_of_2(pe_width),
    }


def row_constexprs(
    q_width: int, index_width: int, style: str, index_style: str, hadamard: bool
) -> dict[str, Any]:
    """What both forms of the kernel, this one and the writing one, know when they are compiled."""
    return {
        "READ": READS[style],
        "WRITE": WRITES[style],
        "INDEX_READ": READS[index_style],
        "INDEX_WRITE": WRITES[index_style],
        "HADAMARD": hadamard,
        "Q_BLOCK": triton.next_power_of_2(q_width),
        "INDEX_STEPS": steps_of(index_width),
    }


def variants(arch: int) -> list[Variant]:
    """The forms of the kernel at the widths of DeepSeek-V3.2 and GLM-5.2."""
    # Norm weights are in the dtype of the model or in float32; the tables are float32.
    return [
        variant(
            f"norm_rope_index q{q_width} {style} {index_style}{' hadamard' * hadamard} {dtype}",
            _norm_rope,
            {
                **dict.fromkeys(ACTIVATIONS, dtype),
                **dict.fromkeys(WEIGHTS, weights),
                **dict.fromkeys(("cos", "sin"), "fp32"),
            },
            _constexprs(q_width, 512, 64, 128, style, index_style, hadamard),
            divisible=_DIVISIBLE,
            floats=("eps", "index_eps"),
            num_warps=NUM_WARPS,
        )
        for q_width, style, index_style, hadamard, dtype, weights in (
            (1536, "interleaved", "half", True, "bf16", "fp32"),
            (1536, "interleaved_to_half", "half", False, "bf16", "bf16"),
            (2048, "interleaved", "interleaved", False, "bf16", "bf16"),
            (2048, "interleaved", "interleaved", False, "fp32", "fp32"),
        )
    ]


_DIVISIBLE = (
    "q_width",
    "kv_width",
    "half",
    "index_width",
    "q_row",
    "kv_row",
    "pe_row",
    "index_row",
    "cos_row",
    "sin_row",
)
