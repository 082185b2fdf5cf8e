"""What holds for all tests."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first; and the warnings of vLLM and torch inside an engine are not this project's to mend."""
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)
    for item in items:
        if item.get_closest_marker("engine"):
            item.add_marker(pytest.mark.filterwarnings("default"))
