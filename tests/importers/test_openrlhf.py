"""Scripts of OpenRLHF become trainings; tests openrlhf.py and openrlhf_graph.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl import Colocate, Split
from flowrl.importers.writer import value_of
from flowrl.operators import DPO, IPO, ClipReward, KLLoss, PPOClip, ValueClip
from flowrl.run.placement.place import Place
from flowrl.schedules import Constant, Cosine, Linear, Schedule
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
    assert (update.loss, update.kl, update.mini_batch) == (PPOClip(0.2, 0.27), KLLoss("k3", 1e-3, bound=10.0), 32)
    assert nodes["collect"].operator.groups == 64
    assert value_of(found.bind["actor"]).optimizer.betas == (0.9, 0.95)  # OpenRLHF's defaults
    assert found.training["data"].kwargs["columns"] == {"prompt": "question", "ground_truth": None}


def test_ppo_has_a_critic_of_the_reward_model(tmp_path: Path) -> None:
    found, findings = imported(tmp_path, "openrlhf", PPO % "--reward.model_name_or_path org/reward")
    assert not refused(found) and not findings.problems
    assert value_of(found.bind["critic"]).model == "org/reward"
    assert found.graph.edited().nodes["update_critic"].operator.loss == ValueClip(0.5)
    nodes = found.graph.edited().nodes
    assert nodes["clip_reward"].operator == ClipReward(-10.0, 10.0)  # OpenRLHF's default
    assert (nodes["kl_shape"].operator.bound, nodes["whiten"].operator.unbiased) == (10.0, False)
    assert value_of(found.bind["place"]) == Split(train=4, rollout=4)
    more, _ = imported(tmp_path, "openrlhf", PPO % "--reward.model_name_or_path org/reward --reward.normalize_enable")
    assert not refused(more) and value_of(more.bind["reward_model"]).normalize
    assert "critic's values" in more.settings.differs["reward.normalize_enable"]


@pytest.mark.parametrize(
    ("flags", "place"),
    [
        ("", Split(train=8, rollout=8, per_machine=4, address="auto")),
        ("--vllm.num_engines 3", Split(train=8, rollout=6, per_machine=4, address="auto")),
        ("--train.colocate_all", Colocate(gpus=8, per_machine=4, address="auto")),
        ("--vllm.tensor_parallel_size 8 --vllm.num_engines 1", Split(train=8, rollout=8, address="auto")),
    ],
)
def test_two_nodes_are_machines_of_a_ray_cluster(flags: str, place: Place, tmp_path: Path) -> None:
    nodes = "--actor.num_nodes 2 --reward.model_name_or_path org/reward"
    found, findings = imported(tmp_path, "openrlhf", PPO % f"{nodes} {flags}")
    assert not refused(found) and not findings.problems
    assert value_of(found.bind["place"]) == place


@pytest.mark.parametrize(
    ("flags", "schedule"),
    [
        ("", Cosine(1.0, 0.1, warmup=0.03)),
        ("--actor.lr_scheduler constant", Constant(1.0)),
        ("--actor.lr_scheduler constant_with_warmup --actor.lr_warmup_ratio 0.1", Constant(1.0, warmup=0.1)),
        ("--actor.lr_scheduler linear --actor.lr_warmup_ratio 0", Linear(1.0, 0.0)),
    ],
)
def test_learning_rates_last_as_long_as_the_run(flags: str, schedule: Schedule, tmp_path: Path) -> None:
    found, findings = imported(tmp_path, "openrlhf", PPO % f"--reward.model_name_or_path org/reward {flags}")
    assert not refused(found) and not findings.problems
    assert value_of(found.bind["actor"]).schedule == schedule


def test_a_default_that_differs_is_shown_though_no_flag_gives_it(tmp_path: Path) -> None:
    flags = "--algo.advantage.estimator group_norm --algo.kl.init_coef 0"
    found, _ = imported(tmp_path, "openrlhf", PPO % f"{flags} --reward.model_name_or_path org/reward")
    assert "reward.clip_range" in {remark.key for remark in found.settings.report(()).differing}


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_baseline", "group_norm", "dr_grpo"])
def test_kl_after_the_baseline_of_a_group_is_refused(estimator: str, tmp_path: Path) -> None:
    flags = f"--algo.advantage.estimator {estimator} --reward.model_name_or_path org/reward"
    assert refused(imported(tmp_path, "openrlhf", PPO % flags)[0]) == ["algo.kl.init_coef"]
    for more in ("--algo.kl.use_loss --algo.kl.estimator k2", "--algo.kl.init_coef 0"):
        found, findings = imported(tmp_path, "openrlhf", PPO % f"{flags} {more}")
        assert not refused(found) and not findings.problems
        assert "kl_shape" not in found.graph.edited().nodes


def test_validation_and_one_pool_of_gpus(tmp_path: Path) -> None:
    flags = "--reward.model_name_or_path org/reward --train.colocate_all --eval.dataset held.jsonl --eval.steps 5"
    found, findings = imported(tmp_path, "openrlhf", PPO % f"{flags} --eval.n_samples_per_prompt 4")
    assert not refused(found) and not findings.problems
    assert value_of(found.bind["place"]) == Colocate(gpus=4)
    validation = value_of(found.training["validation"])
    assert (validation.every, validation.changes["repeat.n"]) == (5, 4)


def test_ipo_sums_over_the_tokens_of_a_response(tmp_path: Path) -> None:
    text = (
        "python -m openrlhf.cli.train_dpo --model.model_name_or_path Qwen/Qwen3-0.6B --data.dataset pairs.jsonl "
        "--model.beta 0.2 --model.ipo_enable --model.label_smoothing 0.1\n"
    )
    found, _ = imported(tmp_path, "openrlhf", text)
    assert not refused(found) and "model.label_smoothing" in found.settings.differs
    assert found.graph.edited().nodes["update_actor"].operator.loss == IPO(0.2)


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


def test_sft_reads_its_own_split_and_the_gpus_of_its_launcher(tmp_path: Path) -> None:
    text = (
        "deepspeed %s --module openrlhf.cli.train_sft --model.model_name_or_path Qwen/Qwen3-0.6B --data.max_len 512 "
        "--data.dataset org/rows --data.input_key question --data.output_key answer --data.max_samples 100 %s\n"
    )
    found, findings = imported(tmp_path, "openrlhf", text % ("", ""))
    assert not refused(found) and not findings.problems
    rows = found.training["data"].kwargs
    assert (rows["split"], rows["max_prompt_length"], rows["max_response_length"]) == ("train[:100]", 512, 512)
    assert {"num_processes", "data.max_len"} <= found.settings.differs.keys()
    more, _ = imported(tmp_path, "openrlhf", text % ("--num_nodes 2 --num_gpus 4", "--data.dataset_split dev"))
    assert more.training["data"].kwargs["split"] == "dev[:100]"
    assert value_of(more.bind["actor"]).ranks == 8
    assert value_of(more.bind["place"]) == Colocate(gpus=8, per_machine=4, address="auto")
