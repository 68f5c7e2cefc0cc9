"""One step of imported configurations equals the peers' formulas, written again in float64.

`benchmarks/importer_numbers.py` compares more of them with the peers' own functions; tests verl_graph.py and
openrlhf_graph.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.importers.scripts import imported, refused, verl
from tests.importers.test_openrlhf import PPO
from tests.support.rows.importer_rows import numbers, rows

ACTOR, CORRECTION = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
N, WIDTH = 4, 12


def _columns(scores: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Rows for flowrl, and the same in float64."""
    x = rows(3, 6, N, WIDTH, scores)
    return x, {name: column.double() for name, column in x.items() if isinstance(column, Tensor)}


def _of_groups(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The score minus the mean of its group, and the standard deviation of the group."""
    by_group = scores.view(-1, N)
    return (by_group - by_group.mean(1, keepdim=True)).flatten(), by_group.std(1).repeat_interleave(N)


def _clipped(y: dict[str, Tensor], advantages: Tensor, old: str = "old_log_probs", high: float = 0.2) -> Tensor:
    """PPO's loss of each token, with the dual clip of 3 that verl has."""
    ratio = (y["log_probs"] - y[old]).exp()
    worst = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1 + high))
    return torch.where(advantages < 0, torch.minimum(worst, -3.0 * advantages), worst)


def _mean(of_tokens: Tensor, mask: Tensor) -> float:
    return float((of_tokens * mask).sum() / mask.sum())


def _near(found: Tensor, expected: Tensor | float) -> None:
    torch.testing.assert_close(found.double(), torch.as_tensor(expected, dtype=torch.float64), atol=1e-5, rtol=1e-5)


def test_grpo_with_k3_in_the_loss_is_bounded_as_verl(tmp_path: Path) -> None:
    kl = [f"{ACTOR}use_kl_loss=True", f"{ACTOR}kl_loss_type=low_var_kl", f"{ACTOR}kl_loss_coef=0.05"]
    found, _ = verl(tmp_path, "grpo", *kl)
    x, y = _columns("reals")
    centered, std = _of_groups(y["token_level_scores"].sum(1))
    advantages = (centered / (std + 1e-6))[:, None] * y["response_mask"]
    d = y["ref_log_prob"] - y["log_probs"]
    k3 = (d.clamp(-20, 20).exp() - d - 1).clamp(-10, 10)
    assert (k3 == 10).any()
    mine = numbers(found.graph.edited(), x)
    _near(mine["advantages"], advantages)
    _near(mine["actor loss"], _mean(_clipped(y, advantages) + 0.05 * k3, y["response_mask"]))


def test_gpg_divides_by_the_share_of_rows_with_a_score(tmp_path: Path) -> None:
    found, findings = verl(tmp_path, "gpg", f"{ACTOR}policy_loss.loss_mode=gpg")
    assert not refused(found) and not findings.problems
    x, y = _columns("bits")
    scores = y["token_level_scores"].sum(1)
    advantages = (len(scores) / (scores != 0).sum() * _of_groups(scores)[0])[:, None] * y["response_mask"]
    mine = numbers(found.graph.edited(), x)
    _near(mine["advantages"], advantages)
    _near(mine["actor loss"], _mean(-advantages * y["log_probs"], y["response_mask"]))


def test_rejected_rows_leave_the_counts_and_weights_are_masked(tmp_path: Path) -> None:
    given = {"rs": "seq_mean_k1", "rs_threshold": "0.95_1.2", "is": "token", "is_threshold": "0.8_1.3"}
    found, findings = verl(tmp_path, "grpo", *(f"{CORRECTION}rollout_{name}={value}" for name, value in given.items()))
    assert not refused(found) and not findings.problems
    x, y = _columns("reals")
    d, mask = (y["old_log_probs"] - y["rollout_log_probs"]), y["response_mask"]
    reciprocal = (-(d * mask).sum(1) / mask.sum(1)).exp()  # verl's k1 is of the engine's ratio to the trainer
    kept = mask * ((reciprocal >= 0.95) & (reciprocal <= 1.2))[:, None]
    assert 0 < kept.sum() < mask.sum()
    weights = torch.where((d.exp() >= 0.8) & (d.exp() <= 1.3), d.exp(), 0.0)
    centered, std = _of_groups(y["token_level_scores"].sum(1))
    advantages = (centered / (std + 1e-6))[:, None] * mask
    mine = numbers(found.graph.edited(), x)
    _near(mine["actor loss"], _mean(weights * _clipped(y, advantages), kept))


def test_openrlhf_whitens_returns_of_bounded_rewards_and_kl(tmp_path: Path) -> None:
    flags = "--algo.advantage.estimator reinforce --algo.advantage.gamma 0.9 --reward.clip_range -0.5 1.5"
    found, findings = imported(tmp_path, "openrlhf", PPO % f"{flags} --reward.model_name_or_path org/reward")
    assert not refused(found) and not findings.problems
    x, y = _columns("reals")
    mask, scores = y["response_mask"], y["token_level_scores"].sum(1)
    assert (scores < -0.5).any() and (scores > 1.5).any()
    rewards = -0.01 * (y["old_log_probs"] - y["ref_log_prob"]).clamp(-10, 10) * mask
    rewards[torch.arange(len(rewards)), mask.sum(1).long() - 1] += scores.clamp(-0.5, 1.5)
    returns, after = torch.zeros_like(rewards), torch.zeros(len(rewards), dtype=torch.float64)
    for token in reversed(range(WIDTH)):
        after = rewards[:, token] + 0.9 * after
        returns[:, token] = after
    on = returns[mask.bool()]
    _near(numbers(found.graph.edited(), x)["advantages"], (returns - on.mean()) / on.std(correction=0) * mask)


@pytest.mark.parametrize("mode", ["clip", "mask"])
def test_openrlhf_weighs_tokens(mode: str, tmp_path: Path) -> None:
    prefix = "--algo.advantage.is_correction_"
    flags = f"{prefix}level token {prefix}mode {mode} {prefix}threshold 0.8 1.2 --algo.kl.init_coef 0"
    reward = "--reward.model_name_or_path org/reward --algo.advantage.estimator group_norm"
    found, _ = imported(tmp_path, "openrlhf", PPO % f"{flags} {reward}")
    x, y = _columns("reals")
    ratio = (y["old_log_probs"] - y["rollout_log_probs"]).exp()
    weights = ratio.clamp(0.8, 1.2) if mode == "clip" else torch.where((ratio >= 0.8) & (ratio <= 1.2), ratio, 0.0)
    centered, std = _of_groups(y["token_level_scores"].sum(1))
    advantages = (centered / (std + 1e-9))[:, None] * y["response_mask"]
    plain = torch.exp(y["log_probs"] - y["old_log_probs"])
    of_tokens = torch.maximum(-advantages * plain, -advantages * plain.clamp(0.8, 1.2))
    _near(numbers(found.graph.edited(), x)["actor loss"], _mean(weights * of_tokens, y["response_mask"]))
