"""Replays of nodes that read weights, from a checkpoint of the run; `weights.py` and `replay.py`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import flowrl
from flowrl import INJECTED, After, Metrics, Operator, Reads, Role
from flowrl.backends import TorchRollout
from flowrl.graph import Graph
from flowrl.graphs import ppo
from flowrl.operators import RolloutCorrection
from flowrl.protocols.backend import Backend
from flowrl.protocols.protocols import Scorer
from flowrl.records import Sequences, Updated
from tests.look.recorded import data_of
from tests.support.command_line import Command, is_paragraph
from tests.support.errors import raises
from tests.support.jobs import bind_tiny
from tests.support.rewards import digits
from tests.support.runs import train

pytestmark = pytest.mark.runs

OF_WEIGHTS = {"old_log_prob", "ref_log_prob", "value"}


def recorded(graph: Graph, model: str, folder: Path, **backends: Backend) -> Path:
    """A run of 3 steps with a checkpoint after each."""
    job = bind_tiny(graph, model, **backends)
    train(job, data_of("ppo", folder).path, folder / "run", checkpoint_every=1, max_checkpoints=3)
    return folder / "run"


def graph(lag: int = 0) -> Graph:
    return ppo(digits, n=2, max_new_tokens=6).edit(lag=lag)


@pytest.fixture(scope="module")
def folder(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(graph(), tiny, tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize("step", [1, 2, 3])
def test_log_probs_and_values_have_the_bits_of_the_run(folder: Path, step: int) -> None:
    run = flowrl.open(folder, imports=True)
    found = run.replay(step, from_checkpoint=True)
    assert found.nodes.keys() >= OF_WEIGHTS and found.same, str(found)
    assert all(found.nodes[name].compared for name in OF_WEIGHTS)
    assert found.lacking.keys() == {"batch", "generate", "update_actor", "update_critic", "sync"}
    assert "'actor'" in found.lacking["update_actor"] and "'rollout'" in found.lacking["generate"]
    assert run.replay(step).lacking.keys() >= OF_WEIGHTS
    # the reference is the model that the actor started from: only in step 1 have both the same weights
    old, ref = run.column(f"{step}/old_log_prob.old_log_probs"), run.column(f"{step}/ref_log_prob.ref_log_prob")
    assert isinstance(old, torch.Tensor) and isinstance(ref, torch.Tensor)
    assert torch.equal(old, ref) == (step == 1)


def test_without_the_checkpoint_the_steps_that_have_one_are_named(folder: Path, tmp_path: Path) -> None:
    run = shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step-000001")
    opened = flowrl.open(run)
    with raises("look.no-checkpoint", path=str(run), step=2, known=(1, 3)):
        opened.replay(2, from_checkpoint=True)
    assert opened.replay("2/ref_log_prob", from_checkpoint=True).same  # it is not trained
    assert opened.replay("3/value", from_checkpoint=True).same
    next((run / "checkpoints" / "step-000002" / "critic").glob("*.safetensors")).write_bytes(b"")
    with raises("checkpoint.damaged"):
        opened.replay("3/value", from_checkpoint=True)
    shutil.rmtree(run / "checkpoints")
    assert opened.replay("1/value", from_checkpoint=True).same
    with raises("look.not-replayable", node="update_actor"):
        opened.replay("3/update_actor", from_checkpoint=True)


class Trained(Operator):
    """Report log-probs after the update."""

    actor: Reads[Scorer] = Role("actor")

    def __call__(self, updated: Updated, rollout: Sequences, metrics: Metrics = INJECTED) -> None:
        metrics.max("log_prob/max", self.actor.log_probs(rollout).max())


def test_weights_that_are_not_those_of_the_checkpoint_are_refused(tiny: str, tmp_path: Path) -> None:
    made = graph().edit(insert={"trained": After("update_actor", Trained())})
    run = flowrl.open(recorded(made, tiny, tmp_path))
    with raises("look.not-replayable", missing="the weights of 'actor' as they were within the step"):
        run.replay("2/trained", from_checkpoint=True)


def test_with_a_lag_only_what_is_not_trained_is_replayed(tiny: str, tmp_path: Path) -> None:
    made = graph(lag=1).edit(insert={"correction": After("whiten", RolloutCorrection())})
    run = flowrl.open(recorded(made, tiny, tmp_path, rollout=TorchRollout(tiny)))
    found = run.replay(3, from_checkpoint=True)
    assert found.same and "ref_log_prob" in found.nodes and "lag" in found.lacking["old_log_prob"]


def test_the_command(command: Command, folder: Path) -> None:
    result = command("replay", folder, "--step=2", "--node=old_log_prob", "--from-checkpoint")
    assert result.code == 0 and "old_log_prob  same bits" in result.out
    refused = command("replay", folder, "--from-checkpoint", "--set=gae.lam=0.5")
    assert refused.code == 2 and is_paragraph(refused) and "--from-checkpoint" in refused.err
