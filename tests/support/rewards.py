"""Reward functions of tests, in a module that worker processes import fast, as a user's reward file."""

from __future__ import annotations

from typing import Any


def digits(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The fraction of characters that are digits."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))


def asked_for(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The fraction of characters that are digits or letters, as the ground truth requests."""
    matches = {"digits": str.isdigit, "letters": str.isalpha}[ground_truth]
    return sum(map(matches, solution_str)) / max(1, len(solution_str))


def asks_for_digits(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Passes where at least a quarter is digits."""
    return float(digits(data_source, solution_str, ground_truth) >= 0.25)


def constant(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """A reward that parses nothing."""
    return 0.5


def long(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """A reward for responses longer than the limit allows."""
    return float(len(solution_str) > 20)


def brief(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """A sound reward: the fraction of letters of a short response."""
    return sum(map(str.isalpha, solution_str)) / max(1, len(solution_str)) * (len(solution_str) <= 6)


def length(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """A loophole: longer responses are paid more."""
    return len(solution_str) / 16


def brief_and_length(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, float]:
    """Both in one function."""
    parts = {"brief": brief(data_source, solution_str, ground_truth), "length": length("", solution_str, "")}
    return {"score": parts["brief"] + 3.0 * parts["length"], **parts}


def fails_on_some(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """A reward function that fails on one prompt."""
    return len(solution_str) / (0 if ground_truth == "3" else 8)
