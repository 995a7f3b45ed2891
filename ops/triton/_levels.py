"""How far each kernel has been checked, as data: interpreted, or run on a named device.

That it compiles for an architecture is found out anew by the compile report and not written down.
"""

from __future__ import annotations

RAN_ON: dict[str, dict[int, str]] = {}
"""By the first word of a variant's name and by architecture: device, release of Triton, date."""


def level(kernel: str, arch: int) -> str:
    """``interpreted``, or ``ran on`` and the device."""
    device = RAN_ON.get(kernel, {}).get(arch)
    return f"ran on {device}" if device is not None else "interpreted"
