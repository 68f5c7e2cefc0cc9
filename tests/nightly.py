"""Matrices of cases and random examples: some run on every commit, the others by `make nightly`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import hypothesis
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


def examples(nightly: int) -> hypothesis.settings:
    """So many random examples by `make nightly`, and half as many on every commit."""
    share = hypothesis.settings().max_examples / hypothesis.settings.get_profile("nightly").max_examples
    return hypothesis.settings(max_examples=round(share * nightly))
