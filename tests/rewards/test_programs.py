"""`code`: programs and tests in the forms of APPS, MBPP and HumanEval."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowrl.rewards import UnsafeSubprocess, code
from flowrl.rewards.programs import last_block
from tests.support.errors import raises

REWARD = code(UnsafeSubprocess(timeout=10.0))
SHARE = code(UnsafeSubprocess(timeout=10.0), continuous=True)


def block(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


# MBPP 3 and HumanEval 0, with solutions
MBPP = "import math\ndef is_not_prime(n):\n    return any(n % i == 0 for i in range(2, int(math.sqrt(n)) + 1))"
MBPP_TESTS = ["assert is_not_prime(2) == False", "assert is_not_prime(10) == True", "assert is_not_prime(35) == True"]
HUMANEVAL = """def has_close_elements(numbers, threshold):
    s = sorted(numbers)
    return any(b - a < threshold for a, b in zip(s, s[1:]))"""
HUMANEVAL_TEST = """def check(candidate):
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.3) == True
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.05) == False

check(has_close_elements)"""
TWO_SUM = """class Solution:
    def twoSum(self, nums, target):
        seen = {}
        for i, x in enumerate(nums):
            if target - x in seen:
                return (seen[target - x], i)
            seen[x] = i"""


@pytest.mark.parametrize(
    ("program", "truth", "score"),
    [
        ("a, b = map(int, input().split())\nprint(a + b, '')", {"inputs": ["1 2\n"], "outputs": ["3\n"]}, 1.0),
        ("print(open(0).read().upper())", {"inputs": [["a", "b"]], "outputs": [["A", "B"]]}, 1.0),
        ("print(1)", {"inputs": ["", ""], "outputs": ["1", "2"]}, 0.5),
        (MBPP, MBPP_TESTS, 1.0),
        (MBPP, {"assert_case": MBPP_TESTS}, 1.0),
        ("def is_not_prime(n): return True", MBPP_TESTS, 2 / 3),
        ("import os; os._exit(0)", MBPP_TESTS, 0.0),
        (HUMANEVAL, HUMANEVAL_TEST, 1.0),
        (TWO_SUM, {"fn_name": "twoSum", "inputs": [[[2, 7, 11, 15], 9]], "outputs": [[0, 1]]}, 1.0),
        (TWO_SUM, {"fn_name": "twoSum", "inputs": ["[2, 7, 11, 15]\n9"], "outputs": ["[0, 1]"]}, 1.0),
        ("def f(x): return x", {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], 2]}, 1.0),
        ("print(3)\ndef g(x): return x", {"fn_name": "f", "inputs": [[3]], "outputs": [3]}, 0.0),
    ],
)
def test_programs(program: str, truth: Any, score: float) -> None:
    for given in (truth, truth if isinstance(truth, str) else json.dumps(truth)):
        assert SHARE("apps", block(program), given) == {"score": score, "passed": score}
    assert REWARD("apps", block(program), truth)["score"] == float(score == 1.0)


def test_after_a_timeout_the_other_tests_count_as_failed() -> None:
    quick = code(UnsafeSubprocess(timeout=0.5), continuous=True)
    program = "x = input()\nwhile x == '2': pass\nprint(x)"
    truth = {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "3", "4"]}
    assert quick("apps", block(program), truth) == {"score": 0.25, "passed": 0.25}


def test_the_last_block_is_the_program() -> None:
    assert last_block("```py\n1\n```\n```python\n2\n```") == "2\n"
    assert last_block("```\n1\n```\n```json\n{}\n```") == "1\n"
    assert last_block("```python\n1") is last_block("print(1)") is None
    assert REWARD("apps", "print(1)", {"inputs": [""], "outputs": ["1"]}) == {"score": 0.0, "passed": 0.0}


@pytest.mark.parametrize("truth", [None, {}, [], "", "{", {"inputs": ["1"], "outputs": []}, {"inputs": ["1"]}])
def test_a_ground_truth_without_tests_is_refused(truth: Any) -> None:
    with raises("reward.invalid-ground-truth"):
        REWARD("apps", block("print(1)"), truth)


def test_the_caller_must_choose_a_sandbox() -> None:
    with raises("parameter.missing"):
        code()
