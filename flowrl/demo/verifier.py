"""The demo's exact-match verifier, without slow imports, since each reward worker imports it."""

from __future__ import annotations

from collections.abc import Mapping

THINK, END_THINK = "<think>", "</think>"


def thinks(text: str) -> bool:
    """Whether a response starts with thinking."""
    return text.startswith(THINK)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> float:
    """1.0 if the text after the last ``</think>``, stripped, is `ground_truth`, else 0.0; verl's signature."""
    return float(solution_str.rpartition(END_THINK)[2].strip() == ground_truth)


def score_and_thinking(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> dict[str, float]:
    """`compute_score`, and whether the response thinks, which is logged as ``reward/thinks``."""
    score = compute_score(data_source, solution_str, ground_truth, extra_info)
    return {"score": score, "thinks": float(thinks(solution_str))}
