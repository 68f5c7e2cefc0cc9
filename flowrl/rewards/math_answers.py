"""`math`: mathematical answers, compared by math-verify."""

from __future__ import annotations

import re
from typing import Any

from flowrl.errors import DataError
from flowrl.lazy import package
from flowrl.rewards.reward_function import RewardFunction

_verify: Any = package("math_verify", "math")
# `Reward(timeout=)` terminates its workers; math-verify's own limit needs signals, so it fails in threads.
_modules: tuple[Any, ...] = (package("math_verify.parser", "math"), package("math_verify.grader", "math"))
for _module in _modules:
    _module.TIMEOUT_WARNING_SHOWN = True


class Math(RewardFunction):
    """The answer equals the ground truth as mathematics, by math-verify; needs ``pip install flowrl[math]``.

    Answers are found in LaTeX and in plain expressions, those in ``\\boxed{}`` first. Some expressions take math-verify
    very long: in `Reward`, the call runs in a worker process, which is terminated after ``timeout`` seconds. A direct
    call has no limit.

    Args:
        boxed: only the last ``\\boxed{}`` of the response counts.
    """

    boxed: bool = False

    def score(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
        """1 or 0."""
        text = str(ground_truth)
        in_boxes = text if re.search(r"\\boxed|\\[(\[]|(?<!\\)\$", text) else f"\\boxed{{{text}}}"
        if not (right := _parsed(in_boxes)):
            raise DataError(
                f"math-verify finds no expression in the ground truth {text[-80:]!r}. Expected LaTeX or a number.",
                code="reward.invalid-ground-truth",
                found=text,
            )
        answer = last_boxed(solution_str) if self.boxed else solution_str
        found = [] if answer is None else _parsed(answer)
        return float(_verify.verify(right, found, timeout_seconds=None))

    def answer(self, data_source: str, solution_str: str) -> str | None:
        """What is in the last ``\\boxed{}``, without spaces; or else, unless `boxed`, the last number.

        Two ways to write a value are two answers: math-verify, which may take very long, is not asked.
        """
        if (box := last_boxed(solution_str)) is not None:
            return "".join(box[len("\\boxed{") : -1].split()) or None
        numbers = [] if self.boxed else re.findall(r"-?\d[\d,]*(?:\.\d+)?", solution_str)
        return numbers[-1].replace(",", "") if numbers else None


def _parsed(text: str) -> list[Any]:
    kinds = (_verify.LatexExtractionConfig(boxed_match_priority=0), _verify.ExprExtractionConfig())
    parsed: list[Any] = _verify.parse(text, kinds, parsing_timeout=None)
    return parsed


def last_boxed(text: str) -> str | None:
    """The last ``\\boxed{...}`` of a text whose braces match, with its command."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth = 0
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0 and text[end] == "}":
                return text[start : end + 1]
        start = text.rfind("\\boxed{", 0, start)
    return None


math = Math()
