from __future__ import annotations

import math
import shutil
import subprocess
import threading
import warnings

import pytest
import torch
from _reference import causal_intervals, int32
from test_cpu_attention import (
    INTERVALS,
    SCALE,
    TOLERANCE,
    check_dense,
    check_masked,
    expanded,
    selection,
)

from dsafx import ops
from dsafx.ops.cpu import _build, _tiles
from dsafx.ops.cpu._runs import Form, Run
from dsafx.ops.cpu.attention import ATTENTION

HALF_AND_FLOAT = [torch.float32, torch.float16]


@pytest.fixture
def tiles():
    """The compiled kernel, where there is a compiler."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        if not _tiles.serve(torch.empty(0)):
            pytest.skip("no C++ compiler")


@pytest.fixture
def small_tiles(tiles, monkeypatch):
    """Tiles so small that a few keys make many."""
    for name, size in (("_TILE_ROWS", 6), ("_TILE_KEYS", 5), ("_EDGE_KEYS", 3)):
        monkeypatch.setattr(_tiles, name, size)


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A process that has not asked for the kernel yet, and an empty cache of extensions."""
    monkeypatch.setattr(
        _tiles, "_ENTRY", _build.Entry("mha_tiles.cpp", "dsafx_attend", "attention")
    )
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path / "dsafx"


def dense_of(q, k, v, ks, ke):
    return ATTENTION["dense_mha"].run(q, k, v, ks, ke, k.shape[0], SCALE)


@pytest.mark.parametrize("name", INTERVALS)
@pytest.mark.parametrize("dtype", HALF_AND_FLOAT)
@pytest.mark.parametrize("topk", [3, 20, 61])
def test_many_tiles_equal_the_reference(small_tiles, name, dtype, topk):
    ks, ke = INTERVALS[name]
    operands = expanded(ks.shape[0], 61, dtype=dtype)
    check_dense(*operands, ks, ke, dtype)
    check_masked(*operands, selection(ks, ke, topk), ks, ke, dtype)


def test_scores_that_rise_and_fall_with_the_keys_keep_their_weights(small_tiles):
    ks, ke = causal_intervals([40])
    for slope in (1.0, -1.0):
        q = torch.ones(40, 1, 1)
        k = slope * torch.arange(40.0).view(40, 1, 1)
        check_dense(q, k, torch.randn(40, 1, 4), ks, ke)


@pytest.mark.parametrize("dtype", HALF_AND_FLOAT)
def test_what_no_row_reads_never_reaches_a_result(small_tiles, dtype):
    ks, ke = int32(*[2] * 9, *[30] * 9), int32(*range(3, 12), *range(31, 40))
    read = torch.zeros(61, dtype=torch.bool)
    read[2:11] = read[30:39] = True
    q, k, v = expanded(18, 61, dtype=dtype)
    poisoned = [x.masked_fill(~read[:, None, None], float("nan")) for x in (k, v)]
    for clean, dirty in zip(dense_of(q, k, v, ks, ke), dense_of(q, *poisoned, ks, ke), strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("dtype", HALF_AND_FLOAT)
def test_a_key_that_is_seen_but_not_selected_may_be_nan(small_tiles, dtype):
    ks, ke = causal_intervals([30])
    indices = selection(ks, ke, 8)
    indices[indices % 4 == 1] = -1
    q, k, v = expanded(30, 30, dtype=dtype)
    clean = ATTENTION["masked_mha"].run(q, k, v, indices, ks, ke, SCALE)
    k[1::4], v[1::4] = float("nan"), float("inf")
    dirty = ATTENTION["masked_mha"].run(q, k, v, indices, ks, ke, SCALE)
    assert all(map(torch.equal, clean, dirty))


def test_probabilities_are_exact_to_the_last_places_over_the_whole_range(tiles):
    logits = -torch.arange(0, 110, 0.037)
    keys = logits.shape[0]
    q, k = torch.ones(1, 1, 1), logits.view(-1, 1, 1)
    out, lse = ATTENTION["dense_mha"].run(
        q, k, torch.eye(keys)[:, None], int32(0), int32(keys), keys, 1.0
    )
    exact = logits.double().softmax(0)
    normal = exact > 2.0**-120
    error = (out[0, 0].double() / exact - 1).abs()[normal]
    assert float(error.max()) < 8 * 2.0**-24
    assert float(out[0, 0][~normal].max()) < 2.0**-119
    assert math.isclose(float(lse), float(logits.double().logsumexp(0)), abs_tol=1e-6)


def test_numbers_that_are_not_finite_mean_what_they_mean_to_the_reference(small_tiles):
    ks, ke = causal_intervals([12])
    for place, value in ((0, "nan"), (5, "nan"), (0, "-inf"), (5, "-inf")):
        q, k, v = torch.ones(12, 1, 2), torch.randn(12, 1, 2), torch.randn(12, 1, 2)
        k[place] = float(value)
        with ops.use_provider("reference"):
            expected = ops.dense_mha(q, k, v, ks, ke, 12, SCALE)
        for ours, theirs in zip(dense_of(q, k, v, ks, ke), expected, strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("dtype", HALF_AND_FLOAT)
def test_bits_do_not_depend_on_the_number_of_threads(small_tiles, dtype):
    ks, ke = causal_intervals([50, 7], cached=4)
    q, k, v = expanded(57, 65, dtype=dtype)
    indices = selection(ks, ke, 20)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            masked = ATTENTION["masked_mha"].run(q, k, v, indices, ks, ke, SCALE)
            results.append([*dense_of(q, k, v, ks, ke), *masked])
    finally:
        torch.set_num_threads(threads)
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))


