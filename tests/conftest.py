"""Fixtures for all tests, and their order: cheap ones first, so that a mistake shows early."""

from __future__ import annotations

import pytest

from support.stack import stack  # noqa: F401  a fixture is used by its name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that drive the real stack come last; otherwise the order stays."""
    items.sort(key=lambda item: item.get_closest_marker("stack") is not None)
