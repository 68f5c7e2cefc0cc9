"""A graph that trains two policies on the episodes of both."""

from __future__ import annotations

from typing import Any

from flowrl import PromptBatch, Role, algorithm
from flowrl.backends import AdamW, TorchRollout, TorchTrainer
from flowrl.episodes import Chat, Row
from flowrl.operators import GroupAdvantage, Interact, OldLogProb, Repeat, Sampled, Sampler, Sync, UpdateActor
from flowrl.run.training.job import Job

SETTINGS: Any = {"max_turns": 3, "context": 150, "max_new_tokens": 6}


async def talk(chat: Chat, row: Row) -> float:
    """The policy and the user speak twice each; each is rewarded for the letters of its own first answer."""
    first = await chat.answer()
    heard = await chat.ask("user", f"a{first.text}")
    talked = [*chat.others["user"].messages, {"role": "user", "content": "b"}]
    second = await chat.ask("user", talked)
    chat.others["user"].reward(float(sum(map(str.isalpha, heard.text))) / 6)
    await chat.answer(second.text or "c")
    return float(sum(map(str.isalpha, first.text))) / 6


@algorithm
def both(batch: PromptBatch, n: int = 2) -> Any:
    """GRPO for the policy, and for the user."""
    user = Role("user"), Role("user_actor")
    prompts = Repeat(n)(batch)
    asking = {"others": {"user": user[0]}, "others_sampling": {"user": Sampler(temperature=0.7, max_new_tokens=5)}}
    rows = Interact(talk, **asking, **SETTINGS)(prompts)
    advantages = GroupAdvantage()(rows.token_level_scores, rows.response_mask, prompts.uid)
    updated = UpdateActor()(rows, old_log_probs=OldLogProb()(rows), advantages=advantages)
    theirs = Sampled("user", user[0])(rows.asked)
    old = OldLogProb(actor=user[1]).named("user_old_log_prob")(theirs)
    own = GroupAdvantage().named("user_advantage")(theirs.token_level_scores, theirs.response_mask, prompts.uid)
    learned = UpdateActor(actor=user[1]).named("update_user")(theirs, old_log_probs=old, advantages=own)
    return Sync()(updated), Sync(actor=user[1], rollout=user[0]).named("sync_user")(learned)


def job(model: str, other: str, **engines: Any) -> Job:
    """The graph, bound to two models."""
    return both().bind(
        actor=TorchTrainer(model, AdamW(lr=1e-3), device="cpu"),
        rollout=engines.pop("rollout", TorchRollout(model, device="cpu")),
        user_actor=TorchTrainer(other, AdamW(lr=1e-3), device="cpu"),
        user=engines.pop("user", TorchRollout(other, device="cpu")),
        **engines,
    )
