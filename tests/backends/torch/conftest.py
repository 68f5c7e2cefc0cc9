"""Tiny models by kind, and a rollout engine that shares the weights of one."""

from __future__ import annotations

import pytest

from flowrl.backends.torch.generate.rollout import TorchRolloutEngine
from tests.backends.torch.generate.rollouts import Actor, synced
from tests.backends.torch.train.trainers import Folder
from tests.support.models import KINDS, tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of a kind of model, created on first use."""
    folders: dict[str, str] = {}

    def of(kind: str) -> str:
        if kind not in folders:
            folders[kind] = tiny_folder(tmp_path_factory.mktemp("models"), kind)
        return folders[kind]

    return of


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folders of all kinds."""
    path = tmp_path_factory.mktemp("models")
    return {kind: tiny_folder(path, kind) for kind in KINDS}


@pytest.fixture
def actor(folders: dict[str, str]) -> Actor:
    return Actor(folders["llama"])


@pytest.fixture
def engine(actor: Actor) -> TorchRolloutEngine:
    return synced(actor)
