"""The demonstration's verifier: it scores only the text after the last think block."""

from __future__ import annotations

import pytest

from flowrl.demo import verifier


@pytest.mark.parametrize(
    ("solution", "score"),
    [
        ("95", 1.0),
        (" 95\n", 1.0),
        ("<think>9+6=15 5+3+1=9</think>95", 1.0),
        ("<think>nonsense</think>95", 1.0),  # only the answer counts
        ("<think>95</think>94<think></think> 95", 1.0),
        ("", 0.0),
        ("94", 0.0),
        ("095", 0.0),
        ("95.", 0.0),
        ("9 5", 0.0),
        ("95 95", 0.0),
        ("<think>9+6=15 5+3+1=9</think>", 0.0),
        ("<think>95", 0.0),  # the think block is never closed
        ("95<think>", 0.0),
        ("95</think>94", 0.0),
        ("<think>9+6=15</think>95</think>94", 0.0),
    ],
)
def test_verifier_compares_the_text_after_the_last_think_block(solution: str, score: float) -> None:
    found = verifier.compute_score("addition", solution, "95", extra_info={"index": 0})
    assert found == score
    assert isinstance(found, float)
    assert verifier.compute_score(data_source="addition", solution_str=solution, ground_truth="95") == score


@pytest.mark.parametrize(("text", "expected"), [("<think>1", True), ("95", False), ("", False), ("95<think>", False)])
def test_thinks_requires_a_think_block_at_the_start(text: str, expected: bool) -> None:
    assert verifier.thinks(text) is expected
