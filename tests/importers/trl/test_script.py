"""Scripts with GRPO and RLOO, of which nothing runs.

Tests script.py, values.py, functions.py, given.py, data.py and agent.py.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.importers.importing import Source, import_file
from flowrl.importers.plan import Imported
from flowrl.importers.writer import value_of
from flowrl.operators import GSPO, ClipReward, Interact, OverlongPenalty, Reward, WeighRewards
from flowrl.rewards import from_trl
from tests.importers.scripts import imported, refused

GSPO_SCRIPT = '''"""
accelerate launch --config_file zero3.yaml examples/gspo.py \\
    --model_name_or_path Qwen/Qwen3-0.6B --importance_sampling_level sequence --epsilon 3e-4 --epsilon_high 4e-4 \\
    --loss_type grpo --beta 0.0 --per_device_train_batch_size 8 --num_generations 8 --gradient_accumulation_steps 2 \\
    --steps_per_generation 8 --max_steps 40 --use_peft --dtype bfloat16
"""
import shutil
import torch
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.rewards import think_format_reward

SYSTEM = (
    "Think first. "
    "Then answer."
)
shutil.rmtree("kept")
MANY = []
for name in ("a", "b"):
    MANY.append(name)


def exact(completions, solution, **kwargs):
    return [float(one[0]["content"] == truth) for one, truth in zip(completions, solution)]


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    dtype = model_args.dtype if model_args.dtype in ["auto", None] else getattr(torch, model_args.dtype)
    training_args.model_init_kwargs = dict(revision=model_args.model_revision, dtype=dtype)
    train, test = load_dataset("org/math", split=["train[:5%]", "test[:5%]"])

    def conversation(example):
        import re
        return {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": example["problem"]}]}

    train = train.map(conversation).filter(lambda one: len(one["problem"]) < 9)
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=[think_format_reward, exact],
        train_dataset=train.remove_columns(["messages", "problem"]),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
'''
RLOO_SCRIPT = """
from datasets import load_dataset
from peft import LoraConfig
from trl import RLOOConfig, RLOOTrainer
from trl.rewards import get_soft_overlong_punishment

GOOD = ["yes", "indeed"]


def short(completions: "list[str]", answer, level, **kwargs) -> "list[float]":
    return [float(text in GOOD and kwargs["source"][0] != "x") for text in completions]


def data(split="train"):
    rows = load_dataset("org/facts", "main")[split]
    return rows.map(lambda row: {"prompt": f"Is it? {row['question']}"})


