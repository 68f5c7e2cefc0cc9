"""`Sampled`, and training of a second policy on its rows; also `flowrl.operators.engines.episode_rows`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import PromptData, Role, Training
from flowrl.backends import TorchRollout, TorchScorer
from flowrl.data.metrics import Metrics
from flowrl.data.segments import begins
from flowrl.episodes import Chat, Row
from flowrl.operators import Interact, Sampled, Sampler
from flowrl.operators.engines.episode_rows import episode_batch
from flowrl.records import EpisodeBatch
from flowrl.run.engine.build import EngineBuilder
from tests.operators.engines import two_policies
from tests.operators.engines.test_interact import KEY, prompts_of
from tests.operators.engines.two_policies import SETTINGS, both, talk
from tests.run.training.interrupted import Stop, Stopper, without_times
from tests.support.errors import raises
from tests.support.models import tiny_folder
from tests.support.runs import lines

CONTEXT = EngineBuilder({}, seed=0)
OTHER = Sampler(temperature=0.7, max_new_tokens=5)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("other"), "qwen2", seed=3)


@pytest.fixture(scope="module")
def engine(tiny: str) -> Any:
    return TorchRollout(tiny, frozen=True, device="cpu").build(CONTEXT)


@pytest.fixture(scope="module")
def other(other_model: str) -> Any:
    return TorchRollout(other_model, frozen=True, device="cpu").build(CONTEXT)


def sides(engine: Any, other: Any, agent: Any = talk, count: int = 4) -> tuple[EpisodeBatch, EpisodeBatch]:
    """The rows of the policy, and those of the other engine."""
    settings = {**SETTINGS, "others": {"user": other}, "others_sampling": {"user": OTHER}}
    rows = Interact(agent, rollout=engine, **settings)(prompts_of(engine.tokenizer, count), key=KEY, metrics=Metrics())
    return rows, Sampled("user", other)(rows.asked)


def test_its_rows_are_what_the_engine_read_and_sampled(engine: Any, other: Any, other_model: str) -> None:
    """Log-probs equal those of its own model, at its own temperature, over the row."""
    rows, theirs = sides(engine, other)
    assert (theirs.turns == 2).all() and (theirs.temperature == torch.tensor(0.7)).all()
    assert (theirs.response_mask.sum(1) <= 10).all() and theirs.response_mask.any(1).all()
    expected = TorchScorer(other_model, device="cpu").build(CONTEXT).log_probs(theirs)
    assert (theirs.rollout_log_probs - expected).abs().max() < 1e-4
    for row in range(4):
        said = [message for message in rows.episode[row]["others"]["user"]["messages"] if "sampled" in message]
        ids = theirs.responses[row][theirs.response_mask[row]].tolist()
        assert sum(message["sampled"]["tokens"] for message in said) == len(ids)
        assert "".join(message["content"] for message in said) == other.tokenizer.shown(ids)
    assert not any(theirs.asked) and theirs.prompts.shape[0] == rows.prompts.shape[0]


async def branches(chat: Chat, row: Row) -> float:
    await chat.answer()
    for word in ("x", "yy"):
        await chat.ask("user", word)
    return 0.0


def test_conversations_are_segments_of_its_row(engine: Any, other: Any, other_model: str) -> None:
    _, theirs = sides(engine, other, branches)
    assert begins(theirs.attention_mask, theirs.position_ids).sum(1).tolist() == [1] * 4
    expected = TorchScorer(other_model, device="cpu").build(CONTEXT).log_probs(theirs)
    assert (theirs.rollout_log_probs - expected).abs().max() < 1e-4


async def every_other(chat: Chat, row: Row) -> float:
    await chat.answer()
    if int(row.row_id) % 2:
        await chat.ask("user", "x")
    return 0.0


def test_an_episode_that_did_not_ask_is_a_row_without_a_response(engine: Any, other: Any) -> None:
    _, theirs = sides(engine, other, every_other)
    assert theirs.turns.tolist() == [0, 1, 0, 1] and theirs.response_mask.any(1).tolist() == [False, True] * 2
    assert theirs.policy_version.tolist() == [-2] * 4


def test_an_engine_samples_the_same_bits_for_a_row_in_any_batch(engine: Any, other: Any) -> None:
    """Also if it is the engine of the policy itself, which then shares its batches."""
    for asked in (other, engine):
        _, whole = sides(engine, asked)
        again, one = sides(engine, asked)[1], sides(engine, asked, count=1)[1]
        assert torch.equal(whole.responses, again.responses)
        assert torch.equal(whole.rollout_log_probs, again.rollout_log_probs)
        assert one.response_text[0] == whole.response_text[0]


def test_rows_of_an_unknown_engine_are_refused(engine: Any, other: Any) -> None:
    rows, _ = sides(engine, other)
    with raises("episode.unknown-engine", name="usr", known=("user",)):
        Sampled("usr", other)(rows.asked)
    with raises("episode.unknown-engine", name="usr", known=("user",)):
        Interact(talk, others={"user": other}, others_sampling={"usr": OTHER})
    with raises("engine.no-receipt", engine="user"):
        sides(engine, TorchRollout(other.tokenizer.folder, device="cpu").build(CONTEXT), every_other, count=1)
    assert episode_batch([], [], [], engine.tokenizer, torch.zeros(0), torch.zeros(0)).prompts.shape[0] == 0


def test_two_policies_learn_from_their_own_sides(
    tiny: str, other_model: str, prompts_file: str, tmp_path: Path
) -> None:
    """On-policy, and with the same bits after an interruption."""
    job, shared = two_policies.job(tiny, other_model), {"steps": 3, "prompts": 4, "checkpoint_every": 1}

    def training(name: str, **settings: Any) -> Training:
        return Training(job, PromptData(prompts_file), folder=str(tmp_path / name), **shared, **settings)

    whole = training("whole", rollouts_every=1).run().metrics
    assert [one["sync_user/sync/version"] for one in whole] == [1, 2, 3]
    assert all(one["others/user/answers"] == 2 and one["update_user/actor/grad_norm"] > 0 for one in whole)
    said = lines(tmp_path / "whole" / "rollouts.jsonl")[-1]["episode"]["others"]["user"]["messages"]
    assert [message["sampled"]["version"] for message in said if "sampled" in message] == [2, 2]
    with pytest.raises(Stop):
        training("cut").run([Stopper(2, "update_user")])
    training("cut", resume=True).run()
    cut, uncut = (
        [
            {k: v for k, v in one.items() if k != "episodes/waiting"}
            for one in without_times(tmp_path / name / "metrics.jsonl")
        ]
        for name in ("cut", "whole")
    )
    assert cut == uncut


def test_rows_of_a_policy_that_nothing_syncs_are_refused(
    tiny: str, other_model: str, prompts_file: str, tmp_path: Path
) -> None:
    """FR002 before the run; without it, the update refuses the rows by their version."""
    graph = both()
    alone = graph.edit(drop=["sync_user"])
    assert {finding.rule for finding in alone.check()} == {"FR002"}
    assert graph.check() == []
    stale = TorchRollout(other_model, frozen=True, device="cpu")
    job = two_policies.job(tiny, other_model).edit(drop=["sync_user"], bind={"user": stale}, allow={"FR002": "test"})
    with raises("update.frozen-rows"):
        Training(job, PromptData(prompts_file), steps=1, prompts=4, folder=str(tmp_path / "run")).run()


def test_its_role_is_bound_planned_and_drawn(tiny: str, other_model: str) -> None:
    graph = both()
    assert [use.field for use in graph["interact"].uses] == ["rollout", "others.user"]
    assert {(use.node, use.field) for use in graph.roles()["user"]} == {
        ("interact", "others.user"),
        ("sampled", "role"),
        ("sync_user", "rollout"),
    }
    assert ("sync_user", "interact") in graph.back_edges and ("sync_user", "sampled") in graph.back_edges
    job = two_policies.job(tiny, other_model)
    assert "interact         rollout with user" in job.plan() and "<br/>rollout, user<br/>" in graph.mermaid()
    with raises("job.unbound-role", role="user"):
        both().bind(**{role: job.graph.bindings[role] for role in ("actor", "rollout", "user_actor")}).refuse_unready()
    other = graph.edit(set={"interact.others.user": Role("guest"), "sampled.role": Role("guest")})
    assert other["interact"].reads == ["rollout", "guest"]
