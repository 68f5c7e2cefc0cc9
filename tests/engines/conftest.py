"""Tests of real engines: skipped, with the reason, where the engine is not installed.

A test says what it needs by its marker, ``engines("vllm")``.
"""

from __future__ import annotations

import os

os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"

from importlib.util import find_spec
from typing import Any

import pytest

from flowrl.backends import TorchTrainer
from flowrl.backends.torch.engine import TorchTrainerEngine
from tests.engines.answers import CONTEXT
from tests.models import tiny_folder


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("engines"):
        for package in marker.args:
            if find_spec(package) is None:
                pytest.skip(f"needs {package}, which is not installed here: `make test-engines` runs this test")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("engines"):  # engines import much that warns, which is theirs to mend
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="module")
def trainer(folder: str) -> TorchTrainerEngine:
    """Of the `folder` of the tests' file."""
    return TorchTrainer(folder, device="cpu").build(CONTEXT)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> TorchTrainerEngine:
    """A trainer of the same architecture with other weights."""
    return TorchTrainer(tiny_folder(tmp_path_factory.mktemp("other"), seed=1), device="cpu").build(CONTEXT)


@pytest.fixture
def engine(running: Any, trainer: TorchTrainerEngine) -> Any:
    """The engine that runs for all tests of a file, with the trainer's weights."""
    running.sync(trainer)
    return running
