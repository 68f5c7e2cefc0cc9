"""The toy engine, and a trainer of the same folder."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl.backends import TorchTrainer
from flowrl.run.engine.build import EngineBuilder
from tests.backends.hosted.toy import Toy
from tests.support.models import tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(folder: str) -> Toy:
    return Toy(folder).freeze("of the folder")


@pytest.fixture(scope="module")
def trainer(folder: str) -> Any:
    return TorchTrainer(folder, device="cpu").build(EngineBuilder({}, seed=0))
