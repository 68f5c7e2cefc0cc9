"""Tests of real engines: skipped, with the reason, where the engine is not installed.

A test says what it needs by its marker, ``engines("vllm")``.
"""

from __future__ import annotations

import os

os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"

from importlib.util import find_spec

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("engines"):
        for package in marker.args:
            if find_spec(package) is None:
                pytest.skip(f"needs {package}, which is not installed here: `make test-engines` runs this test")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("engines"):  # engines import much that warns, which is theirs to mend
            item.add_marker(pytest.mark.filterwarnings("ignore"))
