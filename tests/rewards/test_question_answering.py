"""`exact_match` and `f1`, against the official SQuAD 2.0 metrics that transformers has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.data.metrics.squad_metrics import compute_exact, compute_f1

from flowrl.rewards import exact_match, f1
from tests.support.errors import raises

WORDS = st.lists(st.sampled_from(["The", "a", "Denver", "Broncos", "broncos!", "1976", "an", "-", "U.S."]), max_size=6)


@given(WORDS, WORDS)
def test_scores_are_the_official_ones(found: list[str], right: list[str]) -> None:
    answer, truth = "  ".join(found), " ".join(right)
    assert exact_match("squad", answer, truth) == compute_exact(truth, answer)
    assert f1("squad", answer, truth) == pytest.approx(compute_f1(truth, answer))


def test_the_best_of_several_answers_counts() -> None:
    # Super Bowl 50, the first question of SQuAD's development set
    golds = ["Denver Broncos", "Denver Broncos", "The Denver Broncos won"]
    assert exact_match("squad", "the Denver Broncos!", golds) == 1.0
    assert f1("squad", "Broncos", golds) == pytest.approx(2 / 3)
    assert f1("squad", "Carolina Panthers", golds) == 0.0


def test_an_answer_can_be_in_a_tag() -> None:
    search = exact_match(tag="answer")  # the form of Search-R1, whose ground truth has a target
    truth = {"target": ["1976"]}
    assert search("searchR1_nq", "<answer>1975</answer> no <answer>1976</answer>", truth) == 1.0
    assert search("searchR1_nq", "1976", truth) == 0.0


@pytest.mark.parametrize("truth", [[], {"target": []}, {"answer": "x"}, None])
def test_a_ground_truth_without_answers_is_refused(truth: object) -> None:
    with raises("reward.invalid-ground-truth"):
        exact_match("squad", "x", truth)


def test_answers_are_normalized() -> None:
    assert exact_match.answer("nq", "The  Paris!") == f1.answer("nq", "paris") == "paris"
    assert exact_match(tag="answer").answer("nq", "<answer>A Cat</answer>") == "cat"
    assert exact_match(tag="answer").answer("nq", "A Cat") is None
    assert exact_match.answer("nq", "the") is None
