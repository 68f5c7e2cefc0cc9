"""Small scripts of other frameworks, as their users write them."""

from __future__ import annotations

from pathlib import Path

from flowrl.importers.checking import Findings, check
from flowrl.importers.importing import Source, import_file
from flowrl.importers.plan import Imported

VERL = """
N=${N:-4}
ARGS=(algorithm.adv_estimator=%s data.train_batch_size=64 data.train_files=~/gsm8k/train.parquet)
python3 -m verl.trainer.main_ppo "${ARGS[@]}" actor_rollout_ref.model.path=Qwen/Qwen3-0.6B \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.rollout.n=$N trainer.total_epochs=2 \\
    actor_rollout_ref.rollout.name=vllm trainer.n_gpus_per_node=4 %s
"""


def imported(folder: Path, framework: str, text: str, name: str = "run.sh") -> tuple[Imported, Findings]:
    """A file of another framework as a training of flowrl, and what its check finds."""
    (folder / name).write_text(text)
    found, _ = import_file(framework, Source(folder / name))
    return found, check(found)


def verl(folder: Path, estimator: str = "grpo", *more: str) -> tuple[Imported, Findings]:
    """A script of verl with further overrides."""
    return imported(folder, "verl", VERL % (estimator, " ".join(more)))


def refused(found: Imported) -> list[str]:
    """The keys that cannot be said."""
    return [remark.key for remark in found.settings.report(()).refused]
