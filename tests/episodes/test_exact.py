"""Episodes of random environments with common chat templates: tokens, masks, log-probs and rewards are exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.episodes.exact import HEADS, failures, played, random_environment
from tests.nightly import examples
from tests.support.templates import tokenizer_of


@examples(12)
@given(
    name=st.sampled_from(sorted(HEADS)),
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 6),
    failing=st.sampled_from([0.0, 0.5]),
    turns=st.integers(1, 6),
    room=st.integers(1, 300),
)
def test_episodes_have_exact_tokens_in_any_batch(
    name: str, seed: int, rows: int, failing: float, turns: int, room: int
) -> None:
    environment = random_environment(seed, failing)
    context = room + (320 if name == "qwen2.5" else 60)  # the longest prompt
    several = {"max_turns": turns, "context": context, "failed": "leave"}
    whole, _, metrics = played(name, tokenizer_of(name), environment, rows, seed, **several)
    alone, _, same = played(name, tokenizer_of(name), environment, rows, seed + 1, concurrency=1, **several)
    for field in whole._fields:
        a, b = getattr(whole, field), getattr(alone, field)
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b), field
    assert whole.conversation.tolist() == alone.conversation.tolist()
    assert whole.response_text.tolist() == alone.response_text.tolist()
    times = {"episodes/waiting", "timing/waiting"}
    assert {k: v for k, v in metrics.items() if k not in times} == {k: v for k, v in same.items() if k not in times}
    assert metrics["episodes/failed"] == 0  # each fails once at most, and has two tries


@pytest.mark.parametrize("name", sorted(HEADS))
def test_many_rows_have_exact_tokens_with_every_template(name: str) -> None:
    batch, _, _ = played(name, tokenizer_of(name), random_environment(3), 48)
    assert batch.response_mask.any(1).all() and len(set(batch.turns.tolist())) > 2


def test_failures_lose_no_group_and_are_counted() -> None:
    failures(400)
