"""Configurations of verl keep their loss, advantages and KL; tests verl.py, verl_graph.py and verl_distill.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowrl import Colocate
from flowrl.importers.writer import value_of
from flowrl.operators import CISPO, GSPO, SAPO, AdaptiveKL, KLLoss, PPOClip, Reinforce, ValueClip
from flowrl.schedules import Constant, Cosine, Schedule
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


def test_nodes_are_machines_of_a_ray_cluster(tmp_path: Path) -> None:
    found, findings = verl(tmp_path, "grpo", "trainer.nnodes=2")
    assert not refused(found) and not findings.problems
    assert value_of(found.bind["place"]) == Colocate(gpus=8, per_machine=4, address="auto")
    assert value_of(verl(tmp_path)[0].bind["place"]) == Colocate(gpus=4)


def test_ppo_has_a_critic(tmp_path: Path) -> None:
    kl = ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive"]
    found, findings = verl(tmp_path, "gae", "critic.model.path=Qwen/Qwen3-0.6B", "critic.optim.lr=1e-5", *kl)
    assert not refused(found) and not findings.problems
    assert _node(found, "update_critic").loss == ValueClip(0.5)
    assert _node(found, "gae").lam == 1.0
    assert _node(found, "kl_shape").coef == AdaptiveKL(target=0.1, horizon=10000, coef=0.001)
    assert value_of(found.bind["critic"]).optimizer.lr == 1e-5


def test_rules_that_verl_breaks_are_allowed_with_the_reason(tmp_path: Path) -> None:
    found, findings = verl(tmp_path, "gpg", f"{ACTOR}policy_loss.loss_mode=gpg")
    assert _node(found, "update_actor").loss == Reinforce()
    assert found.graph.allow.keys() == {"FR020"} and not findings.problems
    one_step = [f"{ACTOR}policy_loss.loss_mode=gpg", f"{ACTOR}ppo_mini_batch_size=64"]
    assert not verl(tmp_path, "gpg", *one_step)[0].graph.allow
    by_tokens, findings = verl(tmp_path, "grpo", f"{ACTOR}policy_loss.loss_mode=gspo")
    assert by_tokens.graph.allow.keys() == {"FR018"} and not findings.problems


@pytest.mark.parametrize(
    ("more", "schedule"),
    [
        (["lr_warmup_steps_ratio=0.1"], Constant(1.0, warmup=0.1)),
        (["lr_warmup_steps=10"], Constant(1.0, warmup=40)),  # 4 mini-batches a step
        (["lr_scheduler_type=cosine", "min_lr_ratio=0.1"], Cosine(1.0, 0.1)),
        (["warmup_style=cosine", "lr_warmup_steps=5"], Cosine(1.0, 0.0, warmup=20)),
    ],
)
def test_learning_rates_last_as_long_as_the_run(more: list[str], schedule: Schedule, tmp_path: Path) -> None:
    found, findings = verl(tmp_path, "grpo", *(f"{ACTOR}optim.{one}" for one in more))
    assert not refused(found) and not findings.problems
    assert value_of(found.bind["actor"]).schedule == schedule
    differs = found.settings.differs[f"{ACTOR}optim.lr_scheduler_type"]
    assert "after each of its 4 optimizer steps" in differs


def test_a_group_of_one_has_no_baseline(tmp_path: Path) -> None:
    found, findings = verl(tmp_path, "rloo", "actor_rollout_ref.rollout.n=1", "algorithm.gamma=0.9")
    assert not refused(found) and not findings.problems
    assert _node(found, "return_to_go").gamma == 1.0 and "whiten" not in found.graph.edited().nodes
    shaped, _ = verl(tmp_path, "rloo", "actor_rollout_ref.rollout.n=1", "algorithm.use_kl_in_reward=True")
    assert refused(shaped) == ["actor_rollout_ref.rollout.n"]


@pytest.mark.parametrize(
    ("estimator", "more"),
    [("grpo_passk", ""), ("tir_optimal_token_baseline", ""), ("grpo", "clip_cov"), ("grpo", "dro")],
)
def test_methods_with_another_formula_are_refused(estimator: str, more: str, tmp_path: Path) -> None:
    found, _ = verl(tmp_path, estimator, *([f"{ACTOR}policy_loss.loss_mode={more}"] if more else []))
    assert refused(found) == [f"{ACTOR}policy_loss.loss_mode" if more else "algorithm.adv_estimator"]


def test_gdpo_has_the_entries_of_a_function_as_rewards(tmp_path: Path) -> None:
    reward = "reward.custom_reward_function.path=elsewhere/reward.py"
    keys = "algorithm.gdpo_reward_keys=[format,accuracy]", "algorithm.gdpo_reward_weights=[0.5,1.0]"
    found, findings = verl(tmp_path, "gdpo", reward, *(f"'+{key}'" for key in keys))
    assert not refused(found) and not findings.problems
    assert _node(found, "gdpo_advantage").weights == {"reward": 0.5, "accuracy": 1.0}
    assert 'from_verl("elsewhere/reward.py:compute_score", key="accuracy")' in found.program().source()


def test_what_has_no_effect_in_verl_is_said(tmp_path: Path) -> None:
    unread = ["algorithm.lam=0.9", "critic.optim.lr=1e-5", "reward_model.overlong_buffer_cfg.len=128"]
    unread += ["trainer.test_freq=-1", "actor_rollout_ref.rollout.val_kwargs.n=4", f"{ACTOR}kl_loss_coef=0.1"]
    unread += ["trainer.total_training_steps=10", "actor_rollout_ref.rollout.engine_kwargs.sglang.x=1"]
    found, _ = verl(tmp_path, "grpo", *unread)
    assert not refused(found)
    silent = {key for key in found.settings.differs if "without effect" in found.settings.differs[key]}
    assert silent >= {one.partition("=")[0] for one in unread} - {"trainer.test_freq", "trainer.total_training_steps"}
    assert "trainer.total_epochs" in silent


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
        f"{ACTOR}optim.num_cycles=2",
    )
    expected = [f"{ACTOR}strategy", "data.image_key", "trainer.no_such_key", "data.max_response_length"]
    assert sorted(refused(found)) == sorted([*expected, f"{ACTOR}optim.num_cycles"])
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
        "torchrun --nnodes=2 --nproc_per_node=2 -m verl.trainer.sft_trainer data.train_files=~/train.parquet "
        "model.path=Qwen/Qwen3-0.6B optim.lr=1e-4 model.lora_rank=32 engine=fsdp trainer.total_epochs=2 "
        "model.lora_adapter_path=org/adapter\n"
    )
    found, findings = imported(tmp_path, "verl", text)
    assert not refused(found) and not findings.problems
    actor = value_of(found.bind["actor"])
    assert (actor.optimizer.lr, actor.lora.r, actor.ranks) == (1e-4, 32, 4)
    assert value_of(found.bind["place"]) == Colocate(gpus=4, per_machine=2, address="auto")
    assert actor.lora.adapter_path == "org/adapter"
    assert found.training["prompts"] == 256  # verl's default
    unset, _ = imported(tmp_path, "verl", text.replace("=2 -m", "=$1 -m"))
    assert "ranks" not in unset.bind["actor"].kwargs and "num_processes" in unset.settings.differs


@pytest.mark.parametrize(
    "key", ["actor_rollout_ref.model.path", "reward.custom_reward_function.path"], ids=["model", "reward"]
)
def test_a_name_of_which_nothing_is_known_is_refused(key: str, tmp_path: Path) -> None:
    found, _ = verl(tmp_path, "grpo", f"{key}=$UNSET")
    assert refused(found) == [key]
    part, _ = verl(tmp_path, "grpo", f"{key}=$ROOT/part.py")
    assert not refused(part) and "part.py" in part.program().source()
