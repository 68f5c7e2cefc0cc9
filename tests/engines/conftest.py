"""Tests of real engines: skipped, with the reason, if the engine is not installed.

A test names the packages that it needs with its marker, ``engines("vllm")``. Files share the session's `vllm`.
A test may end it, or start another one: the fixture `engine` of the next test restarts it with a sync.
"""

from __future__ import annotations

import os

os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"

import json
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from flowrl.backends import VLLM, TorchTrainer
from flowrl.backends.torch.score.engine import TorchTrainerEngine
from flowrl.backends.vllm.engine import VLLMEngine
from tests.engines.contract.answers import CONTEXT
from tests.engines.vllm.vllm_slot import VLLM_SETTINGS, VLLMSlot
from tests.support.models import EOS, tiny_folder


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("engines"):
        for package in marker.args:
            if find_spec(package) is None:
                pytest.skip(f"needs {package}, which is not installed here: `make test-engines` runs this test")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("engines"):  # engines raise warnings of their own on import
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama in float32. Its generation config has a top-k, which engines must ignore."""
    folder = tiny_folder(tmp_path_factory.mktemp("engines"))
    loose = {"eos_token_id": EOS, "temperature": 0.2, "top_k": 3, "do_sample": True}
    Path(folder, "generation_config.json").write_text(json.dumps(loose))
    return folder


@pytest.fixture(scope="module")
def trainer(folder: str) -> TorchTrainerEngine:
    """A trainer of the `folder` of the test file."""
    return TorchTrainer(folder, device="cpu").build(CONTEXT)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> TorchTrainerEngine:
    """A trainer of the same architecture with other weights."""
    return TorchTrainer(tiny_folder(tmp_path_factory.mktemp("other"), seed=1), device="cpu").build(CONTEXT)


@pytest.fixture(scope="session")
def vllm_slot() -> Iterator[VLLMSlot]:
    """The vLLM slot of this process."""
    slot = VLLMSlot()
    yield slot
    slot.free()


@pytest.fixture(scope="session")
def vllm(vllm_slot: VLLMSlot, folder: str) -> VLLMEngine:
    """One vLLM for the session, over `folder`. Claim the slot and sync before use."""
    return vllm_slot.start(VLLM(folder, **VLLM_SETTINGS))


@pytest.fixture
def surviving(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The engine, which errors do not end within the test: a restart takes seconds, and other tests cover it."""
    monkeypatch.setattr(engine, "_stopping_on_error", nullcontext)
    return engine
