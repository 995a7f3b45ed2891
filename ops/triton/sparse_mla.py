"""``sparse_mla``: latents and rotated keys apart, as the kernel takes them."""

from __future__ import annotations

from torch import Tensor

from .._sparse import check_positions
from . import _sparse_launch
from ._variants import Variant


def supports(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    indices: Tensor,
    ks: Tensor,
    scale: float,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> str | None:
    """None unless queries are float64, or wider than the tiles."""
    return _sparse_launch.refusal(q_latent, q_latent.shape[2], q_pe.shape[2])


def run(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    indices: Tensor,
    ks: Tensor,
    scale: float,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """``sparse_mla`` in one launch, or two where few tokens are split over their lanes."""
    check_positions(indices, ks, kv_c.shape[0])
    return _sparse_launch.attend(
        q_latent, q_pe, kv_c, k_pe, indices, ks, scale, return_lse, batch_invariant
    )


def variants(arch: int) -> list[Variant]:
    """Every form that is launched on ``arch``; ``sparse_mqa`` shares them."""
    return [
        variant
        for split in (False, True)
        for variant in _sparse_launch.variants(arch, "sparse_mla", split)
    ]
