"""Numbers of compiled kernels against recorded ones, and the recorded ones themselves."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dsafx._kernel_snapshot import Entry, Part, Snapshot, SnapshotError, differences, read

RECORDED = Path(__file__).parent / "kernels.txt"
PINS = Path(__file__).parent.parent / "requirements-triton.txt"

SPARSE = Entry(90, "sparse BH64", "wgmma.mma_async", 240, 147584, 0)
MERGE = Entry(90, "merge", "", 32, 0, 0)
OTHER = Entry(100, "sparse BH64", "tcgen05.mma", 220, 144040, 512)
BOTH = Part((90, 100))


def snapshot(*entries: Entry, triton: str = "3.8.0") -> Snapshot:
    return Snapshot(triton, entries)


def changes(after: Entry, before: Entry = SPARSE, triton: str = "3.8.0") -> list[str]:
    return differences(snapshot(before), snapshot(after, triton=triton), BOTH)


def test_what_was_recorded_agrees_with_itself():
    assert differences(snapshot(SPARSE, MERGE), snapshot(MERGE, SPARSE), BOTH) == []


def test_a_tile_that_falls_to_the_slower_matrix_instruction_is_a_difference_on_any_release():
    fallen = replace(SPARSE, instruction="mma.sync")
    expected = ["sm_90 sparse BH64: wgmma.mma_async recorded, mma.sync found"]
    assert changes(fallen) == expected
    assert changes(fallen, triton="3.9.0") == expected
    assert changes(replace(SPARSE, instruction="")) == [
        "sm_90 sparse BH64: wgmma.mma_async recorded, no matrix instruction found"
    ]


def test_a_kernel_that_is_gone_and_one_that_is_new_are_differences():
    assert differences(snapshot(SPARSE), snapshot(MERGE), BOTH) == [
        "sm_90 merge: compiled, but not recorded",
        "sm_90 sparse BH64: recorded, but not compiled",
    ]


@pytest.mark.parametrize(
    ("field", "unit", "tolerance"),
    [
        ("registers", "registers", 8),
        ("shared", "bytes of shared memory", 1024),
        ("tensor_memory", "columns of tensor memory", 0),
    ],
)
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_number_may_move_by_its_tolerance_and_no_further(
    field: str, unit: str, tolerance: int, sign: int
):
    was = getattr(OTHER, field)
    there = replace(OTHER, **{field: was + sign * tolerance})
    beyond = replace(OTHER, **{field: was + sign * (tolerance + 1)})
    assert changes(there, OTHER) == []
    assert changes(beyond, OTHER) == [
        f"sm_100 sparse BH64: {was} {unit} recorded, {was + sign * (tolerance + 1)} found;"
        f" {tolerance} more or fewer pass"
    ]
    assert changes(beyond, OTHER, triton="3.9.0") == []


def test_only_what_a_run_compiles_is_compared():
    recorded = snapshot(SPARSE, MERGE, OTHER)
    assert differences(recorded, snapshot(SPARSE, MERGE), Part([90])) == []
    assert differences(recorded, snapshot(SPARSE, OTHER), Part([90, 100], "sparse")) == []


def test_a_snapshot_survives_its_file(tmp_path: Path):
    path = tmp_path / "kernels.txt"
    path.write_text(str(snapshot(OTHER, SPARSE, MERGE)))
    assert path.read_text().splitlines()[2:] == [
        "triton 3.8.0",
        "90  -                32      0   0 merge",
        "90  wgmma.mma_async 240 147584   0 sparse BH64",
        "100 tcgen05.mma     220 144040 512 sparse BH64",
    ]
    assert read(path) == snapshot(MERGE, SPARSE, OTHER)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("triton 3.8.0\n90 - 32 0 merge\n", ":2: not a line of a snapshot: '90 - 32 0 merge'"),
        ("triton 3.8.0\n\n90 - x 0 0 merge\n", ":3: not a line of a snapshot: '90 - x 0 0 merge'"),
        ("90 - 32 0 0 merge\n", ": does not say which release of Triton it was recorded with"),
    ],
)
def test_a_file_that_is_no_snapshot_is_refused_by_the_line(tmp_path: Path, text: str, message: str):
    path = tmp_path / "kernels.txt"
    path.write_text(text)
    with pytest.raises(SnapshotError, match=re.escape(f"{path}{message}")):
        read(path)


def test_recording_a_part_leaves_the_rest_and_forgets_what_is_gone():
    recorded = snapshot(SPARSE, MERGE, OTHER)
    found = snapshot(replace(SPARSE, name="sparse BH32"))
    updated = recorded.updated(found, Part([90], "sparse"))
    assert sorted(updated.entries) == sorted((MERGE, OTHER, *found.entries))


def test_one_file_holds_one_release():
    newer = snapshot(SPARSE, triton="3.9.0")
    assert snapshot(MERGE).updated(newer, Part([90])) == newer
    with pytest.raises(SnapshotError, match=r"1 other kernels are recorded with Triton 3\.8\.0"):
        snapshot(OTHER).updated(newer, Part([90]))


def test_the_recorded_kernels_are_those_of_the_pinned_triton():
    recorded = read(RECORDED)
    assert f"triton=={recorded.triton}" in PINS.read_text().splitlines()
    assert {each.arch for each in recorded.entries} == {80, 89, 90, 100, 120}


def test_every_recorded_tile_of_64_heads_has_the_instruction_of_its_architecture():
    fastest = {90: "wgmma.mma_async", 100: "tcgen05.mma"}
    for arch, instruction in fastest.items():
        found = {
            each.name: each.instruction
            for each in read(RECORDED).entries
            if each.arch == arch and re.match(r"sparse_\w+ BH64 ", each.name)
        }
        assert len(found) == 8
        assert set(found.values()) == {instruction}
