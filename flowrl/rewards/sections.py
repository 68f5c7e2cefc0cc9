"""`format`: whether a response consists of tagged sections."""

from __future__ import annotations

import re
from typing import Any

from pydantic import field_validator

from flowrl.rewards.reward_function import RewardFunction


class Format(RewardFunction):
    """The response is ``<think>...</think> <answer>...</answer>`` (DeepSeek-R1: DeepSeek-AI 2025, arXiv:2501.12948).

    Each tag opens and closes once, in this order, with only whitespace around the sections.

    Args:
        tags: names of the sections, in order.
        opened: the prompt ends with the first opening tag, so the response starts after it.
        then_text: text follows the last section, as after ``</think>`` without an answer tag.
    """

    tags: tuple[str, ...] = ("think", "answer")
    opened: bool = False
    then_text: bool = False

    @field_validator("tags", mode="after")
    @classmethod
    def _refuse_invalid(cls, tags: tuple[str, ...]) -> tuple[str, ...]:
        if not tags or len(set(tags)) < len(tags) or not all(re.fullmatch(r"[\w-]+", tag) for tag in tags):
            raise ValueError("expected different names, such as ('think', 'answer')")
        return tags

    def score(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
        """1 or 0."""
        rest = f"<{self.tags[0]}>{solution_str}" if self.opened else solution_str
        if any(rest.count(f"<{tag}>") != 1 or rest.count(f"</{tag}>") != 1 for tag in self.tags):
            return 0.0
        for tag in self.tags:
            before, _, rest = rest.partition(f"<{tag}>")
            _, closed, rest = rest.partition(f"</{tag}>")
            if before.strip() or not closed:
                return 0.0
        return float(bool(rest.strip()) == self.then_text)


format = Format()
