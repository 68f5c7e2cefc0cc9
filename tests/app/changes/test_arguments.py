"""Arguments of a target's function on the command line, typed by its signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest

from flowrl.app.changes.arguments import bound, parsed
from tests.support.errors import raises

OPTIONS = ("--steps", "--folder")


def make(n: int, lr: float = 1e-3, mode: Literal["a", "b"] = "a", deep=False, tags: Sequence[str] | None = None) -> Any:  # type: ignore[no-untyped-def]
    """A target."""


def test_words_that_no_option_took_are_arguments() -> None:
    assert parsed(["--n=2", "--lr", "1e-5", "--max-new=3"]) == {"n": "2", "lr": "1e-5", "max_new": "3"}
    for words in (["more"], ["--n"], ["-n", "2"]):
        with raises("cli.bad-option", option=words[0]):
            parsed(words)


def test_arguments_have_the_types_of_the_signature() -> None:
    given = {"n": "2", "lr": "1", "mode": "b", "deep": "true", "tags": "['x']"}
    found = bound(make, given, "file.py:make", OPTIONS)
    assert found == {"n": 2, "lr": 1.0, "mode": "b", "deep": True, "tags": ["x"]}
    assert type(found["lr"]) is float


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("n", "two", "valid integer"),
        ("mode", "c", "'a' or 'b'"),
        ("tag", "2", "did you mean 'tags'?"),
        ("step", "2", "did you mean 'steps'?"),
    ],
)
def test_a_wrong_argument_names_the_parameter_or_the_nearest_option(name: str, text: str, words: str) -> None:
    with raises("cli.bad-option", option=f"--{name}") as caught:
        bound(make, {name: text}, "file.py:make", OPTIONS)
    assert words in caught.value.message
