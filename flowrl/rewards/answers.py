"""Answers that are compared as numbers or letters: GSM8K, multiple choice."""

from __future__ import annotations

import re
import string
from decimal import Decimal
from typing import Any, Literal

from pydantic import field_validator

from flowrl.errors import DataError
from flowrl.rewards.reward_function import RewardFunction

_NUMBER = re.compile(r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_MARKED = re.compile(rf"####\s*({_NUMBER.pattern})")


class GSM8K(RewardFunction):
    """The last number after ``####`` equals the ground truth (GSM8K: Cobbe et al. 2021, arXiv:2110.14168).

    Numbers are compared by value: ``1,000``, ``$1000`` and ``1000.00`` are equal. The ground truth is a number, or a
    solution of the data set that ends with ``#### 42``.

    Args:
        method: ``"strict"`` requires ``####``; ``"flexible"`` takes the last number of the response.
        format_score: the score of a wrong answer in the right form.
    """

    method: Literal["strict", "flexible"] = "strict"
    format_score: float = 0.0

    def score(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
        """1, `format_score`, or 0 without an answer."""
        text = str(ground_truth)
        expected = _last_number(text, "####" in text)
        if expected is None:
            raise DataError(
                f"The ground truth {text[-80:]!r} has no number. Expected one such as '42', or a solution that ends "
                f"with '#### 42'.",
                code="reward.invalid-ground-truth",
                found=text,
            )
        found = _last_number(solution_str, self.method == "strict")
        return 0.0 if found is None else 1.0 if found == expected else self.format_score

    def answer(self, data_source: str, solution_str: str) -> str | None:
        """The number of the response; equal numbers have equal texts."""
        found = _last_number(solution_str, self.method == "strict")
        return None if found is None else f"{found.normalize() + 0:f}"


def _last_number(text: str, marked: bool) -> Decimal | None:
    """The last number of a text, or the last after ``####``."""
    found = _MARKED.findall(text) if marked else _NUMBER.findall(text)
    return Decimal(re.sub(r"[,$]", "", found[-1])) if found else None


class Choice(RewardFunction):
    """The letter of the response is that of the right choice (MMLU, GPQA, ARC).

    The letter is the last of ``answer is (C)``, ``Answer: C`` and ``\\boxed{C}``, or the whole response. The ground
    truth is a letter or an index, counted from 0.

    Args:
        choices: the letters.
    """

    choices: str = "ABCD"

    @field_validator("choices", mode="after")
    @classmethod
    def _refuse_others(cls, choices: str) -> str:
        if not choices or set(choices) - set(string.ascii_uppercase):
            raise ValueError("expected capital letters, such as 'ABCD'")
        return choices

    def score(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
        """1 or 0."""
        truth = str(ground_truth).strip().strip("().").upper()
        index = int(truth) if truth.isdecimal() else self.choices.find(truth) if len(truth) == 1 else -1
        if not 0 <= index < len(self.choices):
            raise DataError(
                f"The ground truth {ground_truth!r} is none of the choices {', '.join(self.choices)}. Expected a "
                f"letter or its index from 0; if there are more letters, pass choices=.",
                code="reward.invalid-ground-truth",
                found=repr(ground_truth),
            )
        return float(self.answer(data_source, solution_str) == self.choices[index])

    def answer(self, data_source: str, solution_str: str) -> str | None:
        """The letter that the response chooses."""
        text = solution_str
        letter = rf"[\s*_$({{]*([{self.choices}])(?![A-Za-z0-9])"
        stated = re.findall(rf"(?i:answer(?:\s+is)?)\**\s*:?{letter}|\\boxed\{{(?:\\text\{{)?{letter}", text)
        if stated:
            return "".join(stated[-1])
        alone = re.fullmatch(rf"[\s*(]*([{self.choices}])[\s*).:]*", text)
        return alone.group(1) if alone else None


gsm8k, choice = GSM8K(), Choice()