config = RLOOConfig(
    "out", num_generations=4, steps_per_generation=8, gradient_accumulation_steps=2, per_device_train_batch_size=4,
    reward_clip_range=(-1.0, 1.0), max_steps=30, use_vllm=True, learning_rate=2e-6, generation_kwargs={"stop": ["###"]},
    eval_strategy="steps", eval_steps=8, num_generations_eval=2,
)
trainer = RLOOTrainer(
    "org/model", [short, get_soft_overlong_punishment(100, 20)], config, data(), data("test"),
    peft_config=LoraConfig(r=4, target_modules=["q_proj"]),
)
trainer.train()
"""
AGENT_SCRIPT = '''
import re
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def right(completions, answer, **kwargs):
    return [float(one[-1]["content"] == truth) for one, truth in zip(completions, answer)]


def look(word: str) -> str:
    """Look a word up.

    Args:
        word: what to look up.
    """
    return word


class World:
    def reset(self, level, **kwargs):
        return "start"

    def move(self, by: int) -> str:
        """Move."""
        return "moved"


def main():
    data = load_dataset("json", data_files="rows.jsonl", split="train")
    args = GRPOConfig(output_dir="out", max_steps=5, max_tool_calling_iterations=3, max_completion_length=64)
    GRPOTrainer(model="m", args=args, train_dataset=data, reward_funcs=right, %s).train()


if __name__ == "__main__":
    main()
'''


def _loaded(found: Imported) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(found.program(reward=False).source(), "<imported>", "exec"), names)
    return names


def test_flags_functions_and_data_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    found, findings = imported(tmp_path, "trl", GSPO_SCRIPT, "gspo.py")
    assert not refused(found) and not findings.problems and (tmp_path / "kept").exists()
    update = found.graph.edited().nodes["update_actor"].operator
    assert (update.loss, update.mini_batch, update.aggregation) == (GSPO(3e-4, 4e-4), 16, "seq-mean-token-mean")
    assert (found.training["prompts"], found.training["steps"]) == (8, 10)  # 64 rows, 4 optimizer steps each
    assert found.graph.wire["weigh_rewards.exact"] == "exact.token_level_scores"
    source = found.program().source()
    assert f'"{tmp_path}/gspo.py:exact"' in source and "def exact" not in source  # its import starts no training
    row = _loaded(found)["row"]
    assert row({"problem": "1+1", "solution": "2"}) == {
        "prompt": [{"role": "system", "content": "Think first. Then answer."}, {"role": "user", "content": "1+1"}],
        "ground_truth": "2",
    }
    assert row({"problem": "1+1" * 9, "solution": "2"}) is None


def test_a_configuration_in_a_script_whose_import_would_train(tmp_path: Path) -> None:
    found, findings = imported(tmp_path, "trl", RLOO_SCRIPT, "rloo.py")
    assert not refused(found) and not findings.problems
    names = _loaded(found)
    graph = names["training"].job.graph
    operators = {name: node.operator for name, node in graph.nodes.items()}
    assert operators["overlong_penalty"] == OverlongPenalty(100, 20)
    assert operators["clip_reward"] == ClipReward(-1.0, 1.0)
    assert "clip_reward.token_level_scores" in map(str, graph["kl_shape"].inputs.values())
    assert operators["generate"].stop == ("###",) and type(operators["update_actor"].loss).__name__ == "ResponseClip"
    assert names["short"](["yes"], answer=[1], level=[2], source=["y"]) == [1.0]  # a copy, with its constant
    assert 'from_trl(short, ground_truth="answer", conversational=False)' in found.program().source()
    assert names["row"]({"question": "so", "answer": 1, "level": 2, "source": "y"}) == {
        "prompt": "Is it? so",
        "ground_truth": 1,
        "extra_info": {"level": 2, "source": "y"},
    }
    training = names["training"]
    assert (training.prompts, training.steps) == (8, 8)  # 32 rows of 4, 30 optimizer steps of 4 each
    (validation,) = training.validations
    assert (validation.every, validation.changes["repeat.n"], validation.data.split) == (2, 2, "test")
    assert value_of(found.bind["actor"]).lora.targets == ("q_proj",)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("tools=[look]", 'tools=["{script}:look"]'),
        ("environment_factory=World", 'environment="{script}:World"'),
    ],
)
def test_tools_and_environments(more: str, expected: str, tmp_path: Path) -> None:
    found, findings = imported(tmp_path, "trl", AGENT_SCRIPT % more, "agent.py")
    assert not refused(found) and not findings.problems
    source = found.program().source()
    joined = "".join(source.split()).replace(",]", "]")  # long lines are broken
    assert expected.format(script=tmp_path / "agent.py") in joined and f'"{tmp_path}/agent.py:right": 1.0' in source
    graph = _loaded(found)["training"].job.graph
    interact = graph["interact"].operator
    assert isinstance(interact, Interact) and (interact.max_turns, interact.max_new_tokens) == (4, 64)
    assert "reward" not in graph.nodes and ("level" in source) == ("World" in more)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("map(conversation)", "map(conversation, batched=True)", "train_dataset"),
        ("SYSTEM = (", "SYSTEM = open('x').read() or (", "train_dataset"),
        ("SYSTEM = (", "SYSTEM = list(range(10**12)) or (", "train_dataset"),
        ("def exact(", "@cached\ndef exact(", ""),
        ("[think_format_reward, exact]", "[make(exact)]", "reward_funcs"),
        ("    trainer = ", "    found = []\n    for one in [exact]:\n        found.append(one)\n    trainer = ", ""),
        ("[think_format_reward, exact]", "MANY", "reward_funcs"),
        ("--max_steps 40", "--max_steps 40 --top_entropy_quantile 0.2", "top_entropy_quantile"),
        ("--beta 0.0", "--beta 0.1", "use_bias_correction_kl"),
        ("--loss_type grpo", "--loss_type vespo", "loss_type"),
        ("--loss_type grpo", "--loss_type sapo", "importance_sampling_level"),
        ("--steps_per_generation 8", "--steps_per_generation 3", "steps_per_generation"),
        ("--epsilon 3e-4", "--delta 2.0", "delta"),
        ("peft_config=", "callbacks=[shutil], peft_config=", "callbacks"),
    ],
)
def test_what_cannot_be_said_is_named(old: str, new: str, key: str, tmp_path: Path) -> None:
    assert old in GSPO_SCRIPT
    found, _ = imported(tmp_path, "trl", GSPO_SCRIPT.replace(old, new), "gspo.py")
    assert refused(found) == [key] * bool(key)


def test_conditions_that_only_a_run_decides_are_notes(tmp_path: Path) -> None:
    script = GSPO_SCRIPT.replace("[think_format_reward, exact]", "few").replace(
        "    trainer = ", "    few = []\n    few.append(exact)\n    trainer = "
    )
    text = script.replace("    trainer.train()", "    if torch.cuda.is_available():\n        train = None\n")
    (tmp_path / "gspo.py").write_text(text)
    found, notes = import_file("trl", Source(tmp_path / "gspo.py"))
    assert not refused(found) and "gspo.py:exact" in found.program().source()
    assert len(notes) == 1 and "torch.cuda.is_available()" in notes[0]


def test_a_shell_script_that_starts_a_script(tmp_path: Path) -> None:
    (tmp_path / "gspo.py").write_text(GSPO_SCRIPT)
    flags = "--model_name_or_path other --max_steps 8 --per_device_train_batch_size 4"
    found, _ = imported(tmp_path, "trl", f"accelerate launch --num_processes 2 {tmp_path}/gspo.py {flags}\n")
    assert not refused(found)
    assert value_of(found.bind["actor"]).ranks == 2 and found.settings.given["model_name_or_path"].value == "other"


def test_reward_functions_by_flags(tmp_path: Path) -> None:
    flags = "--model_name_or_path m --dataset_name d.jsonl --max_steps 4"
    names = "accuracy_reward get_soft_overlong_punishment mine.rewards.kind"
    found, _ = imported(tmp_path, "trl", f"trl grpo {flags} --reward_funcs {names} --reward_weights 1 0.5 2\n")
    assert not refused(found)
    nodes = {name: node.operator for name, node in found.graph.edited().nodes.items()}
    assert nodes["weigh_rewards"] == WeighRewards({"accuracy_reward": 1.0, "kind": 2.0})
    assert nodes["overlong_penalty"] == OverlongPenalty(1280, 256, weight=0.5) and isinstance(nodes["kind"], Reward)
    assert 'from_trl("mine.rewards:kind")' in found.program().source()
    model, findings = imported(tmp_path, "trl", f"trl rloo {flags} --reward_model_name_or_path org/rm\n")
    assert not refused(model) and not findings.problems
    assert value_of(model.bind["reward_model"]).model == "org/rm"
    none, _ = imported(tmp_path, "trl", f"trl rloo {flags}\n")
    assert refused(none) == ["reward_funcs"]


def test_keys_without_effect_are_taken_with_the_reason(tmp_path: Path) -> None:
    idle = "--vllm_mode server --lora_r 4 --eval_steps 5 --sapo_temperature_neg 2 --ref_model_sync_steps 9"
    flags = "--model_name_or_path m --dataset_name d.jsonl --max_steps 4 --reward_funcs a.b"
    found, _ = imported(tmp_path, "trl", f"trl grpo {flags} {idle}\n")
    assert not refused(found)
    taken = {remark.key: remark.text for remark in found.settings.report(()).taken}
    assert all(taken[flag].startswith("without effect") for flag in idle.replace("--", "").split()[::2])


def test_a_copied_function_scores_as_in_the_script(tmp_path: Path) -> None:
    found, _ = imported(tmp_path, "trl", RLOO_SCRIPT, "rloo.py")
    score = from_trl(_loaded(found)["short"], ground_truth="answer", conversational=False)
    row = {"data_source": "", "ground_truth": 1, "extra_info": {"level": 2, "source": "y"}, "prompt": ()}
    assert [score(solution_str=text, **row)["score"] for text in ("yes", "no")] == [1.0, 0.0]


def test_files_of_yaml_know_their_trainer(tmp_path: Path) -> None:
    base = {"model_name_or_path": "m", "dataset_name": "d.jsonl", "reward_funcs": ["accuracy_reward"], "max_steps": 3}
    for key, value, algorithm in (("num_generations", 4, "grpo"), ("reward_clip_range", [0, 1], "rloo")):
        (tmp_path / "run.yaml").write_text(json.dumps({**base, key: value}))
        found, _ = import_file("trl", Source(tmp_path / "run.yaml"))
        assert found.graph.algorithm == algorithm and not refused(found)


@pytest.mark.parametrize(
    "constant",
    ['"""one\n  two"""', '("one"\n    """two\n three""")', "'a' 'b'", '["x", 1.5]', '{"a": [None, True]}', "-3"],
)
def test_constants_are_copied_with_their_values(constant: str, tmp_path: Path) -> None:
    text = RLOO_SCRIPT.replace('["yes", "indeed"]', constant)
    found, _ = imported(tmp_path, "trl", text, "rloo.py")
    assert not refused(found)
    assert _loaded(found)["GOOD"] == ast.literal_eval(constant)


@pytest.mark.parametrize("text", [GSPO_SCRIPT, RLOO_SCRIPT, AGENT_SCRIPT % "tools=[look]"])
def test_written_files_are_python_within_120_columns(text: str, tmp_path: Path) -> None:
    found, _ = imported(tmp_path, "trl", text.replace("org/", ""), "run.py")
    source = found.program().source().replace(str(tmp_path), "")
    ast.parse(source)
    assert max(map(len, source.splitlines())) <= 120
