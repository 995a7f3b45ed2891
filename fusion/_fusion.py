"""What a fusion is, and when it pays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..ops import providers


@dataclass(frozen=True)
class Fusion:
    """A fused op, the parts that it stands for, and how its rounding differs from theirs.

    op: the fused kernel op.
    parts: the ops that it stands for, in the order in which a layer calls them.
    outputs: names of its results.
    rounding: for each result that need not equal that of the parts bit for bit, what is rounded
        when. All other results, and everything written to a cache, are bit-equal.
    """

    op: str
    parts: tuple[str, ...]
    outputs: tuple[str, ...]
    rounding: Mapping[str, str] = field(default_factory=dict)


def reason_not_to_fuse(fusion: Fusion, fuse: str, device_type: str) -> str | None:
    """None where the fused op is wanted, else why it is not.

    Args:
        fusion: what would be fused.
        fuse: ``"always"``, ``"never"``, or ``"auto"``, which asks the device's provider.
        device_type: where the tensors are.
    """
    if fuse == "always":
        return None
    if fuse == "never":
        return 'fuse="never"'
    provider = providers.dispatch(device_type)
    if fusion.op in provider.fused:
        return None
    return f"{fusion.op} of the {provider.name} provider is not faster than its parts"
