"""The cases as tests: ``pytest --pyargs dsafx.conformance --dsafx-provider=NAME``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import CASES, SIZES, Adapters, Case, adapters_for, interpreter


@pytest.fixture(scope="module")
def adapters(pytestconfig: pytest.Config) -> Iterator[Adapters]:
    """The kernels under test."""
    with interpreter():
        yield adapters_for(pytestconfig.getoption("dsafx_provider"))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_contract(case: Case, adapters: Adapters, pytestconfig: pytest.Config) -> None:
    """One case, skipped with its reason where it does not apply."""
    size = SIZES[pytestconfig.getoption("dsafx_size")]
    reason = case.skipped(adapters, size)
    if reason is not None:
        pytest.skip(reason)
    try:
        case.check(adapters, size)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
