"""Supervised fine-tuning, alone and as a second policy update in each step of GRPO."""

from __future__ import annotations

from flowrl.graph import algorithm
from flowrl.graphs.variants import RewardFn
from flowrl.operators import NLL, Generate, GroupAdvantage, OldLogProb, PPOClip, Repeat, Reward, Sync, UpdateActor
from flowrl.operators.losses.objective import Aggregation
from flowrl.records import DemoBatch, PromptBatch, Receipt, Updated


@algorithm
def sft(
    demos: DemoBatch, *, epochs: int = 1, mini_batch: int | None = None, aggregation: Aggregation = "token-mean"
) -> Updated:
    """Supervised fine-tuning (Ouyang et al. 2022, arXiv:2203.02155, sec. 3.5), on ``data=DemoData(...)``.

    The loss is ``-log pi(y | x)`` over the tokens of responses. There is no rollout engine.

    Args:
        demos: demonstrations.
        epochs: passes over the rows of a step.
        mini_batch: rows per optimizer step; None for all.
        aggregation: how to aggregate tokens; see `UpdateActor`.
    """
    return UpdateActor(NLL(), epochs, mini_batch, aggregation)(demos)


@algorithm
def grpo_sft(
    batch: PromptBatch,
    demos: DemoBatch,
    reward_fn: RewardFn,
    *,
    n: int = 8,
    temperature: float = 1.0,
    max_new_tokens: int = 1024,
    clip: float = 0.2,
    mini_batch: int | None = None,
) -> tuple[Receipt, Updated]:
    """GRPO with supervised fine-tuning in each step (CHORD: Zhang et al. 2025, arXiv:2508.11408, sec. 3).

    It trains on ``data={"batch": PromptData(...), "demos": DemoData(...)}``. The paper's two losses, that of GRPO and
    ``-log pi`` of the expert's tokens, have separate optimizer steps instead of a weighted sum. The second update runs
    after the first (``prior_updates=1``). There is no KL: the demonstrations regularize the policy.

    Args:
        batch: prompts.
        demos: demonstrations, as many rows as prompts.
        reward_fn: scores a response; see `Reward`.
        n: responses per prompt, the size of a group.
        temperature: sampling temperature.
        max_new_tokens: maximum length of a response in tokens.
        clip: PPO's epsilon.
        mini_batch: rows per optimizer step of GRPO; None for all.
    """
    prompts = Repeat(n)(batch)
    rollout = Generate(temperature=temperature, max_new_tokens=max_new_tokens)(prompts)
    old = OldLogProb()(rollout)
    scores = Reward(reward_fn)(rollout, prompts)
    advantages = GroupAdvantage()(scores, rollout.response_mask, prompts.uid)
    updated = UpdateActor(PPOClip(clip), mini_batch=mini_batch)(rollout, old_log_probs=old, advantages=advantages)
    imitated = UpdateActor(NLL(), prior_updates=1).named("imitate")(demos)
    return Sync()(imitated), updated
