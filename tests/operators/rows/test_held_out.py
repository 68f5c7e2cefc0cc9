"""pass@k and maj@k against enumeration: all sets of k answers, all ways to break a tie."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl import Metrics
from flowrl.core.operators.operator import Operator
from flowrl.errors import ParameterError
from flowrl.operators import MajorityAtK, PassAtK
from flowrl.operators.rows.held_out import majority_at_k, pass_at_k
from tests.support.errors import raises


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(passed: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(passed)))
    every = [any(chosen) for chosen in combinations(passed, k)]
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(fmean(every), abs=1e-12)


def test_pass_at_k_worked_example() -> None:
    assert pass_at_k(4, 1, 2) == 0.5  # three of six pairs hold the one that passed
    assert pass_at_k(200, 10, 100) == pytest.approx(0.9992, abs=5e-5)
    assert [pass_at_k(5, 0, 3), pass_at_k(5, 3, 3), pass_at_k(5, 5, 1)] == [0.0, 1.0, 1.0]
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)  # and nothing overflows


def voted(answers: Sequence[str | None], scores: Sequence[float]) -> float:
    """By the book: every answer's votes counted by itself, and a fair draw among the first."""
    named = {answer for answer in answers if answer is not None}
    if not named:
        return 0.0
    most = max(answers.count(answer) for answer in named)
    elected = [answer for answer in named if answers.count(answer) == most]
    return fmean(fmean(s for a, s in zip(answers, scores, strict=True) if a == answer) for answer in elected)


@given(st.lists(st.tuples(st.sampled_from(["1", "2", "3", None]), st.floats(0, 1)), min_size=1, max_size=9), st.data())
def test_majority_at_k_votes_per_set(rows: list[tuple[str | None, float]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rows)))
    answers, scores = [list(column) for column in zip(*rows, strict=True)]
    sets = [slice(i, i + k) for i in range(0, len(rows) - k + 1, k)]
    expected = fmean(voted(answers[one], scores[one]) for one in sets)
    assert majority_at_k(answers, scores, k) == pytest.approx(expected, abs=1e-9)


def test_majority_at_k_worked_example() -> None:
    assert majority_at_k(["4", "5", "4"], [1.0, 0.0, 1.0], 3) == 1.0
    assert majority_at_k(["4", "5"], [1.0, 0.0], 2) == 0.5  # a tie is drawn
    assert majority_at_k([None, None, "5"], [0.0, 0.0, 1.0], 3) == 1.0
    assert majority_at_k([None, None], [1.0, 1.0], 2) == 0.0
    assert majority_at_k(["4", "5", "5", "4", "6"], [1.0, 0.0, 0.0, 1.0, 1.0], 2) == 0.5  # the fifth is left out


def scored(scores: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """One row a score, on the second of three tokens; a row of 9 is masked entirely."""
    mask = torch.tensor([[True, True, False]] * len(scores))
    tokens = torch.zeros(len(scores), 3)
    tokens[:, 1] = torch.tensor(scores)
    dead = torch.tensor(scores) == 9
    mask[dead], tokens[dead] = False, 0.0
    return tokens, mask


def texts(values: Sequence[str]) -> np.ndarray:
    return np.array(values, dtype=object)


def first_word(text: str) -> str | None:
    return text.split()[0] if text.strip() else None


UID = texts(["a", "b", "a", "b", "a", "b"])  # groups need not stand together


def reported(operator: Operator, *columns: object) -> dict[str, float]:
    metrics = Metrics()
    operator(*columns, metrics=metrics)
    return metrics.compute()


def test_groups_are_by_uid() -> None:
    tokens, mask = scored([1, 0, 0, 0, 0, 9])
    expected = fmean([pass_at_k(3, 1, 2), pass_at_k(3, 0, 2)])
    assert reported(PassAtK(2), tokens, mask, UID) == {"pass@2": pytest.approx(expected)}
    answers = texts(["4 ", "7", " 4", "8", "5", "7"])
    assert reported(MajorityAtK(3), answers, *scored([1, 0, 1, 1, 0, 0]), UID) == {"maj@3": 0.5}


def test_pass_threshold_and_answer_parser_are_configurable() -> None:
    tokens, mask = scored([0.4, 0.2, 0.3, 0.2, 0.2, 0.2])
    assert reported(PassAtK(1), tokens, mask, UID) == {"pass@1": 0.0}
    assert reported(PassAtK(1, passed=0.25), tokens, mask, UID) == {"pass@1": pytest.approx(1 / 3)}
    assert reported(PassAtK(1, passed=0.25), *scored([0.25] * 6), UID) == {"pass@1": 0.0}  # above, and not at
    answers = texts(["4 a", "", "4 b", " ", "5", ""])
    for parse in (first_word, "tests.operators.rows.test_held_out:first_word"):
        assert reported(MajorityAtK(3, parse), answers, *scored([1, 1, 1, 1, 0, 1]), UID) == {"maj@3": 0.5}


def test_too_few_responses_are_refused() -> None:
    with raises("rows.small-group", expected=4, found=3):
        reported(PassAtK(4), *scored([1] * 6), UID)
    with raises("rows.small-group", expected=4, found=3):
        reported(MajorityAtK(4), UID, *scored([1] * 6), UID)
    with pytest.raises(ParameterError, match="nowhere"):
        MajorityAtK(3, "nowhere.py:parse")


def test_no_rows_report_nothing() -> None:
    assert reported(PassAtK(1), *(column[:0] for column in scored([1])), UID[:0]) == {}
