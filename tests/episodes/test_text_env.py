"""Common code of adapters to environment libraries: observations as text, and the seed of a row."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl.episodes.text_env import TextEnvironment
from flowrl.lazy import package
from tests.episodes.scripted import row
from tests.support.errors import raises


def test_the_seed_of_a_row_is_that_of_its_group_or_the_data() -> None:
    one, same, other = row(0), row(1), row(2)
    assert one.seed == same.seed == one._replace(attempt=3).seed != other.seed
    assert all(0 <= row(i).seed < 2**31 for i in range(50))
    assert one._replace(extra_info={"seed": 12}).seed == 12


def test_a_non_text_observation_is_refused() -> None:
    with raises("episode.no-conversion", environment="TextEnvironment", method="observation_text", found="int"):
        TextEnvironment().observation_text(3)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], [{"role": "user", "content": "seen"}]),
        (
            [{"role": "system", "content": "s"}],
            [{"role": "system", "content": "s"}, {"role": "user", "content": "seen"}],
        ),
        ([{"role": "user", "content": "u"}], [{"role": "user", "content": "u\n\nseen"}]),
    ],
)
def test_the_first_observation_follows_the_prompt(messages: Any, expected: Any) -> None:
    assert TextEnvironment().opening(row(0)._replace(messages=messages), "seen") == expected


def test_a_missing_package_is_named_with_its_extra() -> None:
    with raises("package.not-installed", package="no_such_package", extra="extra"):
        package("no_such_package", "extra")
