"""The task of the demo: its problems, held-out split, and data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.demo import task, verifier
from flowrl.demo.task import Problem

TWO_DIGITS = st.integers(10, 99)


@pytest.mark.parametrize(
    ("problem", "worked"),
    [
        (Problem(59, 36), "<think>9+6=15 5+3+1=9</think>95"),
        (Problem(10, 20), "<think>0+0=0 1+2=3</think>30"),
        (Problem(99, 99), "<think>9+9=18 9+9+1=19</think>198"),
        (Problem(64, 53), "<think>4+3=7 6+5=11</think>117"),
        (Problem(659, 384), "<think>9+4=13 5+8+1=14 6+3+1=10</think>1043"),
        (Problem(7, 2), "<think>7+2=9</think>9"),
    ],
)
def test_a_demonstration_adds_digit_by_digit(problem: Problem, worked: str) -> None:
    assert problem.worked == worked
    assert problem.answer == worked.partition("</think>")[2]


@given(TWO_DIGITS, TWO_DIGITS)
def test_every_step_of_a_demonstration_is_correct_arithmetic(a: int, b: int) -> None:
    problem = Problem(a, b)
    parts = re.fullmatch(r"<think>(\d)\+(\d)=(\d+) (\d)\+(\d)(\+1)?=(\d+)</think>(\d+)", problem.worked)
    assert parts is not None
    units_a, units_b, units, tens_a, tens_b, carry, tens, answer = parts.groups()
    assert (int(tens_a + units_a), int(tens_b + units_b)) == (a, b)
    assert int(units_a) + int(units_b) == int(units)
    assert int(tens_a) + int(tens_b) + (carry is not None) == int(tens)
    assert (carry is not None) == (len(units) == 2)
    assert tens + units[-1] == answer == str(a + b)  # the answer can be read off the two steps
    for response in (problem.answer, problem.worked):
        assert verifier.compute_score("addition", response, str(a + b)) == 1.0
        assert verifier.compute_score("addition", response, str(a + b + 1)) == 0.0


def test_train_and_heldout_split_is_disjoint_and_complete() -> None:
    train, heldout = task.split()
    assert len(heldout) == len(set(heldout)) == 500
    assert len(train) == len(set(train)) >= 5000
    seen = set(train)
    assert not any(Problem(a, b) in seen or Problem(b, a) in seen for a, b in heldout)
    assert len({frozenset(problem) for problem in heldout}) == 500  # not two orders of one sum
    all_problems = {Problem(a, b) for a in range(10, 100) for b in range(10, 100)}
    assert seen | set(heldout) | {Problem(b, a) for a, b in heldout} == all_problems
    assert 200 < sum(a < b for a, b in heldout) < 300


def test_three_digit_problems_are_split_without_overlap() -> None:
    train, heldout = task.split(3)
    assert len(heldout) == 500 and len(train) == len(set(train)) > 18_900
    assert all(100 <= number <= 999 for problem in (*train, *heldout) for number in problem)
    seen = {frozenset(problem) for problem in train}
    assert seen.isdisjoint(frozenset(problem) for problem in heldout)
    assert {Problem(b, a) for a, b in train} == set(train)  # both orders of each sum


def test_dataset_has_verls_format(tmp_path: Path) -> None:
    train_path, heldout_path = task.write_dataset(tmp_path / "data", seed=1)
    assert (train_path.name, heldout_path.name) == ("train.jsonl", "heldout.jsonl")
    for path, problems in ((train_path, task.split().train), (heldout_path, task.split().heldout)):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == len(problems)
        for index, row in enumerate(rows):
            assert row["data_source"] == "addition"
            assert row["extra_info"] == {"index": index, "split": path.stem}
            assert row["reward_model"]["style"] == "rule"
            (message,) = row["prompt"]
            assert message["role"] == "user"
            a, b = re.fullmatch(r"(\d\d)\+(\d\d)=", message["content"]).groups()
            assert row["reward_model"]["ground_truth"] == str(int(a) + int(b))
        assert {row["prompt"][0]["content"] for row in rows} == {f"{a}+{b}=" for a, b in problems}


def test_the_seed_changes_only_the_order_of_training_rows(tmp_path: Path) -> None:
    first, again, other = (task.write_dataset(tmp_path / name, seed) for name, seed in [("a", 1), ("b", 1), ("c", 2)])
    contents = [[path.read_text() for path in paths] for paths in (first, again, other)]
    assert contents[0] == contents[1]
    assert contents[0][0] != contents[2][0]
    assert contents[0][1] == contents[2][1]
