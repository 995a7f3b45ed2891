"""The kit's pytest plugin: its options, and whole runs under the poison allocator.

It is an installed plugin and no ``conftest.py``, because pytest reads options before it looks for
the package that ``--pyargs`` names. Without an option of its own it does nothing and imports no
torch.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the group ``dsafx``."""
    group = parser.getgroup("dsafx", "DeepSeek Sparse Attention: conformance of kernels")
    group.addoption(
        "--dsafx-provider",
        default="reference",
        metavar="NAME",
        help="kernels for dsafx.conformance: a provider, or module:attribute of an Adapters",
    )
    group.addoption(
        "--dsafx-size",
        default="small",
        choices=("small", "full"),
        help="how large the inputs of dsafx.conformance are",
    )
    group.addoption(
        "--dsafx-poison",
        action="store_true",
        help="run all tests with uninitialised memory full of NaN and 2 000 000 000",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test and its fixtures under the poison allocator where that is asked for."""
    if not item.config.getoption("dsafx_poison"):
        return (yield)
    from ._poison import poison

    with poison():
        return (yield)
