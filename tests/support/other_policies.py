"""Graphs with a judge, an opponent, a second policy or a second update; for tests of rules and of real steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flowrl import columns as c
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.roles import Role
from flowrl.graph import algorithm
from flowrl.operators import (
    Generate,
    GroupAdvantage,
    OldLogProb,
    Repeat,
    ReturnToGo,
    Reward,
    Sync,
    UpdateActor,
)
from flowrl.operators.reward.operator import place_scores
from flowrl.records import PromptBatch
from tests.support.rewards import digits


class Question(NamedTuple):
    """The prompts of a judge."""

    prompts: c.Prompts
    prompt_mask: c.PromptMask
    row_id: c.RowId


class JudgePrompt(Operator):
    """Prompt and response of a row as the prompt of a judge, padded on the left."""

    def __call__(self, input_ids: c.InputIds, attention_mask: c.AttentionMask, row_id: c.RowId) -> Question:
        order = attention_mask.int().argsort(dim=1, stable=True)
        return Question(input_ids.gather(1, order), attention_mask.gather(1, order), row_id)


class Verdict(Operator):
    """The fraction of digits in the judge's response, as the score of the row."""

    def __call__(self, verdict: c.ResponseText, response_mask: c.ResponseMask) -> c.TokenLevelScores:
        scores = [digits("", text, "") for text in verdict]
        return place_scores(torch.tensor(scores), response_mask)


class Duel(Operator):
    """1 for the response with more digits than the opponent's, -1 for fewer."""

    def __call__(
        self, own: c.ResponseText, opponents: c.ResponseText, response_mask: c.ResponseMask
    ) -> c.TokenLevelScores:
        margins = [digits("", one, "") - digits("", other, "") for one, other in zip(own, opponents, strict=True)]
        return place_scores(torch.tensor(margins).sign(), response_mask)


@algorithm
def judged(batch: PromptBatch, *, train_on: str = "rollout", temperature: float = 0.0) -> Any:
    """The reward is parsed from the greedy response of a frozen judge."""
    prompts = Repeat(2)(batch)
    rollout = Generate(max_new_tokens=6)(prompts)
    question = JudgePrompt()(rollout.input_ids, rollout.attention_mask, prompts.row_id)
    judge = Generate(temperature, max_new_tokens=4, rollout=Role("judge")).named("judge")
    verdict = judge(question)
    rows = rollout if train_on == "rollout" else verdict
    scores = Verdict()(verdict.response_text, rows.response_mask)
    advantages = GroupAdvantage()(scores, rows.response_mask, prompts.uid)
    return Sync()(UpdateActor()(rows, old_log_probs=OldLogProb()(rows), advantages=advantages))


@algorithm
def self_play(batch: PromptBatch, *, train_on: str = "rollout") -> Any:
    """The reward compares each response with that of a frozen opponent."""
    prompts = Repeat(2)(batch)
    rollout = Generate(max_new_tokens=6)(prompts)
    opponent = Generate(max_new_tokens=6, rollout=Role("opponent")).named("opponent")(prompts)
    rows = rollout if train_on == "rollout" else opponent
    scores = Duel()(rollout.response_text, opponent.response_text, rows.response_mask)
    advantages = GroupAdvantage()(scores, rows.response_mask, prompts.uid)
    return Sync()(UpdateActor()(rows, old_log_probs=OldLogProb()(rows), advantages=advantages))


@algorithm
def league(batch: PromptBatch, *, crossed: bool = False, old_of: str = "actor_b") -> Any:
    """Two policies trained against each other; `crossed` trains the second on rows of the first."""
    prompts = Repeat(2)(batch)
    a = Generate(max_new_tokens=6)(prompts)
    b = Generate(max_new_tokens=6, rollout=Role("rollout_b")).named("generate_b")(prompts)
    rows = a if crossed else b
    won = Duel()(a.response_text, b.response_text, a.response_mask)
    lost = Duel().named("duel_b")(b.response_text, a.response_text, rows.response_mask)
    better = GroupAdvantage()(won, a.response_mask, prompts.uid)
    worse = GroupAdvantage().named("group_advantage_b")(lost, rows.response_mask, prompts.uid)
    old = OldLogProb(actor=Role(old_of)).named("old_b")(rows)
    update_b = UpdateActor(actor=Role("actor_b")).named("update_b")
    trained = update_b(rows, old_log_probs=old, advantages=worse)
    sync = Sync(actor=Role("actor_b"), rollout=Role("rollout_b")).named("sync_b")(trained)
    return Sync()(UpdateActor()(a, old_log_probs=OldLogProb()(a), advantages=better)), sync


@algorithm
def twice(batch: PromptBatch, *, prior_updates: int = 1, sync_first: bool = False, third: int | None = None) -> Any:
    """Two updates of one role in a step: the first with group advantages, the second with returns."""
    prompts = Repeat(2)(batch)
    rollout = Generate(max_new_tokens=6)(prompts)
    old, scores = OldLogProb()(rollout), Reward(digits)(rollout, prompts)
    advantages = GroupAdvantage()(scores, rollout.response_mask, prompts.uid)
    returns = ReturnToGo()(scores, rollout.response_mask)
    again = UpdateActor(prior_updates=prior_updates).named("again")(rollout, old_log_probs=old, advantages=returns)
    first = UpdateActor()(rollout, old_log_probs=old, advantages=advantages)
    if third is None:
        return Sync()(first if sync_first else again), first, again
    last = UpdateActor(prior_updates=third).named("last")(rollout, old_log_probs=old, advantages=returns)
    return Sync()(last), first, again
