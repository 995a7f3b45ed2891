"""The libraries around this package: supported versions, and what the absence of each costs."""

from __future__ import annotations

from dataclasses import dataclass

from .ops import libraries

Version = tuple[int, ...]


@dataclass(frozen=True)
class Library:
    """One library.

    name: what is imported.
    first, below: the supported range; None where any version is tried, function by function.
    cost: what does not work, or works less well, without it.
    needs_cuda: whether it matters only where there is a CUDA device.
    """

    name: str
    first: Version | None
    below: Version | None
    cost: str
    needs_cuda: bool = False

    @property
    def distributions(self) -> tuple[str, ...]:
        """Names that it may be installed under."""
        return libraries.distributions(self.name)

    @property
    def supported(self) -> str:
        """The range, as a requirement has it."""
        bounds = ((">=", self.first), ("<", self.below))
        parts = [sign + ".".join(map(str, bound)) for sign, bound in bounds if bound is not None]
        return ",".join(parts) or "any"

    def accepts(self, version: Version) -> bool:
        """Whether ``version`` is in the range."""
        return (self.first is None or version >= self.first) and (
            self.below is None or version < self.below
        )


LIBRARIES: tuple[Library, ...] = (
    Library("python", (3, 11), (3, 14), "nothing runs"),
    Library("torch", (2, 11), (2, 16), "nothing runs"),
    Library(
        "triton",
        (3, 6),
        (3, 10),
        "calls on cuda run on the reference, which takes many launches, holds its gathered rows in"
        " the workspace and reads the device, so that no CUDA graph can be captured",
        needs_cuda=True,
    ),
    Library(
        "transformers",
        (5, 24),
        None,
        "dsafx.enable and dsafx demo have no models to work on; ops, routing and passes work",
    ),
    Library(
        "flashinfer",
        (0, 6, 18),
        (0, 8),
        "its kernels for sparse and dense attention and for top-k are not there to choose",
        needs_cuda=True,
    ),
    Library(
        "deep_gemm",
        None,
        None,
        "its fp8 index scores are not there to choose",
        needs_cuda=True,
    ),
    Library(
        "flash_mla",
        None,
        None,
        "its sparse attention is not there to choose",
        needs_cuda=True,
    ),
)
"""The ranges of ``pyproject.toml``; a test holds the two together."""
