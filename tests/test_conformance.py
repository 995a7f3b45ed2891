"""The conformance kit itself: right kernels pass every case, and each case catches its fault."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from dsafx import ops
from dsafx.conformance import CASES, SIZES, Adapters, Case, Dims, Report, adapters_for, poison, run
from dsafx.ops import providers, tolerances

EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
EVERY_PROVIDER = pytest.mark.parametrize(
    "name", [p.name for p in providers.PROVIDERS if p.library is None]
)


def outcome(case: Case, adapters: Adapters, size: str) -> tuple[str, str]:
    (result,) = run(adapters, size, [case]).results
    return result.outcome, result.reason


@EVERY_PROVIDER
@pytest.mark.parametrize("size", SIZES)
def test_every_provider_passes_every_case_that_runs_at_a_size(name: str, size: str):
    report = run(adapters_for(name), size)
    assert report.ok, str(report)
    assert {result.reason for result in report.skipped} <= {"runs at size full"}


@EVERY_PROVIDER
def test_every_provider_passes_under_the_poison_allocator(name: str):
    with poison():
        report = run(adapters_for(name))
    assert report.ok, str(report)


@EVERY_CASE
def test_a_case_fails_on_its_planted_fault_at_each_of_its_sizes(case: Case):
    for size in case.sizes:
        assert outcome(case, case.fault(adapters_for("reference")), size)[0] == "failed"


@EVERY_CASE
def test_a_planted_fault_is_seen_as_a_broken_rule_and_not_as_a_crash(case: Case):
    reason = outcome(case, case.fault(adapters_for("reference")), case.sizes[-1])[1]
    assert reason.startswith("AssertionError: ")


def test_only_positions_beyond_65_535_need_the_full_size():
    assert [case.name for case in CASES if "small" not in case.sizes] == [
        "positions beyond 65 535 and 131 072 are found"
    ]


def test_names_are_unique_and_rules_and_classes_are_well_formed():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    for case in CASES:
        assert all(re.fullmatch(r"C([1-9]|1\d|2[0-3])", rule) for rule in case.rules), case.name
        assert all(re.fullmatch(r"[A-J]\d+", name) for name in case.classes), case.name


def test_every_class_of_bugs_that_kernels_can_show_is_covered():
    letters = {name[0] for case in CASES for name in case.classes}
    assert letters >= set("ABCDEFHI")


def test_small_stays_within_eight_rows_sixteen_heads_and_256_lanes():
    seen: list[tuple[int, int, int]] = []

    def select(*args: object) -> torch.Tensor:
        q, topk = args[0], args[6]
        assert isinstance(q, torch.Tensor)
        assert isinstance(topk, int)
        seen.append((q.shape[0], q.shape[1], topk))
        return ops.index_select(*args)  # type: ignore[arg-type]

    def attend(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
        q, indices = args[0], args[2]
        assert isinstance(q, torch.Tensor)
        assert isinstance(indices, torch.Tensor)
        seen.append((q.shape[0], q.shape[1], indices.shape[1]))
        return ops.sparse_mqa(*args)  # type: ignore[arg-type]

    run(replace(adapters_for("reference"), select=select, attend=attend))
    assert len(seen) > 100
    rows, heads, lanes = (max(column) for column in zip(*seen, strict=True))
    assert (rows <= 8, heads <= 16, lanes <= 256) == (True, True, True)


def test_kernels_that_round_scores_to_fp8_owe_recall_and_skip_exact_cases():
    def select(*args: object) -> torch.Tensor:
        q, k = (_fp8(x) for x in args[:2])  # type: ignore[arg-type]
        return ops.index_select(q, k, *args[2:])  # type: ignore[arg-type]

    def scores(*args: object) -> torch.Tensor:
        q, k = (_fp8(x) for x in args[:2])  # type: ignore[arg-type]
        return ops.index_scores(q, k, *args[2:])  # type: ignore[arg-type]

    dims = Dims(index_heads=32, index_dim=128)
    claimed = Adapters("fp8", scores, select, dims=dims, dtypes=(torch.float32,), fp8_scores=True)
    report = run(claimed, "full")
    assert report.ok, str(report)
    assert any("exact scores" in result.reason for result in report.skipped)
    assert not run(replace(claimed, fp8_scores=False), "full").ok


def test_what_is_not_given_is_skipped_with_the_reason():
    report = run(Adapters("nothing"))
    skipped = {result.case.name: result.reason for result in report.skipped}
    assert skipped["minus zero and zero are equal scores"] == "nothing has no select"
    assert report.ok


def test_a_refusal_skips_a_case_and_any_other_error_fails_it():
    def refuse(*args: object) -> None:
        raise NotImplementedError("only 64 heads")

    def crash(*args: object) -> None:
        raise RuntimeError("illegal memory access")

    (case,) = (case for case in CASES if case.name == "large logits give no NaN")
    assert outcome(case, Adapters("x", attend=refuse), "small") == ("skipped", "only 64 heads")
    assert outcome(case, Adapters("x", attend=crash), "small") == (
        "failed",
        "RuntimeError: illegal memory access",
    )


def test_a_report_reads_as_a_table():
    case = replace(CASES[0], name="dots are rectified", needs=("scores",))
    report: Report = run(Adapters("mine"), cases=[case])
    assert str(report) == (
        "mine, size small: 0 passed, 0 failed, 1 skipped\n"
        "  skipped dots are rectified  [C10 C18 D11 D12]\n"
        "          mine has no scores"
    )


def test_adapters_are_found_by_module_and_attribute():
    assert adapters_for(f"{__name__}:MINE") is MINE
    assert adapters_for(f"{__name__}:mine") is MINE
    with pytest.raises(TypeError, match="must be an Adapters or return one, got str"):
        adapters_for(f"{__name__}:__name__")


def test_a_provider_is_held_to_exact_scores_unless_it_says_that_it_rounds_to_fp8():
    held = {name: not adapters_for(name).fp8_scores for name in ("cpu", "triton", "deep_gemm")}
    assert held == {"cpu": True, "triton": True, "deep_gemm": False}
    assert adapters_for("deep_gemm").batch_invariant.fp8_scores


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: adapters_for("fast"), "name must be .*reference.* or module:attribute, got 'f"),
        (lambda: run(MINE, "huge"), "size must be small or full, got 'huge'"),
        (lambda: replace(MINE, layouts=("fp4",)), "layouts accepts bf16, .*, got fp4"),
        (lambda: replace(MINE, dtypes=()), "at least one dtype"),
    ],
)
def test_wrong_arguments_are_refused_by_name(call: object, message: str):
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()


def test_a_value_tolerance_grows_with_length_and_coarser_dtypes():
    assert tolerances.value_tolerance(torch.float32, 0, 1.0) == 2**-24
    assert tolerances.value_tolerance(torch.float32, 1 << 10, 1.0) == pytest.approx(
        2**-14, rel=0.01
    )
    assert tolerances.value_tolerance(torch.bfloat16, 64, 3.0) == pytest.approx(3 * 2**-8, rel=0.01)
    with pytest.raises(ValueError, match="length must be between 0 and 16777215, got -1"):
        tolerances.value_tolerance(torch.float32, -1, 1.0)


def test_a_selection_margin_is_twice_the_error_of_a_score_and_holds_for_float32_scores():
    torch.manual_seed(1)
    q, k, weights = torch.randn(7, 5, 64), torch.randn(300, 64), torch.randn(7, 5)
    magnitude = tolerances.score_magnitude(q, k, weights)
    budget = tolerances.score_tolerance(torch.float32, 5, 64, magnitude)
    exact = torch.einsum(
        "th,ths->ts", weights.double(), torch.einsum("thd,sd->ths", q.double(), k.double()).relu()
    )
    ends = torch.full((7,), 300, dtype=torch.int32)
    error = (ops.index_scores(q, k, weights, 0 * ends, ends).double() - exact).abs()
    assert bool((error <= budget).all())
    assert float((error / budget).max()) > 1e-3
    margin = tolerances.selection_margin(torch.float32, 5, 64, magnitude)
    assert torch.equal(margin, 2 * budget)


def test_only_fp8_is_held_to_recall():
    assert tolerances.least_recall(torch.bfloat16, 10) == 1.0
    assert tolerances.least_recall(torch.float8_e4m3fn, 2048) == 0.95
    assert tolerances.least_recall(torch.float8_e4m3fn, 64) == pytest.approx(0.9, abs=0.005)


def _fp8(x: torch.Tensor) -> torch.Tensor:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


MINE = Adapters("mine")


def mine() -> Adapters:
    return MINE
