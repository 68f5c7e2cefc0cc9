"""The example "cartpole.py", with "cartpole_policy.py": its data, its updates, and that it learns.

That five seeds come to 475 is in docs/how-to/classic.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flowrl import Graph, Key
from flowrl.app.cli import main
from flowrl.backends.torch.score.rows import take
from flowrl.graphs import grpo
from flowrl.operators import Value
from flowrl.references import load_object
from tests import ROOT
from tests.support.errors import raises
from tests.support.runs import TIMES

pytest.importorskip("gymnasium", reason="needs pip install 'flowrl[gymnasium]'")

FILE = ROOT / "examples" / "cartpole.py"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    before = sys.path[:]
    yield sys.modules[load_object(f"{FILE}:training").__module__]
    sys.path[:] = before


def training(example: Any, folder: Path, steps: int, graph: Any = None, **settings: Any) -> Any:
    """A small run: 8 episodes a step, and 8 held-out ones."""
    job = (graph or example.graph).bind(actor=example.Policy(), critic=example.Values(), rollout=example.Acting())
    held_out = example.Validation(
        example.Seeds("held out", number=8), every=9, changes={"play.greedy": True}, until="play", batch=3
    )
    given = {"steps": steps, "prompts": 8, "validation": held_out, "folder": str(folder)} | settings
    return example.Training(job, example.Seeds(), **given)


def sampled(example: Any, rows: int = 8) -> tuple[Any, Any]:
    """A batch of episodes that the untrained policy plays, and the engines."""
    job = example.graph.bind(actor=example.Policy(), critic=example.Values(), rollout=example.Acting())
    seeds = example.SeedBatch(**example.Seeds().load(None, 0).next(rows).columns)
    with job.eager() as session:
        return example.Play()(seeds), session.engines


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_trainer_has_bit_equal_log_probs_of_sampled_actions(example: Any, rows: int) -> None:
    """The ratio is exactly 1 on the first mini-batch, whichever rows it has: the log-probs are the same bits."""
    played, engines = sampled(example, rows)
    assert torch.equal(engines["actor"].log_probs(played), played.rollout_log_probs)
    for some in torch.randperm(rows).split(2):
        part = take(played, some)
        assert torch.equal(engines["actor"].outputs(part)[0].detach(), part.rollout_log_probs)


def test_the_first_update_starts_at_ratio_1(example: Any, tmp_path: Path) -> None:
    once = example.cartpole(ppo_epochs=1)  # one mini-batch, of all rows
    first, several = (
        training(example, tmp_path / g.fingerprint(), 1, g).run().metrics[0] for g in (once, example.graph)
    )
    assert first["actor/approx_kl"] == 0.0 and first["actor/pg_clipfrac"] == 0.0
    assert several["actor/approx_kl"] != 0.0  # in 4 epochs the policy has moved


def test_an_episode_depends_on_its_row_alone(example: Any) -> None:
    together, engines = sampled(example)
    seeds = example.SeedBatch(**example.Seeds().load(None, 0).next(8).columns)
    play, key = example.Play(rollout=engines["rollout"]), Key.of(3)
    every = play(seeds, key=key)
    some = play(example.SeedBatch(seeds.seed[2:5], seeds.row_id[2:5]), key=key)
    width = some.response_mask.shape[1]
    assert torch.equal(some.responses * some.response_mask, (every.responses * every.response_mask)[2:5, :width])
    assert torch.equal(some.last_seen, every.last_seen[2:5])
    assert not torch.equal(every.responses[:, :8], together.responses[:, :8])  # another key
    lengths = every.response_mask.sum(-1)
    assert torch.equal(every.token_level_scores.sum(-1), lengths.float())  # 1 a step
    assert not every.cut_off.any() and lengths.max() < 200  # the untrained one lets it fall


def test_only_truncated_episodes_bootstrap_the_value_of_their_last_state(example: Any) -> None:
    class Critic:
        version = 0

        def of_states(self, observations: torch.Tensor) -> torch.Tensor:
            return observations.sum(-1)

        def values(self, batch: Any) -> Any: ...

        def update(self, batch: Any, mini_batches: Any, objective: Any) -> Any: ...

    mask = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    seen = torch.tensor([[10.0, 0.0], [20.0, 0.0], [30.0, 10.0]])
    cut = torch.tensor([False, True, True])
    rewards = example.Bootstrap(0.5, critic=Critic())(mask.float(), mask, cut, seen)
    assert rewards.tolist() == [[1, 1, 1], [1, 1 + 10, 0], [1 + 20, 0, 0]]


def test_truncation_and_termination_are_distinguished(example: Any) -> None:
    """A policy that keeps the pole up is cut off at 500 steps."""

    class Balances:
        receipt = type("Receipt", (), {"version": 0})

        def sync(self, source: Any) -> Any: ...

        def act(self, observations: torch.Tensor, draws: Any) -> Any:
            lean = observations @ torch.tensor([0.05, 0.3, 3.0, 1.0])
            return (lean > 0).long(), torch.zeros(len(lean))

    seeds = example.SeedBatch(**example.Seeds().load(None, 0).next(3).columns)
    played = example.Play(greedy=True, rollout=Balances())(seeds, key=Key.of(0))
    assert played.response_mask.sum(-1).tolist() == [500] * 3 and played.cut_off.all()


def test_each_action_is_the_inverse_cdf_of_its_random_number(example: Any) -> None:
    """One random number per step and row."""
    played, engines = sampled(example)
    key = Key.of(0).derive("step", 0, "play")
    draws = key.uniforms([str(i) for i in range(8)], 500)[:, : played.response_mask.shape[1]]
    network = engines["actor"].network
    left = torch.softmax(network(played.observations.double()), -1)[..., 0].detach()
    assert torch.equal(played.responses[played.response_mask], (draws >= left).long()[played.response_mask])
    assert 0.3 < played.responses[played.response_mask].float().mean() < 0.7


class Falls:
    """An environment that ends in its third step, at which its limit comes as well."""

    spec = SimpleNamespace(max_episode_steps=3)

    def reset(self, seed: int) -> Any:
        self.steps = 0
        return np.full(4, seed % 2, np.float32), {}

    def step(self, action: int) -> Any:
        self.steps += 1
        return np.full(4, self.steps, np.float32), 0.5, self.steps == 3, self.steps == 3, {}


def test_termination_in_the_last_step_counts_as_termination(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example.gymnasium, "make", lambda name: Falls())
    seeds = example.SeedBatch(torch.tensor([2, 3]), np.array(["a", "b"], dtype=object))
    rollout = example.Acting().build(SimpleNamespace(seed=0))
    rollout.receipt = SimpleNamespace(version=4)
    played = example.Play(rollout=rollout)(seeds, key=Key.of(0))
    assert not played.cut_off.any() and played.policy_version.tolist() == [4, 4]
    assert played.observations[:, :, 0].tolist() == [[0, 1, 2], [1, 1, 2]]  # what was seen before each step
    assert played.last_seen[:, 0].tolist() == [3, 3]
    assert played.token_level_scores.tolist() == [[0.5] * 3] * 2


def test_cartpole_learns_and_resumes_bit_equal(example: Any, tmp_path: Path) -> None:
    straight = training(example, tmp_path / "straight", 4).run()
    before, after = (line["val/reward/mean"] for line in straight.validations)
    assert after > 3 * before
    training(example, tmp_path / "killed", 2, checkpoint_every=1).run()
    resumed = training(example, tmp_path / "killed", 4, checkpoint_every=1, resume=True).run()
    for one, other in zip(straight.metrics, resumed.metrics, strict=True):
        same = [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in (one, other)]
        assert same[0] == same[1]
    assert (tmp_path / "straight" / "actor" / "policy.safetensors").is_file()


def test_the_graph_passes_every_rule_and_can_be_saved(
    example: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.graph.check() == []
    assert Graph.from_dict(example.graph.to_dict()).fingerprint() == example.graph.fingerprint()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["check", f"{FILE}:training"])
    assert not ended.value.code and "all roles are bound and no rule is violated" in capsys.readouterr().out


def test_a_graph_over_tokens_refuses_this_rollout(example: Any) -> None:
    with raises("backend.missing-protocol", role="rollout", backend="Acting", expected="Rollout"):
        grpo("tests.support.kernel:exact").bind(rollout=example.Acting())


def test_a_custom_record_is_a_parameter_of_value(example: Any) -> None:
    edited = example.graph.edit(set={"value.reads": example.Episodes})
    assert edited["value"].operator == Value(reads=example.Episodes)
    assert "~ value.reads" in str(example.graph.diff(edited))
