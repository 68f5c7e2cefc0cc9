"""Matrices of cases: some cases run on every commit, the others by `make nightly`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def nightly_except(on_every_commit: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Values for ``parametrize``, of which all but those for every commit are marked `nightly`."""
    values = [*values]
    assert set(on_every_commit) <= set(values)
    return [
        value if value in on_every_commit else nightly(*(value if isinstance(value, tuple) else (value,)))
        for value in values
    ]


def nightly(*values: Any, id: str | None = None) -> Any:
    """One case for ``parametrize`` that is marked `nightly`."""
    return pytest.param(*values, id=id, marks=pytest.mark.nightly)
