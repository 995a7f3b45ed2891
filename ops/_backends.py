"""Kernels that are publicly known for sparse attention, with their flags and the reason of each.

A flag is True where the released code offers that route on that hardware for the usual dimensions;
what is unknown counts as False. None of these rows takes part in dispatch: a provider of this
package declares its own ``KernelCapabilities``. Sources: vLLM 0.33.0 and FlashInfer 0.6.18.
"""

from __future__ import annotations

from dataclasses import dataclass

from ._capabilities import KernelCapabilities


@dataclass(frozen=True)
class Backend:
    """One row: the kernels called ``name`` on ``hardware``, what they offer, and why."""

    name: str
    hardware: str
    kernels: KernelCapabilities
    reason: str


_NONE = KernelCapabilities()
_DENSE = KernelCapabilities(dense_mha=True)
_BOTH = KernelCapabilities(dense_mha=True, masked_mha=True)

_BACKENDS = (
    Backend(
        "dsafx reference",
        "any",
        KernelCapabilities(dense_mha=True, masked_mha=True, returns_lse=True),
        "plain PyTorch, the meaning of each op",
    ),
    Backend(
        "dsafx cpu",
        "CPU",
        KernelCapabilities(dense_mha=True, masked_mha=True, returns_lse=True),
        "the same contract in blocks that fit the caches of a CPU",
    ),
    Backend(
        "dsafx triton",
        "SM80 to SM120",
        KernelCapabilities(dense_mha=True, masked_mha=True, returns_lse=True),
        "compiled for each architecture and interpreted; only where it is named",
    ),
    Backend(
        "dsafx flashinfer",
        "SM80 to SM120",
        KernelCapabilities(dense_mha=True, returns_lse=True),
        "adapters, sparse from SM90 up, no masked kernel; only where it is named",
    ),
    Backend(
        "dsafx flash_mla", "SM90, SM100", _NONE, "an adapter, top-k MQA; only where it is named"
    ),
    Backend("dsafx deep_gemm", "SM90, SM100", _NONE, "an adapter, scores; only where it is named"),
    Backend(
        "FlashInfer sparse MLA",
        "SM90",
        _DENSE,
        "dense prefill by a separate MHA kernel; the masked kernel needs SM100",
    ),
    Backend(
        "FlashInfer sparse MLA",
        "SM100",
        _BOTH,
        "masked only with a cache that is not quantised and FlashAttention 4",
    ),
    Backend(
        "FlashInfer sparse MLA",
        "SM120",
        _NONE,
        "top-k MQA only (fp8_ds_mla cache, pages of 64): no dense prefill, though its base class "
        "declares one",
    ),
    Backend(
        "FlashMLA sparse",
        "SM90",
        _DENSE,
        "not for a model without RoPE dims on an fp8_ds_mla cache; the masked kernel needs SM100",
    ),
    Backend(
        "FlashMLA sparse",
        "SM100",
        _BOTH,
        "dense: not for a model without RoPE dims on an fp8_ds_mla cache; masked: bf16 cache only",
    ),
    Backend(
        "FlashAttention 3 sparse MLA",
        "SM90",
        _DENSE,
        "fp16 and bf16 cache; the masked kernel needs SM100",
    ),
    Backend(
        "FlashAttention 4 sparse MLA",
        "SM100",
        _BOTH,
        "bf16 cache",
    ),
    Backend(
        "ROCm AITER sparse MLA",
        "gfx942, gfx950",
        _DENSE,
        "dense only without attention sinks; no masked kernel",
    ),
    Backend(
        "XPU sparse MLA",
        "Intel GPU",
        _NONE,
        "no MHA at all, though its base class declares one",
    ),
)


def known_backends() -> tuple[Backend, ...]:
    """All rows, this package's own providers first."""
    return _BACKENDS
