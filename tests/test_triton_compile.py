"""Every Triton kernel compiled for every architecture, without a GPU, and how it is judged."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from dsafx._kernel_snapshot import read
from dsafx.ops.libraries import installed, interpreted, version

needs_triton = pytest.mark.skipif(
    not installed("triton") or interpreted(), reason="needs Triton, and not its interpreter"
)


def kernels(*arguments: str) -> tuple[int, list[dict[str, object]]]:
    """The records of ``dsafx kernels --json`` and its status, in a process of its own."""
    command = [sys.executable, "-m", "dsafx", "kernels", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 90, 100, 120])
def test_every_kernel_compiles_within_the_limits_of_every_architecture(arch: int):
    status, records = kernels("--arch", str(arch))
    failures = {record["name"]: record["failure"] for record in records if record["failure"]}
    assert failures == {}
    assert status == 0
    assert len(records) > 20


@needs_triton
def test_the_report_names_what_a_kernel_became():
    status, records = kernels("--arch", "90", "--only", "merge_attention 512")
    assert status == 0
    assert [record["name"] for record in records] == [
        "merge_attention 512 bf16",
        "merge_attention 512 fp32",
    ]
    for record in records:
        assert 0 < record["registers"] <= 255
        assert (record["spilled"], record["tensor_memory"], record["failure"]) == (0, 0, None)
        assert record["level"] == "interpreted"


@needs_triton
def test_each_broken_limit_is_a_failure_of_its_own():
    from dsafx.ops.triton import _compile_report as report

    good = report.Compiled("k", 120, 255, 0, 99 << 10, 512, "mma.sync", None)
    assert report._failure(good, matrix=True) is None
    assert report._failure(replace(good, spilled=8), True) == "spills 8 bytes"
    assert report._failure(replace(good, shared=101377), True) == (
        "needs 101377 bytes of shared memory, there are 101376"
    )
    assert report._failure(replace(good, tensor_memory=513), True) == (
        "needs 513 columns of tensor memory of 512"
    )
    assert report._failure(replace(good, instruction=""), True) == "has no matrix instruction"
    assert report._failure(replace(good, instruction=""), False) is None


SPILLING = """
import triton, triton.language as tl
from dsafx.ops.triton._compile_report import compile_report
from dsafx.ops.triton._variants import variant

@triton.jit
def product(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))

@triton.jit
def wrong(a, b, out, N: tl.constexpr):
    tl.store(out + tl.arange(0, 3), 0.0)

def one(kernel, size, warps, name, fp8=False, matrix=True):
    types = {"a": "bf16", "b": "bf16", "out": "fp32"}
    return variant(name, kernel, types, {"N": size}, num_warps=warps, matrix=matrix, fp8=fp8)

variants = [
    one(product, 64, 4, "fits"),
    one(product, 256, 4, "spills"),
    one(wrong, 16, 4, "broken"),
    one(product, 64, 4, "narrow", fp8=True),
]
for line in compile_report(variants, 80):
    print(line.name, line.instruction, line.spilled > 0, line.failure, sep="|")
"""


@needs_triton
def test_a_kernel_that_spills_or_does_not_compile_is_found_and_fp8_waits_for_sm_89(tmp_path):
    script = tmp_path / "kernels.py"
    script.write_text(SPILLING)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split("|") for line in done.stdout.splitlines()]
    assert [line[:3] for line in lines] == [
        ["fits", "mma.sync", "False"],
        ["spills", "mma.sync", "True"],
        ["broken", "", "False"],
    ]
    assert lines[0][3] == "None"
    assert lines[1][3].startswith("spills ")
    assert "arange's range must be a power of 2" in lines[2][3]


MERGE = ("--arch", "90", "--only", "merge_attention 512")


def compared(*arguments: str) -> tuple[int, list[str]]:
    """The status of ``dsafx kernels`` for two kernels, and what it says of a snapshot."""
    command = [sys.executable, "-m", "dsafx", "kernels", "--json", *MERGE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    # The progress bar leaves an empty line behind.
    return done.returncode, done.stderr.strip().splitlines()


@needs_triton
def test_the_report_is_recorded_and_a_difference_from_the_record_fails(tmp_path):
    path = tmp_path / "kernels.txt"
    kept = f"triton {version('triton')}\n80 - 32 0 0 merge_attention 512 bf16\n"
    path.write_text(f"{kept}90 - 32 0 0 merge_attention 512 gone\n")
    assert compared("--record", str(path)) == (0, [])
    recorded = read(path)
    assert [(each.arch, each.name) for each in recorded.entries] == [
        (80, "merge_attention 512 bf16"),
        (90, "merge_attention 512 bf16"),
        (90, "merge_attention 512 fp32"),
    ]
    assert compared("--against", str(path)) == (0, [])

    _, bf16, fp32 = recorded.entries
    path.write_text(str(replace(recorded, entries=(replace(bf16, registers=200), fp32))))
    assert compared("--against", str(path)) == (
        1,
        [
            f"sm_90 merge_attention 512 bf16: 200 registers recorded, {bf16.registers} found;"
            " 8 more or fewer pass",
            "differences from the snapshot: 1; if all are meant, record what was found with"
            " dsafx kernels --record FILE and the same --arch and --only",
        ],
    )


@needs_triton
def test_a_record_of_another_release_is_compared_by_instruction_and_not_overwritten(tmp_path):
    path = tmp_path / "kernels.txt"
    lines = ["80 - 1 0 0 merge", "90 - 1 0 0 merge_attention 512 bf16"]
    lines += ["90 mma.sync 1 0 0 merge_attention 512 fp32"]
    path.write_text("\n".join(["triton 3.0.0", *lines]))
    status, said = compared("--against", str(path))
    assert (status, said[:2]) == (
        1,
        [
            f"recorded with Triton 3.0.0, compiled with {version('triton')}: registers and memory"
            " are not compared",
            "sm_90 merge_attention 512 fp32: mma.sync recorded, no matrix instruction found",
        ],
    )
    status, said = compared("--record", str(path))
    assert status == 2
    # The message stands in a box.
    assert "1 other kernels are recorded with Triton 3.0.0" in re.sub(r"[│\s]+", " ", "".join(said))
    assert path.read_text().endswith("merge_attention 512 fp32")
