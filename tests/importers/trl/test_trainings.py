"""Command lines, scripts and YAML of SFT and DPO; tests trainings.py, supervised.py, models.py and commands.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowrl import Colocate, When
from flowrl.backends import AdamW, LoRA
from flowrl.importers.importing import Source, import_file
from flowrl.importers.writer import value_of
from flowrl.operators import DPO, IPO, SyncReference
from flowrl.schedules import Constant, Cosine, Linear, Schedule
from tests.importers.scripts import imported, refused
from tests.support.errors import raises

FLAGS = (
    "--model_name_or_path Qwen/Qwen3-0.6B --dataset_name pairs.jsonl --max_steps 100 --beta 0.2 --learning_rate 5e-7"
)
BOTH = "--model_name_or_path Qwen/Qwen3-0.6B --dataset_name pairs.jsonl --max_steps 100"
PYTHON = '''"""
python dpo.py \\
    {flags}
"""
import shutil
from datasets import load_dataset
from trl import DPOConfig, DPOTrainer, ModelConfig, ScriptArguments, TrlParser
shutil.rmtree("kept")
script, args, model = TrlParser((ScriptArguments, DPOConfig, ModelConfig)).parse_args_and_config()
data = load_dataset(script.dataset_name)
trainer = DPOTrainer(model=model.model_name_or_path, args=args, train_dataset=data[script.dataset_train_split])
'''
YAML = """
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: pairs.jsonl
max_steps: 100
beta: 0.2
learning_rate: 5e-7
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [("run.sh", f"trl dpo {FLAGS}\n"), ("run.py", PYTHON.format(flags=FLAGS)), ("run.yaml", YAML)],
    ids=["shell", "python", "yaml"],
)
def test_dpo(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    found, findings = imported(tmp_path, "trl", text, name)
    assert not refused(found) and not findings.problems and (tmp_path / "kept").exists()
    assert found.graph.edited().nodes["update_actor"].operator.loss == DPO(0.2)
    actor = value_of(found.bind["actor"])
    assert actor.optimizer == AdamW(5e-7, weight_decay=0.0)  # the default of transformers
    assert actor.schedule == Linear(1.0, 0.0, steps=100)


def test_ipo_averages_over_the_tokens_of_a_response(tmp_path: Path) -> None:
    found, _ = imported(tmp_path, "trl", f"trl dpo {FLAGS} --loss_type ipo --beta 0.3\n")
    assert not refused(found)
    assert found.graph.edited().nodes["update_actor"].operator.loss == IPO(0.3, per_token=True)


def test_other_losses_and_trainers_are_refused(tmp_path: Path) -> None:
    found, _ = imported(tmp_path, "trl", f"trl dpo {FLAGS} --loss_type hinge --f_divergence_type js_divergence\n")
    assert refused(found) == ["loss_type", "f_divergence_type"]
    with raises("import.no-training"):
        imported(tmp_path, "trl", "trainer = KTOTrainer()\n", "run.py")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--lr_scheduler_type cosine --warmup_steps 0.1", Cosine(1.0, 0.0, steps=100, warmup=10)),
        ("--lr_scheduler_type constant_with_warmup --warmup_steps 5", Constant(1.0, warmup=5)),
        ("--lr_scheduler_type constant --warmup_steps 5", Constant(1.0)),
        (
            "--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{\"min_lr\": 1e-7}'",
            Cosine(1.0, 0.2, steps=100),
        ),
    ],
)
def test_schedules(flags: str, expected: Schedule, tmp_path: Path) -> None:
    found, _ = imported(tmp_path, "trl", f"trl dpo {FLAGS} {flags}\n")
    assert not refused(found)
    assert value_of(found.bind["actor"]).schedule == expected
    odd, _ = imported(tmp_path, "trl", f"trl dpo {FLAGS} --lr_scheduler_type inverse_sqrt\n")
    assert refused(odd) == ["lr_scheduler_type"]


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [("", "bfloat16"), ("--bf16 False", "float32"), ("--bf16 False --dtype bfloat16", "bfloat16")],
)
def test_precision(flags: str, dtype: str, tmp_path: Path) -> None:
    found, _ = imported(tmp_path, "trl", f"trl dpo {FLAGS} {flags}\n")
    assert value_of(found.bind["actor"]).dtype == value_of(found.bind["ref"]).dtype == dtype
    half, _ = imported(tmp_path, "trl", f"trl dpo {FLAGS} --fp16\n")
    assert refused(half) == ["fp16"]


