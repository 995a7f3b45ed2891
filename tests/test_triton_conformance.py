"""The conformance kit on the triton provider, in the interpreter."""

from __future__ import annotations

import pytest

from dsafx.conformance import CASES, SIZES, Adapters, Case, adapters_for

pytestmark = [pytest.mark.triton, pytest.mark.slow]


@pytest.fixture(scope="module")
def adapters() -> Adapters:
    return adapters_for("triton")


@pytest.mark.parametrize(
    "case", [c for c in CASES if "small" in c.sizes], ids=lambda case: case.name
)
def test_every_case_passes_and_none_is_skipped(case: Case, adapters: Adapters):
    assert case.skipped(adapters, SIZES["small"]) is None
    case.check(adapters, SIZES["small"])
