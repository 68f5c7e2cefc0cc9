"""The demo's exact-match verifier. It imports nothing heavy: reward workers import it in processes of their own."""

from __future__ import annotations

from collections.abc import Mapping

THINK, END_THINK = "<think>", "</think>"


def thinks(text: str) -> bool:
    """Whether a response sets out to think before it answers."""
    return text.startswith(THINK)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> float:
    """1.0 if what follows the last ``</think>`` is `ground_truth` (white space aside), else 0.0; verl's signature."""
    return float(solution_str.rpartition(END_THINK)[2].strip() == ground_truth)


def score_and_thinking(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> dict[str, float]:
    """`compute_score`, and whether the response thinks, which is logged beside it as ``reward/thinks``."""
    score = compute_score(data_source, solution_str, ground_truth, extra_info)
    return {"score": score, "thinks": float(thinks(solution_str))}
