"""Fixtures for all tests, and their order: cheap ones first, so that a mistake shows early."""

from __future__ import annotations

import sys

import pytest

from support.stack import stack  # noqa: F401  a fixture is used by its name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that drive the real stack come last; otherwise the order stays."""
    items.sort(key=lambda item: item.get_closest_marker("stack") is not None)


def pytest_unconfigure() -> None:
    """llama_cpp opens /dev/null twice when it is imported; unclosed, that is told behind pytest's last line."""
    module = sys.modules.get("llama_cpp._utils")
    if module is not None:
        module.outnull_file.close()
        module.errnull_file.close()