def test_processes_of_the_launcher(tmp_path: Path) -> None:
    found, findings = imported(tmp_path, "trl", f"accelerate launch --num_processes 2 sft.py {BOTH}\n")
    assert not refused(found) and not findings.problems
    assert (value_of(found.bind["actor"]).ranks, found.training["prompts"]) == (2, 8 * 2)
    for launcher in ("accelerate launch sft.py", "trl sft"):
        several, _ = imported(tmp_path, "trl", f"{launcher} {BOTH} --num_processes 4 --num_machines 2\n")
        assert not refused(several)
        assert value_of(several.bind["place"]) == Colocate(gpus=4, per_machine=2, address="auto")
    unsaid, _ = imported(tmp_path, "trl", f"torchrun sft.py {BOTH}\n")
    assert "num_processes" in [remark.key for remark in unsaid.settings.report(()).differing]
    text = PYTHON.format(flags=FLAGS)
    script = text.replace("python dpo.py", "accelerate launch --num_processes 4 dpo.py")
    assert imported(tmp_path, "trl", script, "run.py")[0].training["prompts"] == 8 * 4
    unsaid, _ = imported(tmp_path, "trl", text.replace("python dpo.py", "accelerate launch dpo.py"), "run.py")
    assert "num_processes" in unsaid.settings.differs
    (tmp_path / "run.py").write_text(text)
    own, _ = import_file("trl", Source(tmp_path / "run.py", {}, [*FLAGS.split(), "--num_processes", "2"]))
    assert not refused(own) and own.training["prompts"] == 8 * 2


def test_messages_are_trained_as_with_assistant_only_loss(tmp_path: Path) -> None:
    found, _ = imported(tmp_path, "trl", f"trl sft {BOTH}\n")
    assert "assistant_only_loss" in [remark.key for remark in found.settings.report(()).differing]
    same, _ = imported(tmp_path, "trl", f"trl sft {BOTH} --assistant_only_loss\n")
    assert not refused(same) and "assistant_only_loss" not in same.settings.differs


def test_an_adapter_has_the_layers_of_peft(tmp_path: Path) -> None:
    found, _ = imported(tmp_path, "trl", f'trl dpo {FLAGS} --use_peft --lora_target_modules "q_proj", "v_proj"\n')
    assert value_of(found.bind["actor"]).lora == LoRA(16, 32.0, ("q_proj", "v_proj"))
    differing = [remark.key for remark in found.settings.report(()).differing]
    assert "lora_dropout" in differing  # 0.05 by default


def test_flags_hold_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "dpo.yaml").write_text(YAML)
    found, _ = import_file("trl", Source(tmp_path / "dpo.yaml", {}, ["--max-steps", "7"]))
    assert found.training["steps"] == 7
    found, _ = imported(tmp_path, "trl", f"trl dpo --config {tmp_path / 'dpo.yaml'} --beta 0.3\n")
    assert found.training["steps"] == 100 and found.graph.settings["beta"] == 0.3


def test_a_schedule_without_a_number_of_steps_lasts_as_long_as_the_run(tmp_path: Path) -> None:
    flags = f"{FLAGS.replace('--max_steps 100', '')} --lr_scheduler_type cosine --warmup_steps 0.1"
    found, _ = imported(tmp_path, "trl", f"trl dpo {flags}\n")
    assert value_of(found.bind["actor"]).schedule == Cosine(1.0, 0.0, warmup=0.1)


def test_modules_to_save_and_the_loss_of_routers(tmp_path: Path) -> None:
    text = f"trl dpo {FLAGS} --use_peft --lora_modules_to_save lm_head embed_tokens --router_aux_loss_coef 0.01\n"
    found, findings = imported(tmp_path, "trl", text)
    assert not refused(found) and not findings.problems
    actor = value_of(found.bind["actor"])
    assert actor.lora.modules_to_save == ("lm_head", "embed_tokens") and actor.router_aux_loss_coef == 0.01


MOVING = "--beta 0.1 --sync_ref_model"
GRPO = "trl grpo --model_name_or_path m --dataset_name d.jsonl --reward_funcs accuracy_reward"


@pytest.mark.parametrize(
    ("text", "when"),
    [
        (f"trl dpo {FLAGS} --sync_ref_model True --ref_model_sync_steps 1", When()),
        (f"{GRPO} {MOVING} --ref_model_sync_steps 8", When(8, 7)),
        (f"{GRPO} {MOVING} --ref_model_sync_steps 8 --num_iterations 4", When(2, 1)),  # of 4 optimizer steps each
    ],
)
def test_the_reference_moves_after_as_many_optimizer_steps(text: str, when: When, tmp_path: Path) -> None:
    found, findings = imported(tmp_path, "trl", f"{text} --ref_model_mixup_alpha 0.3\n")
    assert not refused(found) and not findings.problems
    names: dict[str, Any] = {}
    exec(compile(found.program(reward=False).source(), "<imported>", "exec"), names)
    for graph in (found.graph.edited(), names["graph"]):
        node = graph.nodes["sync_reference"]
        assert node.operator == SyncReference(alpha=0.3) and node.when == when


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ("--num_iterations 3", "ref_model_sync_steps"),
        ("--use_peft True", "sync_ref_model"),
        ("--beta 0", "sync_ref_model"),
    ],
)
def test_a_reference_that_cannot_move_so_is_refused(flags: str, key: str, tmp_path: Path) -> None:
    assert key in refused(imported(tmp_path, "trl", f"{GRPO} {MOVING} {flags}\n")[0])
