"""Exact match and F1 of question answering, with the normalization of SQuAD."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

from flowrl.errors import DataError
from flowrl.rewards.reward_function import RewardFunction

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """The text in lower case, without punctuation, articles and repeated spaces (SQuAD: Rajpurkar et al. 2016)."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


class _BestAnswer(RewardFunction):
    """The best score of an answer over the right answers.

    Args:
        tag: the answer is the last ``<tag>...</tag>`` of the response, and a response without one scores 0; None takes
            the whole response.
    """

    tag: str | None = None

    def score(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
        """The best score over the answers of the ground truth: a text, a list, or a dict with a ``target``."""
        answer, right = self._tagged(solution_str), _texts(ground_truth)
        return 0.0 if answer is None else max(self._compare(answer, text) for text in right)

    def answer(self, data_source: str, solution_str: str) -> str | None:
        """The answer after SQuAD's normalization."""
        answer = self._tagged(solution_str)
        return None if answer is None else normalize_answer(answer) or None

    def _tagged(self, text: str) -> str | None:
        """The text in the last `tag`; all of it without one."""
        if self.tag is None:
            return text
        name = re.escape(self.tag)
        found = re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
        return found[-1] if found else None

    def _compare(self, answer: str, right: str) -> float:
        raise NotImplementedError


class ExactMatch(_BestAnswer):
    """The response equals a right answer after SQuAD's normalization (Rajpurkar et al. 2016, arXiv:1606.05250).

    Args:
        tag: the answer is the last ``<tag>...</tag>`` of the response, and a response without one scores 0; None takes
            the whole response.
    """

    def _compare(self, answer: str, right: str) -> float:
        return float(normalize_answer(answer) == normalize_answer(right))


class F1(_BestAnswer):
    """The F1 of the words of the response and of a right answer, after SQuAD's normalization; the best of several.

    As in SQuAD 2.0 (Rajpurkar et al. 2018, arXiv:1806.03822), an answer without words is right if both have none.

    Args:
        tag: the answer is the last ``<tag>...</tag>`` of the response, and a response without one scores 0; None takes
            the whole response.
    """

    def _compare(self, answer: str, right: str) -> float:
        found, expected = normalize_answer(answer).split(), normalize_answer(right).split()
        if not found or not expected:
            return float(found == expected)
        same = sum((Counter(found) & Counter(expected)).values())
        return 2.0 * same / (len(found) + len(expected))


exact_match, f1 = ExactMatch(), F1()


def _texts(ground_truth: Any) -> list[str]:
    """The right answers."""
    value = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    texts = [value] if isinstance(value, str | int | float) else list(value or ())
    if not texts:
        raise DataError(
            f"The ground truth {ground_truth!r} has no answer. Expected a text, a list of texts, or a dict with either "
            f"under 'target'.",
            code="reward.invalid-ground-truth",
            found=repr(ground_truth),
        )
    return [str(text) for text in texts]
