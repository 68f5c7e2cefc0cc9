"""`format`: the tags of a response."""

from __future__ import annotations

import pytest

from flowrl.rewards import format
from tests.support.errors import raises


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>2 and 2</think> <answer>4</answer>", 1.0),
        ("\n<think>\n2\n</think>\n\n<answer>4</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<think>2</think> so <answer>4</answer>", 0.0),
        ("<think>2</think><answer>4</answer> done", 0.0),
        ("First <think>2</think><answer>4</answer>", 0.0),
        ("<answer>4</answer><think>2</think>", 0.0),
        ("<think>2<answer>4</answer></think>", 0.0),
        ("<think><think>2</think></think><answer>4</answer>", 0.0),
        ("<think>2</think>", 0.0),
        ("<think>2<answer>4</answer>", 0.0),
        ("2</think><answer>4</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_think_and_answer(response: str, score: float) -> None:
    assert format("", response, None) == score


def test_the_prompt_may_open_the_first_tag() -> None:
    opened = format(opened=True)
    assert opened("", "2</think><answer>4</answer>", None) == 1.0
    assert opened("", "<think>2</think><answer>4</answer>", None) == 0.0


def test_text_may_follow_the_last_section() -> None:
    # the example in the documentation of TRL's think_format_reward
    thinks = format(tags=("think",), then_text=True)
    assert thinks("", "<think>\nThis is my reasoning.\n</think>\nThis is my answer.", None) == 1.0
    assert thinks("", "<think>\nThis is my reasoning.\nThis is my answer.", None) == 0.0
    assert thinks("", "<think>\nThis is my reasoning.</think>", None) == 0.0


@pytest.mark.parametrize("tags", [(), ("a", "a"), ("<a>",)])
def test_invalid_tags_are_refused(tags: tuple[str, ...]) -> None:
    with raises("parameter.invalid"):
        format(tags=tags)
