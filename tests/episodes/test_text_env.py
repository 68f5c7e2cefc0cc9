"""What environments of other makers share: what is seen in words, and the seed of a row."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl.episodes.text_env import TextEnvironment, package
from flowrl.errors import DefinitionError, EpisodeError
from tests.episodes.scripted import row


def test_a_row_has_the_seed_of_its_group_or_of_the_data() -> None:
    one, same, other = row(0), row(1), row(2)
    assert one.seed == same.seed == one._replace(attempt=3).seed != other.seed
    assert all(0 <= row(i).seed < 2**31 for i in range(50))
    assert one._replace(extra_info={"seed": 12}).seed == 12


def test_what_is_no_text_has_to_be_told() -> None:
    with pytest.raises(EpisodeError, match=r"TextEnvironment observes .*int.*define in it tell\(self, seen\)"):
        TextEnvironment().tell(3)


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
def test_what_is_seen_at_first_stands_behind_the_prompt(messages: Any, expected: Any) -> None:
    assert TextEnvironment().opening(row(0)._replace(messages=messages), "seen") == expected


def test_a_package_that_is_missing_is_named_with_its_extra() -> None:
    with pytest.raises(DefinitionError, match=r"no_such_package is not installed; pip install 'flowrl\[extra\]'"):
        package("no_such_package", "extra")
