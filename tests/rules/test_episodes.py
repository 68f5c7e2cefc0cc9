"""Tests of `episodes.py` and `environment_source.py`: rules about episodes.

Each rule finds the environment that breaks it, and accepts similar ones that do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl import columns as c
from flowrl.backends import TorchRollout
from flowrl.core.graphs.after import After
from flowrl.core.operators.operator import Operator
from flowrl.episodes import Answer, Chat, Environment, Reply, Row
from flowrl.graph import Graph
from flowrl.graphs import grpo, ppo
from flowrl.operators import Interact, OverlongPenalty
from tests.rules.findings import fixed, found, the_message
from tests.support.kernel import exact


class Pays(Environment):
    """Gives a reward for the right answer."""

    async def step(self, answer: Answer) -> Reply:
        return Reply("again", reward=1.0 if answer.text == "4" else None, done=answer.turn == 1)


class PaysAtOnce(Environment):
    """Gives a reward for every answer."""

    def step(self, answer: Answer) -> Reply:  # type: ignore[override]
        return Reply("again", 1.0)


class Silent(Environment):
    """Leaves the reward to a function."""

    async def step(self, answer: Answer) -> Reply:
        if answer.turn == 1:
            return Reply(done=True)
        return Reply("again", None)


async def scores(chat: Chat, row: Row) -> float:
    return float((await chat.answer()).text == row.ground_truth)


async def rewards(chat: Chat, row: Row) -> None:
    await chat.answer()
    chat.reward(1.0)


async def asks(chat: Chat, row: Row) -> None:
    await chat.answer()
    await chat.answer("Are you sure?")


async def hands_on(chat: Chat, row: Row) -> None:
    await helped(chat)


async def helped(chat: Chat) -> None:
    chat.reward(float(len((await chat.answer_by_tools()).text)))


def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


def played(environment: Any, pays: bool = True, base: Any = grpo, **settings: Any) -> Graph:
    """A graph of episodes, rewarded by their environment or by a function."""
    settings = {"max_turns": 3, "context": 300, "max_new_tokens": 16, **settings}
    edited: Graph = base(exact).edit(
        replace={"generate": Interact(environment, **settings)}, drop=["reward"] if pays else []
    )
    return edited


class TestEnvironmentRewardsCount:  # FR033
    @pytest.mark.parametrize("environment", [Pays, PaysAtOnce, scores, rewards])
    @pytest.mark.parametrize("base", [grpo, ppo])
    def test_a_reward_function_discards_environment_rewards(self, environment: Any, base: Any) -> None:
        graph = played(environment, pays=False, base=base)
        assert found(graph) == [("FR033", "interact")]
        assert "only those of reward." in the_message(graph, "FR033")
        assert found(fixed(graph)) == found(played(environment, base=base)) == []

    @pytest.mark.parametrize("environment", [Silent, asks, hands_on])
    def test_an_environment_without_certain_rewards(self, environment: Any) -> None:
        assert found(played(environment, pays=False)) == []

    def test_both_may_count(self) -> None:
        graph = played(Pays).edit(insert={"overlong": After("interact", OverlongPenalty(most=40, buffer=8))})
        assert found(graph) == []


class TestEpisodesAreRewarded:  # FR034
    @pytest.mark.parametrize("environment", [Silent, asks])
    def test_no_reward(self, environment: Any) -> None:
        graph = played(environment)
        assert found(graph) == [("FR034", "interact")]
        assert "Reply(..., reward=1.0)" in the_message(graph, "FR034") and "Reward(fn)" in the_message(graph, "FR034")
        assert found(played(environment, pays=False)) == []

    def test_tools_alone_give_no_reward(self) -> None:
        assert found(played(None, tools=[add])) == [("FR034", "interact")]

    def test_rewards_may_come_from_elsewhere(self) -> None:
        class Inherits(Silent):
            async def step(self, answer: Answer) -> Reply:
                return await super().step(answer)

        class Maker(Environment):
            async def step(self, answer: Answer) -> Reply:
                return Reply(**{"done": True})

        for environment in (hands_on, Inherits, Maker):
            assert found(played(environment)) == []


class TestToolsAreCalled:  # FR037
    def test_one_turn(self) -> None:
        graph = played(hands_on, tools=[add], max_turns=1)
        assert found(graph) == [("FR037", "interact")] and found(fixed(graph)) == []
        assert found(played(Pays, max_turns=1)) == []  # a bandit

    def test_an_agent_that_answers_no_call(self) -> None:
        graph = played(scores, tools=[add])
        assert found(graph) == [("FR037", "interact")] and found(fixed(graph)) == []
        assert "chat.answer_by_tools()" in the_message(graph, "FR037")
        for environment in (Pays, hands_on, helped_by_tools):
            assert found(played(environment, tools=[add])) == []


async def helped_by_tools(chat: Chat, row: Row) -> float:
    return float(len((await chat.answer_by_tools()).text))


class Short(TorchRollout):
    """An engine with a limit of tokens."""

    max_model_len: int | None = None


class TestEpisodesFit:  # FR038
    def test_an_answer_as_long_as_the_episode(self) -> None:
        graph = played(Pays, max_new_tokens=300)
        assert found(graph) == [("FR038", "interact")] and found(fixed(graph)) == []
        assert "for the other 2 turns" in the_message(graph, "FR038")
        assert found(played(Pays, max_new_tokens=299)) == found(played(Pays, max_new_tokens=300, max_turns=1)) == []

    @pytest.mark.parametrize(("takes", "fits"), [(299, False), (300, True), (None, True)])
    def test_an_engine_that_takes_less(self, takes: int | None, fits: bool) -> None:
        graph = played(Pays).edit(bind={"rollout": Short("model", max_model_len=takes)})
        assert found(graph) == ([] if fits else [("FR038", "interact")])
        assert fits or found(fixed(graph)) == []
        assert found(played(Pays).edit(bind={"rollout": TorchRollout("model")})) == []


class TestPlacedOnTheMask:  # FR039
    class Blind(Operator):
        """Puts what an answer is worth on the last token that there is."""

        def __call__(self, responses: c.Responses, response_text: c.ResponseText) -> c.TokenLevelScores:
            scores = torch.zeros(responses.shape)
            scores[:, -1] = torch.tensor(np.vectorize(len)(response_text))
            return scores

    class Seeing(Operator):
        """Puts it on the last one that was sampled."""

        def __call__(self, response_mask: c.ResponseMask, response_text: c.ResponseText) -> c.TokenLevelScores: ...

    @pytest.mark.parametrize("graph", [grpo(exact), ppo(exact), played(Silent, pays=False)])
    def test_scores_without_a_mask(self, graph: Graph) -> None:
        blind = graph.edit(replace={"reward": self.Blind()})
        assert found(blind) == [("FR039", "blind")]
        assert "`response_mask: ResponseMask`" in the_message(blind, "FR039")
        assert found(graph.edit(replace={"reward": self.Seeing()})) == []


class TestReferences:
    """An environment that a graph names by its file is read, and never run."""

    def test_environments_of_a_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "environments.py").write_text(
            "from flowrl.episodes import Environment, Reply\nfrom others import Other\n"
            "class Unpaid(Environment):\n    async def step(self, answer):\n        return Reply()\n"
            "class Derived(Other):\n    async def step(self, answer):\n        return Reply()\n"
            "async def agent(chat, row):\n    return 1.0\n"
        )
        monkeypatch.chdir(tmp_path)
        assert found(played("environments.py:Unpaid")) == [("FR034", "interact")]
        assert found(played("environments.py:Derived")) == found(played("environments.py:agent")) == []
        assert found(played("environments.py:agent", pays=False)) == [("FR033", "interact")]

    def test_where_there_is_no_source_nothing_is_found(self) -> None:
        made: dict[str, Any] = {}
        exec("async def unseen(chat, row):\n    return 1.0", made)
        assert found(played(made["unseen"])) == found(played(made["unseen"], pays=False)) == []
