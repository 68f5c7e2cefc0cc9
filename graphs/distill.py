"""On-policy distillation: a teacher scores each token that the policy sampled."""

from __future__ import annotations

from typing import Unpack

from flowrl.core.operators.roles import Role
from flowrl.graph import Graph, algorithm
from flowrl.graphs.variants import DistillSettings, edit_of
from flowrl.operators import (
    GKD,
    FullGKD,
    Generate,
    OldLogProb,
    PPOClip,
    RefLogProb,
    Repeat,
    ReverseKL,
    Sync,
    TeacherHiddenStates,
    TeacherTopK,
    UpdateActor,
)
from flowrl.operators.engines.distillation import TeacherTop
from flowrl.records import PromptBatch, Receipt


@algorithm
def distill(
    batch: PromptBatch,
    *,
    n: int = 1,
    temperature: float = 1.0,
    max_new_tokens: int = 1024,
    clip: float = 0.2,
    mini_batch: int | None = None,
) -> Receipt:
    """A teacher's log-prob of each sampled token is its reward (on-policy distillation; MiniLLM, arXiv:2306.08543).

    ``A_t = log p_teacher(y_t) - log p_old(y_t)``, the negated reverse KL of the token; see `ReverseKL`.

    Args:
        batch: prompts.
        n: responses per prompt.
        temperature: temperature of sampling and of the teacher.
        max_new_tokens: maximum length of a response in tokens.
        clip: PPO's epsilon.
        mini_batch: rows per optimizer step; None for all.
    """
    prompts = Repeat(n)(batch)
    rollout = Generate(temperature=temperature, max_new_tokens=max_new_tokens)(prompts)
    old = OldLogProb()(rollout)
    teacher = RefLogProb(ref=Role("teacher")).named("teacher_log_prob")(rollout)
    advantages = ReverseKL()(teacher, old, rollout.response_mask)
    return Sync()(UpdateActor(PPOClip(clip), mini_batch=mini_batch)(rollout, old_log_probs=old, advantages=advantages))


@algorithm
def distill_full(
    batch: PromptBatch,
    *,
    beta: float = 1.0,
    n: int = 1,
    temperature: float = 1.0,
    max_new_tokens: int = 1024,
    mini_batch: int | None = None,
) -> Receipt:
    """Distillation of a teacher's full distributions (GKD: Agarwal et al. 2023, arXiv:2306.13649).

    ``beta KL(P || M) + (1 - beta) KL(Q || M)`` over the vocabulary, at the tokens of own samples; see `FullGKD`.

    Args:
        batch: prompts.
        beta: 0 is KL(teacher || student), 1 is KL(student || teacher), between them Jensen-Shannon.
        n: responses per prompt.
        temperature: temperature of sampling, and of both distributions.
        max_new_tokens: maximum length of a response in tokens.
        mini_batch: rows per optimizer step; None for all.
    """
    prompts = Repeat(n)(batch)
    rollout = Generate(temperature=temperature, max_new_tokens=max_new_tokens)(prompts)
    teacher = TeacherHiddenStates()(rollout)
    update = UpdateActor(FullGKD(beta), mini_batch=mini_batch)
    return Sync()(update(rollout, **teacher._asdict()))


@edit_of(distill_full)
def distill_top(*, k: int = 64, **settings: Unpack[DistillSettings]) -> Graph:
    """Distillation of a teacher's k most likely tokens (GKD: Agarwal et al. 2023, arXiv:2306.13649).

    Use it if `distill_full` cannot load the teacher's head, or its states are too large to transfer. Each distribution
    has k + 1 outcomes, the teacher's k most likely tokens and any other; its divergence is a lower bound of that over
    the vocabulary. See `GKD`.

    Args:
        k: number of tokens.
        settings: settings of `distill_full`.
    """
    graph: Graph = distill_full(**settings)
    return graph.edit(
        replace={"teacher_hidden_states": TeacherTopK(k)},
        set={"update_actor.loss": GKD(settings["beta"])},
        wire={f"update_actor.{column}": f"teacher_top_k.{column}" for column in TeacherTop._fields},
        name="distill_top",
    )
