"""Order of the tests: quick ones first, then those that start an engine."""

import pytest
from hypothesis import settings

# Machines are shared: how long an example takes says nothing of the code.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        if "engine" not in item.keywords:
            return 0
        # vLLM's multimodal code imports numba, after which no engine starts in this process any more.
        return 2 if "kimi" in item.name else 1

    items.sort(key=place)
