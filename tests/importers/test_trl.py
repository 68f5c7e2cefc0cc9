"""Command lines, scripts and YAML files of TRL become trainings."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.backends import AdamW
from flowrl.importers.writer import value_of
from flowrl.operators import DPO
from flowrl.schedules import Linear
from tests.importers.scripts import imported, refused
from tests.support.errors import raises

FLAGS = (
    "--model_name_or_path Qwen/Qwen3-0.6B --dataset_name pairs.jsonl --max_steps 100 --beta 0.2 --learning_rate 5e-7"
)
PYTHON = '''"""
python dpo.py \\
    {flags}
"""
import shutil
shutil.rmtree("kept")
trainer = DPOTrainer(model=args.model_name_or_path, args=args)
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


def test_modules_to_save_and_the_loss_of_routers(tmp_path: Path) -> None:
    text = f"trl dpo {FLAGS} --use_peft --lora_modules_to_save lm_head embed_tokens --router_aux_loss_coef 0.01\n"
    found, findings = imported(tmp_path, "trl", text)
    assert not refused(found) and not findings.problems
    actor = value_of(found.bind["actor"])
    assert actor.lora.modules_to_save == ("lm_head", "embed_tokens") and actor.router_aux_loss_coef == 0.01


def test_other_losses_and_trainers_are_refused(tmp_path: Path) -> None:
    found, _ = imported(tmp_path, "trl", f"trl dpo {FLAGS} --loss_type ipo --f_divergence_type js_divergence\n")
    assert refused(found) == ["loss_type", "f_divergence_type"]
    with raises("import.no-training"):
        imported(tmp_path, "trl", "trainer = KTOTrainer()\n", "run.py")


def test_a_schedule_without_a_number_of_steps_is_shown(tmp_path: Path) -> None:
    found, _ = imported(tmp_path, "trl", f"trl dpo {FLAGS.replace('--max_steps 100', '')}\n")
    assert "lr_scheduler_type" in [remark.key for remark in found.settings.report(()).differing]
