"""`gsm8k` and `choice`, on answers in the form of their data sets."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl.rewards import choice, gsm8k
from tests.support.errors import raises

# the solution of the first training problem of GSM8K
NATALIA = """Natalia sold 48/2 = <<48/2=24>>24 clips in May.
Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.
#### 72"""


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (NATALIA, NATALIA, 1.0),
        (NATALIA, "72", 1.0),
        (NATALIA, 72, 1.0),
        ("#### 70,000", "#### 70000", 1.0),
        ("#### $70000.00", "70,000", 1.0),
        ("#### -3", "-3", 1.0),
        ("#### 72.", "72", 1.0),
        ("#### 3\nNo: #### 72", "72", 1.0),
        ("#### 72\nNo: #### 3", "72", 0.0),
        ("#### 7", "72", 0.0),
        ("The answer is 72", "72", 0.0),
        ("####", "72", 0.0),
        ("", "72", 0.0),
    ],
)
def test_gsm8k(response: str, truth: Any, score: float) -> None:
    assert gsm8k("openai/gsm8k", response, truth) == score


def test_gsm8k_takes_the_last_number_if_flexible() -> None:
    flexible = gsm8k(method="flexible", format_score=0.1)
    assert [flexible("", text, "72") for text in ("It is 7 or 72.", "72 or 7", "none")] == [1.0, 0.1, 0.0]


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("The answer is (C).", "C", 1.0),  # the form of MMLU-Pro's prompts
        ("Answer: C", "C", 1.0),  # of simple-evals
        ("**Answer:** C", 2, 1.0),
        ("Therefore $\\boxed{\\text{C}}$", "(C)", 1.0),
        ("C", "c", 1.0),
        ("(C).", "C", 1.0),
        ("Answer: A. No, the answer is C", "C", 1.0),
        ("The answer is a mystery", "A", 0.0),
        ("The answer is Calcium", "C", 0.0),
        ("A, B or C", "C", 0.0),
        ("Answer: B", "C", 0.0),
    ],
)
def test_choice(response: str, truth: Any, score: float) -> None:
    assert choice("cais/mmlu", response, truth) == score


def test_choice_with_ten_letters() -> None:
    assert choice(choices="ABCDEFGHIJ")("TIGER-Lab/MMLU-Pro", "the answer is (J)", 9) == 1.0


def test_a_ground_truth_without_an_answer_is_refused() -> None:
    with raises("reward.invalid-ground-truth"):
        gsm8k("openai/gsm8k", "#### 1", "unknown")
    for truth in ("E", 4, "AB", ""):
        with raises("reward.invalid-ground-truth"):
            choice("cais/mmlu", "Answer: A", truth)
    with raises("parameter.invalid"):
        choice(choices="abc")


def test_equal_numbers_are_one_answer() -> None:
    texts = ("#### 1,000", "#### $1000.00", "so #### 1000.", "#### 0100", "#### 100", "#### -0", "1000", "#### 1e3")
    found = ["1000", "1000", "1000", "100", "100", "0", None, "1"]
    assert [gsm8k.answer("openai/gsm8k", text) for text in texts] == found
    assert gsm8k(method="flexible").answer("openai/gsm8k", "3 and .50") == "0.5"


def test_the_answer_of_a_choice_is_its_letter() -> None:
    assert [choice.answer("mmlu", text) for text in ("The answer is (C).", "\\boxed{B}", "d", "none")] == [
        "C",
        "B",
        None,
        None,
    ]
