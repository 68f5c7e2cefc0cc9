"""`math`, on cases of Hendrycks' tests of equivalence for MATH, and of math-verify's README."""

from __future__ import annotations

import pytest

from flowrl.rewards import math
from flowrl.rewards.math_answers import last_boxed
from tests.support.errors import raises

EQUAL = [
    (r"\tfrac{1}{2} + \frac1{72}", r"\frac{1}{2} + \dfrac{1}{72}"),
    ("10", r"\$10"),
    (r"10\text{ units}", "10"),
    (r"5\%", "5"),
    (r"\sqrt5", r"\sqrt{5}"),
    ("x=5", "5"),
    ("0.5", r"\frac{1}{2}"),
    ("-.5", "-0.5"),
    ("1,000", "1000"),
    ("2(x+1)", "2x+2"),
    (r"\{1,3\} \cup \{2,4\}", r"${1,2,3,4}$"),
]
UNEQUAL = [
    (r"10\text{ units}", r"100\text{ units}"),
    (r"\frac{3}{4}", r"\frac{4}{3}"),
    ("(1,2)", "(2,1)"),
    ("[0,1)", "[0,1]"),
]


@pytest.mark.parametrize(("answer", "truth", "score"), [(*case, 1.0) for case in EQUAL] + [(*c, 0.0) for c in UNEQUAL])
def test_answers_are_compared_as_mathematics(answer: str, truth: str, score: float) -> None:
    for reward in (math, math(boxed=True)):
        assert reward("MATH", rf"So the answer is $\boxed{{{answer}}}$.", truth) == score


def test_the_ground_truth_may_be_a_solution() -> None:
    solution = r"Solving, we find $a = -3$ and $b = 3$, so $a + b = \boxed{0}$."
    assert math("MATH", r"$\boxed{0}$", solution) == 1.0


def test_only_the_last_box_counts_if_boxed() -> None:
    boxed = math(boxed=True)
    assert [math("MATH", text, "4") for text in ("The answer is 4", "4", "$4$")] == [1.0, 1.0, 1.0]
    assert [boxed("MATH", text, "4") for text in ("The answer is 4", r"\boxed{4", r"\boxed{4} or \boxed{5}")] == [
        0.0
    ] * 3
    assert boxed("MATH", r"\boxed{5} or \boxed{4} is 5", "4") == 1.0


def test_braces_in_a_box_match() -> None:
    assert last_boxed(r"\boxed{1} \boxed{\frac{1}{2}} x") == r"\boxed{\frac{1}{2}}"
    assert last_boxed(r"\boxed{1} \boxed{\frac{1}{2}") == r"\boxed{1}"
    assert last_boxed("1") is None


def test_a_ground_truth_without_an_expression_is_refused() -> None:
    with raises("reward.invalid-ground-truth"):
        math("MATH", "1", "")


@pytest.mark.parametrize(
    ("response", "answer", "boxed"),
    [
        (r"So \boxed{\frac{1}{2}}, or \boxed{ x + 1 }", "x+1", "x+1"),
        (r"it is 1,234.5 then", "1234.5", None),
        (r"\boxed{}", None, None),
        ("nothing", None, None),
    ],
)
def test_the_answer_is_in_the_last_box_or_the_last_number(response: str, answer: str | None, boxed: str | None) -> None:
    assert math.answer("MATH", response) == answer
    assert math(boxed=True).answer("MATH", response) == boxed