@pytest.mark.parametrize("budget", [1 << 20, 16 << 20, 256 << 20])
def test_what_the_tiles_of_all_threads_hold_fits_half_of_the_workspace(budget, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    with ops.options(workspace_bytes=budget):
        rows, keys = _tiles._tile([Run(0, 4096, 0, 4096, Form.CAUSAL)], 256, 128)
    held = 4 * 4 * (rows * keys + (rows + keys) * (256 + 128))
    assert held <= budget // 2
    assert rows == keys == {1 << 20: 32, 16 << 20: 256, 256 << 20: 512}[budget]


def test_float32_and_float16_are_served_and_only_while_the_option_is_on(tiles):
    served = [dtype for dtype in TOLERANCE if _tiles.serve(torch.empty(0, dtype=dtype))]
    assert served == HALF_AND_FLOAT
    with ops.options(compiled_kernels=False):
        assert not _tiles.serve(torch.empty(0))


def test_nothing_is_compiled_while_the_option_is_off(fresh):
    with ops.options(compiled_kernels=False):
        check_dense(*expanded(40, 40), *causal_intervals([40]))
    assert not fresh.exists()
    assert not _tiles._ENTRY.asked


@pytest.mark.parametrize(
    ("compiler", "why"),
    [("no-such-compiler", "No such file.*no-such-compiler"), ("false", "false failed: exit code")],
)
def test_without_a_compiler_one_warning_says_why_and_results_stay(
    fresh, monkeypatch, compiler, why
):
    monkeypatch.setenv("CXX", compiler)
    operands, intervals = expanded(40, 40), causal_intervals([40])
    with pytest.warns(RuntimeWarning, match=f"slower kernels, for .*{why}"):
        check_dense(*operands, *intervals)
    with warnings.catch_warnings(action="error"):
        check_masked(*operands, selection(*intervals, 9), *intervals)


def test_where_nothing_can_be_written_the_error_names_the_place(fresh, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    with pytest.raises(_build.BuildError, match="file/dsafx"):
        _build.load(_tiles._ENTRY.source)


def test_a_library_is_compiled_once_even_by_threads_and_leaves_only_itself(
    fresh, tmp_path, monkeypatch
):
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    monkeypatch.delenv("CXX", raising=False)
    source = tmp_path / "answer.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(_build.load(source).answer()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [42] * 4
    assert len(list(fresh.iterdir())) == 1

    monkeypatch.setattr(subprocess, "run", None)
    assert _build.load(source).answer() == 42
    source.write_text('extern "C" int answer() { return 43; }')
    with pytest.raises(TypeError):
        _build.load(source)
