"""Recorded runs of the algorithms, each trained once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import flowrl
from flowrl import RecordedRun
from tests.look.recorded import record_algorithm


@pytest.fixture(scope="session")
def folder_of(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run of an algorithm, by name: three steps with all columns."""
    known: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in known:
            known[name] = record_algorithm(name, tmp_path_factory.mktemp("recorded") / name, tiny)
        return known[name]

    return of


@pytest.fixture(scope="session")
def recorded(folder_of: Callable[[str], Path]) -> Callable[[str], RecordedRun]:
    """A run of an algorithm, by name, with its code imported."""
    return lambda name: flowrl.open(folder_of(name), imports=True)
