"""Imitation: supervised fine-tuning, alone and as a second update of the policy in every step of GRPO."""

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

    The loss is ``-log pi(y | x)``, over the tokens of responses alone. Nothing is sampled, so there is no engine.

    Args:
        demos: demonstrations.
        epochs: passes over the rows of a step.
        mini_batch: rows per optimiser step; None for all.
        aggregation: of tokens; see `token_weights`.
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
    """GRPO, and supervised fine-tuning beside it in every step (CHORD: Zhang et al. 2025, arXiv:2508.11408, sec. 3).

    It trains on ``data={"batch": PromptData(...), "demos": DemoData(...)}``. The paper's two losses, GRPO's and ``-log
    pi`` of the expert's tokens, have an optimiser step each in the place of their weighted sum. The second runs after
    the first, and says so: its rows may be one update behind. There is no KL: demonstrations hold the policy.

    Args:
        batch: prompts.
        demos: demonstrations, as many rows as there are prompts.
        reward_fn: scores a response; see `Reward`.
        n: responses per prompt, the size of a group.
        temperature: the sampling temperature.
        max_new_tokens: the longest a response may get.
        clip: PPO's epsilon.
        mini_batch: rows per optimiser step of GRPO; None for all.
    """
    prompts = Repeat(n)(batch)
    rollout = Generate(temperature=temperature, max_new_tokens=max_new_tokens)(prompts)
    old = OldLogProb()(rollout)
    scores = Reward(reward_fn)(rollout, prompts)
    advantages = GroupAdvantage()(scores, rollout.response_mask, prompts.uid)
    updated = UpdateActor(PPOClip(clip), mini_batch=mini_batch)(rollout, old_log_probs=old, advantages=advantages)
    imitated = UpdateActor(NLL(), prior_updates=1).named("imitate")(demos)
    return Sync()(imitated), updated
