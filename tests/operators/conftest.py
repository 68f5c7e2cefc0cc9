"""The reward functions that tests of operators share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from flowrl.operators.reward.pool import close_pools
from tests.support.rows.reward_rows import SCORES


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """The reference of a function of `SCORES`."""
    file = tmp_path_factory.mktemp("user") / "scores.py"
    file.write_text(SCORES, encoding="utf-8")
    yield lambda name: f"{file}:{name}"
    close_pools()
