"""``flowrl from-verl`` writes, refuses and checks; tests flowrl/app/importing/command.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.importers.scripts import VERL
from tests.support.command_line import Command


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "run.sh").write_text(VERL % ("grpo", "trainer.val_only=True"))
    return tmp_path / "run.sh"


def test_a_file_is_written_that_checks(command: Command, script: Path) -> None:
    refused = command("from-verl", script)
    assert refused.code == 1 and "trainer.val_only=true" in refused.out.partition("cannot be said")[2]
    assert not script.with_suffix(".py").exists()
    done = command("from-verl", script, "--allow", "trainer.val_only")
    assert done.code == 0 and "left out, as --allow says" in done.out
    assert command("from-verl", script, "--allow", "trainer.val_only").code == 2  # run.py exists


@pytest.mark.parametrize("allowed", ["trainer.vall_only", "algorithm.adv_estimator", "data.*"])
def test_what_leaves_nothing_out_is_not_allowed(command: Command, script: Path, allowed: str) -> None:
    """A key that no script has, one that is taken, and keys of which none is refused."""
    wrong = command("from-verl", script, "--allow", "trainer.val_only", "--allow", allowed)
    assert wrong.code == 2 and allowed in wrong.err and not script.with_suffix(".py").exists()
    offered = command("from-verl", script, "--allow", allowed)
    assert offered.code == 2 and "refused are trainer.val_only" in " ".join(offered.err.split())


def test_check_writes_nothing(command: Command, script: Path) -> None:
    assert command("from-verl", script, "--check", "--allow", "trainer.*").code == 0
    script.write_text(VERL % ("grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=24"))
    found = command("from-verl", script, "--check")
    assert found.code == 1 and "FR004" in found.out
    assert not script.with_suffix(".py").exists()


def test_variables(command: Command, script: Path) -> None:
    assert "rollout.n=2" in command("from-verl", script, "--env", "N=2", "--check", "--allow", "*").out
    assert command("from-verl", script, "--env", "N").code == 2


def test_the_folder_of_the_file_is_made(command: Command, script: Path) -> None:
    target = script.parent / "new" / "train.py"
    assert command("from-verl", script, "--allow", "trainer.val_only", "--to", target).code == 0 and target.exists()
    wrong = command("from-verl", script, "--allow", "trainer.val_only", "--to", target / "train.py")
    assert wrong.code == 2 and "cannot be written" in wrong.err
