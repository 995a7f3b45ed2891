"""How far each provider has been checked, as data: compiled, interpreted, bound, and run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Level:
    """What this project's tests have seen a provider's kernels do.

    compiled: architectures that every kernel compiles for, within their limits and without spills.
    interpreted: the conformance kit passes in Triton's interpreter.
    bound: versions of a library whose signatures every call fits.
    ran: names of the devices on which the conformance kit passes.
    """

    compiled: tuple[int, ...] = ()
    interpreted: bool = False
    bound: tuple[str, ...] = ()
    ran: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = []
        if self.compiled:
            parts.append(f"compiled for {', '.join(f'sm_{arch}' for arch in self.compiled)}")
        if self.interpreted:
            parts.append("interpreted")
        if self.bound:
            parts.append(f"bound to {', '.join(self.bound)}")
        parts.append(f"ran on {', '.join(self.ran)}" if self.ran else "ran on no device yet")
        return "; ".join(parts)


KERNELS_RAN_ON: dict[str, dict[int, str]] = {}
"""Of Triton's kernels, by op and architecture: device, release of Triton, date."""


def kernel_level(kernel: str, arch: int) -> str:
    """How far one of Triton's kernels has been checked: ``interpreted``, or ``ran on`` and where.

    That it compiles for an architecture is found out anew by the compile report.
    """
    device = KERNELS_RAN_ON.get(kernel, {}).get(arch)
    return f"ran on {device}" if device is not None else "interpreted"


LEVELS: dict[str, Level] = {
    "reference": Level(ran=("the CPU",)),
    "cpu": Level(ran=("the CPU",)),
    "triton": Level(compiled=(80, 89, 90, 100, 120), interpreted=True),
    "flashinfer": Level(bound=("0.6.18.post1", "0.7.2.post1", "0.7.4")),
    "deep_gemm": Level(bound=("54e2261",)),
    "flash_mla": Level(bound=("9241ae3",)),
}
"""By the provider's name. Whoever runs the kit on a new device adds it to ``ran``."""
