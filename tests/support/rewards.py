"""Reward functions of tests: a module that a worker process imports in no time, as a user's reward file does."""

from __future__ import annotations

from typing import Any


def digits(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The share of characters that are digits."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))


def asked_for(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The share of characters that are digits, or letters: whichever the prompt asked for."""
    matches = {"digits": str.isdigit, "letters": str.isalpha}[ground_truth]
    return sum(map(matches, solution_str)) / max(1, len(solution_str))
