"""Scripts of OpenRLHF become trainings; tests openrlhf.py and openrlhf_graph.py."""

from __future__ import annotations

from pathlib import Path

from flowrl.importers.writer import value_of
from flowrl.operators import DPO, KLLoss, PPOClip, ValueClip
from tests.importers.scripts import imported, refused

PPO = """
deepspeed --module openrlhf.cli.train_ppo_ray --actor.model_name_or_path Qwen/Qwen3-0.6B \\
    --actor.num_gpus_per_node 4 --vllm.tensor_parallel_size 2 --rollout.batch_size 64 --train.batch_size 32 \\
    --rollout.n_samples_per_prompt 4 --data.prompt_dataset prompts.jsonl --data.input_key question %s
"""


def test_dapo(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': [1.0]}\n")
    flags = "--algo.advantage.estimator group_norm --actor.eps_clip_low_high 0.2 0.27"
    flags += f" --reward.remote_url {tmp_path}/reward.py"
    kl = "--algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 1e-3 --algo.dynamic_filtering_enable"
    found, findings = imported(tmp_path, "openrlhf", PPO % f"{flags} {kl}")
    assert not refused(found) and not findings.problems
    nodes = found.graph.edited().nodes
    update = nodes["update_actor"].operator
    assert (update.loss, update.kl, update.mini_batch) == (PPOClip(0.2, 0.27), KLLoss("k3", 1e-3), 32)
    assert nodes["collect"].operator.groups == 64
    assert value_of(found.bind["actor"]).optimizer.betas == (0.9, 0.95)  # OpenRLHF's defaults
    assert found.training["data"].kwargs["columns"] == {"prompt": "question", "ground_truth": None}


def test_ppo_has_a_critic_of_the_reward_model(tmp_path: Path) -> None:
    found, findings = imported(tmp_path, "openrlhf", PPO % "--reward.model_name_or_path org/reward")
    assert not refused(found) and not findings.problems
    assert value_of(found.bind["critic"]).model == "org/reward"
    assert found.graph.edited().nodes["update_critic"].operator.loss == ValueClip(0.5)
    more, _ = imported(tmp_path, "openrlhf", PPO % "--reward.model_name_or_path org/reward --reward.normalize_enable")
    assert refused(more) == ["reward.normalize_enable"]
    assert "config.json" in more.settings.report(()).refused[0].text


def test_a_default_that_differs_is_shown_though_no_flag_gives_it(tmp_path: Path) -> None:
    found, _ = imported(tmp_path, "openrlhf", PPO % "--reward.model_name_or_path org/reward")
    differing = {remark.key: remark.text for remark in found.settings.report(()).differing}
    assert all("constant" in differing[f"{role}.lr_scheduler"] for role in ("actor", "critic"))
    constant = "--reward.model_name_or_path org/reward --actor.lr_scheduler constant --critic.lr_scheduler constant"
    given, _ = imported(tmp_path, "openrlhf", PPO % constant)
    assert not {"actor.lr_scheduler", "critic.lr_scheduler"} & {r.key for r in given.settings.report(()).differing}


def test_dpo_from_a_document(tmp_path: Path) -> None:
    text = (
        "read -r -d '' command <<EOF\nopenrlhf.cli.train_dpo \\\n   --model.model_name_or_path Qwen/Qwen3-0.6B \\\n"
        "   --data.dataset pairs.jsonl --data.prompt_key question --model.beta 0.2 "
        "--model.aux_loss_coef 0.01\nEOF\ndeepspeed --module $command\n"
    )
    found, findings = imported(tmp_path, "openrlhf", text)
    assert not refused(found) and not findings.problems
    assert found.graph.edited().nodes["update_actor"].operator.loss == DPO(0.2)
    assert value_of(found.bind["actor"]).router_aux_loss_coef == 0.01
