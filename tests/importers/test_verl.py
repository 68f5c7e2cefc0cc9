"""Configurations of verl keep their loss, advantages and KL; tests verl.py, verl_graph.py and verl_distill.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowrl.importers.writer import value_of
from flowrl.operators import CISPO, GSPO, SAPO, AdaptiveKL, KLLoss, PPOClip, Reinforce, ValueClip
from tests.importers.scripts import refused, verl

ACTOR = "actor_rollout_ref.actor."
ROWS = [f"{ACTOR}loss_agg_mode=seq-mean-token-mean"]


def _node(found: Any, name: str) -> Any:
    return found.graph.edited().nodes[name].operator


def test_grpo_has_the_defaults_of_verl(tmp_path: Path) -> None:
    found, findings = verl(tmp_path)
    assert not refused(found) and not findings.problems
    update = _node(found, "update_actor")
    assert update.loss == PPOClip(0.2, dual_clip=3.0)  # verl's default
    assert (update.kl, update.mini_batch, update.aggregation) == (None, 16 * 4, "token-mean")
    assert "ref_log_prob" not in found.graph.edited().nodes
    actor = value_of(found.bind["actor"])
    assert (actor.dtype, actor.gradient_checkpointing, actor.ranks) == ("bfloat16", True, 4)
    assert value_of(found.bind["rollout"]).ranks == 2  # tensor_model_parallel_size is 2
    assert (found.training["epochs"], found.training["prompts"]) == (2, 64)


@pytest.mark.parametrize(
    ("more", "path", "value"),
    [
        ([*ROWS, f"{ACTOR}policy_loss.loss_mode=gspo", f"{ACTOR}clip_ratio_low=3e-4"], "loss", GSPO(3e-4, 0.2)),
        ([f"{ACTOR}policy_loss.loss_mode=cispo", f"{ACTOR}clip_ratio_low=10"], "loss", CISPO(1.0, 0.2)),
        ([f"{ACTOR}policy_loss.loss_mode=sapo", f"{ACTOR}tau_neg=1.2"], "loss", SAPO(1.0, 1.2)),
        ([f"{ACTOR}policy_loss.loss_mode=sapo"], "aggregation", "seq-mean-token-mean"),
        ([f"{ACTOR}clip_ratio_high=0.28"], "loss", PPOClip(0.2, 0.28, 3.0)),
        ([f"{ACTOR}use_kl_loss=True", f"{ACTOR}kl_loss_type=mse"], "kl", KLLoss("k2", 0.001)),
        ([f"{ACTOR}entropy_coeff=0.01"], "entropy", 0.01),
    ],
    ids=["gspo", "cispo", "sapo", "sapo-aggregation", "clip-higher", "kl", "entropy"],
)
def test_losses(more: list[str], path: str, value: Any, tmp_path: Path) -> None:
    found, findings = verl(tmp_path, "grpo", *more)
    assert not refused(found) and not findings.problems
    assert getattr(_node(found, "update_actor"), path) == value


def test_ppo_has_a_critic(tmp_path: Path) -> None:
    kl = ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive"]
    found, findings = verl(tmp_path, "gae", "critic.model.path=Qwen/Qwen3-0.6B", "critic.optim.lr=1e-5", *kl)
    assert not refused(found) and not findings.problems
    assert _node(found, "update_critic").loss == ValueClip(0.5)
    assert _node(found, "gae").lam == 1.0
    assert _node(found, "kl_shape").coef == AdaptiveKL(target=0.1, horizon=10000, coef=0.001)
    assert value_of(found.bind["critic"]).optimizer.lr == 1e-5


def test_a_loss_without_a_ratio_is_found(tmp_path: Path) -> None:
    found, findings = verl(tmp_path, "gpg", f"{ACTOR}policy_loss.loss_mode=gpg")
    assert _node(found, "update_actor").loss == Reinforce()
    assert [problem.split()[0] for problem in findings.problems] == ["FR020"]


def test_distillation_with_a_clamp(tmp_path: Path) -> None:
    loss = "distillation.distillation_loss."
    more = [f"{loss}loss_mode=k1", f"{loss}use_policy_gradient=True", f"{loss}use_task_rewards=False"]
    teacher = "distillation.teacher_models.teacher_model.model_path=Qwen/Qwen3-8B"
    found, findings = verl(tmp_path, "grpo", "distillation.enabled=True", teacher, *more, f"{loss}loss_max_clamp=10.0")
    assert not refused(found) and not findings.problems
    assert "advantages.clamp(-10.0, 10.0)" in found.program().source()


def test_what_flowrl_cannot_say_is_refused(tmp_path: Path) -> None:
    found, _ = verl(
        tmp_path,
        "grpo",
        f"{ACTOR}strategy=megatron",
        "data.image_key=images",
        "trainer.no_such_key=1",
        "data.max_response_length=$(cat length)",
        f"{ACTOR}optim.lr_warmup_steps_ratio=0.1",
    )
    expected = [f"{ACTOR}strategy", "data.image_key", "trainer.no_such_key", "data.max_response_length"]
    assert sorted(refused(found)) == sorted([*expected, f"{ACTOR}optim.lr_warmup_steps_ratio"])
    report = found.settings.report(["trainer.*", "data.*"])
    assert [remark.key for remark in report.allowed] == [
        "data.image_key",
        "trainer.no_such_key",
        "data.max_response_length",
    ]
    unresolved = next(remark for remark in report.allowed if remark.key.endswith("length"))
    assert "line 6: `$(cat length)`" in unresolved.text


def test_sft(tmp_path: Path) -> None:
    from tests.importers.scripts import imported

    text = (
        "torchrun --nnodes=1 --nproc_per_node=2 -m verl.trainer.sft_trainer data.train_files=~/train.parquet "
        "model.path=Qwen/Qwen3-0.6B optim.lr=1e-4 model.lora_rank=32 engine=fsdp trainer.total_epochs=2 "
        "model.lora_adapter_path=org/adapter\n"
    )
    found, findings = imported(tmp_path, "verl", text)
    assert not refused(found) and not findings.problems
    actor = value_of(found.bind["actor"])
    assert (actor.optimizer.lr, actor.lora.r, actor.ranks) == (1e-4, 32, 2)
    assert actor.lora.adapter_path == "org/adapter"
    assert found.training["prompts"] == 256  # verl's default
