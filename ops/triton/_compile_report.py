"""What each kernel becomes on an architecture: registers, spills, memory and matrix instruction.

Nothing here needs a GPU or a driver: Triton compiles for a named architecture, and the assembler
and disassembler that it ships read the result. Triton itself checks none of these limits: a kernel
that needs more memory than there is compiles without an error and fails when it is launched.
``TRITON_INTERPRET`` must be unset: it turns every kernel into one that cannot be compiled.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..libraries import interpreted
from ._device import ARCHITECTURES
from ._variants import Variant

SHARED_LIMIT = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Most bytes of shared memory that one block may have (CUDA C++ Programming Guide, table of
technical specifications per compute capability)."""

TENSOR_MEMORY_LIMIT = 512
"""Columns of tensor memory of an SM of compute capability 10 (PTX ISA, tcgen05.alloc)."""

MATRIX_INSTRUCTIONS = {
    80: ("mma.sync",),
    89: ("mma.sync",),
    90: ("wgmma.mma_async", "mma.sync"),
    100: ("tcgen05.mma", "mma.sync"),
    120: ("mma.sync",),
}
"""The matrix instructions of an architecture, the fastest first."""

FIRST_FP8 = 89
"""The first architecture whose matrix units take fp8."""


@dataclass(frozen=True)
class Compiled:
    """One line of the report.

    name, arch: the variant and the architecture.
    registers: of a thread. spilled: bytes of a thread, stored and loaded.
    shared: bytes of shared memory of a block. tensor_memory: columns.
    instruction: the matrix instruction in the code, or "".
    failure: what breaks a limit, or why it did not compile; None where it may be launched.
    """

    name: str
    arch: int
    registers: int
    spilled: int
    shared: int
    tensor_memory: int
    instruction: str
    failure: str | None


def compile_report(variants: Sequence[Variant], arch: int) -> Iterator[Compiled]:
    """Compile ``variants`` for ``arch`` and judge each; those in fp8 only from sm_89 up.

    Raises:
        ValueError: an unknown architecture.
        RuntimeError: the process runs Triton's interpreter.
    """
    if arch not in ARCHITECTURES:
        known = ", ".join(str(each) for each in ARCHITECTURES)
        raise ValueError(f"arch must be one of {known}, got {arch}")
    if interpreted():
        raise RuntimeError("kernels cannot be compiled while TRITON_INTERPRET is set")
    for variant in variants:
        if not variant.fp8 or arch >= FIRST_FP8:
            yield _compile(variant, arch)


def _compile(variant: Variant, arch: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(variant.signature)
    attrs = {(names.index(each),): [["tt.divisibility", 16]] for each in variant.divisible}
    source = ASTSource(variant.kernel, variant.signature, variant.constexprs, attrs)
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        # Its default changes between releases, and with it the code.
        "enable_fp_fusion": True,
    }
    try:
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:
        # Whatever the compiler trips over is this kernel's verdict, and the others go on.
        reason = (str(error).strip().splitlines() or [""])[-1]
        return Compiled(variant.name, arch, 0, 0, 0, 0, "", f"{type(error).__name__}: {reason}")
    ptx = made.asm["ptx"]
    registers, spilled = _resources(made.asm["cubin"], ptx, arch)
    # The fields of this named tuple depend on the release.
    tensor_memory = made.metadata._asdict().get("tmem_size") or 0
    instruction = next((each for each in MATRIX_INSTRUCTIONS[arch] if each in ptx), "")
    found = Compiled(
        variant.name,
        arch,
        registers,
        spilled,
        made.metadata.shared,
        tensor_memory,
        instruction,
        None,
    )
    return replace(found, failure=_failure(found, variant.matrix))


def _failure(found: Compiled, matrix: bool) -> str | None:
    failures = []
    if found.spilled:
        failures.append(f"spills {found.spilled} bytes")
    shared, columns = SHARED_LIMIT[found.arch], TENSOR_MEMORY_LIMIT
    if found.shared > shared:
        failures.append(f"needs {found.shared} bytes of shared memory, there are {shared}")
    if found.tensor_memory > columns:
        failures.append(f"needs {found.tensor_memory} columns of tensor memory of {columns}")
    if matrix and not found.instruction:
        failures.append("has no matrix instruction")
    return "; ".join(failures) or None


def _resources(cubin: bytes, ptx: str, arch: int) -> tuple[int, int]:
    """Registers of a thread, and the bytes that it stores to and loads from its spills."""
    from triton import knobs
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        binary, text = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        binary.write_bytes(cubin)
        usage = _output(knobs.nvidia.cuobjdump.path, "-res-usage", str(binary))
        registers = int(_number(r"REG:(\d+)", usage))
        # Spills live on the stack, so that without one there are none, and assembling once more,
        # which alone counts them, can be spared.
        if not int(_number(r"STACK:(\d+)", usage)):
            return registers, 0
        text.write_text(ptx)
        ptxas = get_ptxas(arch)
        target = re.search(r"\.target (\w+)", ptx)
        assert target is not None, "every PTX file names its target"
        options = ("-v", "--regAllocOptLevel=2", f"--gpu-name={target[1]}", "-o", f"{binary}.again")
        log = _output(ptxas.path, *options, str(text))
        pattern = r"(\d+) bytes spill stores, (\d+) bytes spill loads"
        return registers, sum(int(a) + int(b) for a, b in re.findall(pattern, log))


def _number(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"cuobjdump did not answer with {pattern}: {text}")
    return found[1]


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
