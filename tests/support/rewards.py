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
