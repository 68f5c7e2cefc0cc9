"""Rules about episodes: each fires on an environment that breaks it, and on none of its neighbours."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from time import sleep as rest
from typing import Any, ClassVar

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
from flowrl.rules.environment_source import EnvironmentSource, blocks, changed_by_all
from tests.rules.findings import found, mended, the_message
from tests.support.kernel import exact


class Pays(Environment):
    """Pays for what is right."""

    async def step(self, answer: Answer) -> Reply:
        return Reply("again", reward=1.0 if answer.text == "4" else None, done=answer.turn == 1)


class PaysAtOnce(Environment):
    """Pays whatever is said."""

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


class TestPaidIsHeard:  # FR033
    @pytest.mark.parametrize("environment", [Pays, PaysAtOnce, scores, rewards])
    @pytest.mark.parametrize("base", [grpo, ppo])
    def test_a_reward_function_in_the_place_of_a_environment_that_pays(self, environment: Any, base: Any) -> None:
        graph = played(environment, pays=False, base=base)
        assert found(graph) == [("FR033", "interact")]
        assert "those of reward alone" in the_message(graph, "FR033")
        assert found(mended(graph)) == found(played(environment, base=base)) == []

    @pytest.mark.parametrize("environment", [Silent, asks, hands_on])
    def test_a_environment_that_does_not_plainly_pay(self, environment: Any) -> None:
        assert found(played(environment, pays=False)) == []

    def test_both_may_count(self) -> None:
        graph = played(Pays).edit(insert={"overlong": After("interact", OverlongPenalty(most=40, buffer=8))})
        assert found(graph) == []


class TestSomebodyPays:  # FR034
    @pytest.mark.parametrize("environment", [Silent, asks])
    def test_nobody(self, environment: Any) -> None:
        graph = played(environment)
        assert found(graph) == [("FR034", "interact")]
        assert "Reply(..., reward=1.0)" in the_message(graph, "FR034") and "Reward(fn)" in the_message(graph, "FR034")
        assert found(played(environment, pays=False)) == []

    def test_tools_alone_pay_nothing(self) -> None:
        assert found(played(None, tools=[add])) == [("FR034", "interact")]

    def test_what_may_pay_somewhere_else(self) -> None:
        class Inherits(Silent):
            async def step(self, answer: Answer) -> Reply:
                return await super().step(answer)

        class Maker(Environment):
            async def step(self, answer: Answer) -> Reply:
                return Reply(**{"done": True})

        for environment in (hands_on, Inherits, Maker):
            assert found(played(environment)) == []


class TestOwnWorld:  # FR035
    def test_a_list_of_the_class(self) -> None:
        class Remembers(Pays):
            said: list[str] = []  # noqa: RUF012
            counts = defaultdict(int)  # noqa: RUF012

            async def step(self, answer: Answer) -> Reply:
                self.said.append(answer.text)
                self.counts[answer.text] += 1
                return await super().step(answer)

        assert [rule for rule, _ in found(played(Remembers))] == ["FR035"] * 2
        said = [finding.message for finding in played(Remembers).check()]
        assert "Remembers.said is one object for all episodes" in said[0] and "self.said = ... in reset" in said[0]
        assert "Remembers.counts" in said[1] and "test_episodes.py:" in said[1]

    def test_a_base_of_its_own_is_looked_into(self) -> None:
        class Base(Pays):
            said: list[str] = []  # noqa: RUF012

        class Adds(Base):
            def step(self, answer: Answer) -> Reply:  # type: ignore[override]
                self.said += [answer.text]
                return Reply(reward=1.0)

        assert found(played(Adds)) == [("FR035", "interact")]

    def test_what_each_makes_anew_or_all_are_to_share(self) -> None:
        class Own(Pays):
            said: list[str] = []  # noqa: RUF012
            cache: ClassVar[dict[str, int]] = {}
            words = ["go"]  # noqa: RUF012
            limit = 3

            async def reset(self, row: Row) -> Reply:
                self.said = [*self.words]
                return Reply(row.messages)

            async def step(self, answer: Answer) -> Reply:
                self.said.append(answer.text)
                self.cache[answer.text] = 1
                self.limit -= 1
                return await super().step(answer)

        assert found(played(Own)) == []

    def test_in_processes_of_their_own_none_is_shared(self) -> None:
        class Adds(Pays):
            said: list[str] = []  # noqa: RUF012

            async def step(self, answer: Answer) -> Reply:
                self.said.append(answer.text)
                time.sleep(0.0)
                return Reply(reward=1.0)

        together, apart = (EnvironmentSource.of(Adds, (), apart=apart) for apart in (False, True))
        assert list(changed_by_all(together)) and list(blocks(together)) and together.pays
        assert not list(changed_by_all(apart)) and not list(blocks(apart)) and apart.pays

    def test_a_graph_whose_environments_are_apart(self) -> None:
        """By what it is made of; that these do go on apart is in tests/episodes/test_processes.py."""
        for apart, rules in ((False, ["FR035", "FR035", "FR036", "FR036"]), (True, ["FR036"])):
            graph = played(AddsToAll, tools=[walks_a_maze, waits_here], processes=apart)
            assert [rule for rule, _ in found(graph)] == rules, apart

    def test_an_environment_from_outside(self) -> None:
        maze = Maze()

        async def walks(chat: Chat, row: Row) -> float:
            maze.reset()
            return maze.step((await chat.answer()).text)

        async def walks_alone(chat: Chat, row: Row) -> float:
            mine = Maze()
            mine.reset()
            return mine.step((await chat.answer()).text)

        assert found(played(walks)) == [("FR035", "interact")]
        assert "maze is reset and stepped" in the_message(played(walks), "FR035")
        assert found(played(walks_alone)) == []


class AddsToAll(Pays):
    """Changes what its class has, and blocks."""

    said: list[str] = []  # noqa: RUF012

    async def step(self, answer: Answer) -> Reply:
        self.said.append(answer.text)
        time.sleep(0.0)
        return Reply(reward=1.0)


def walks_a_maze(text: str) -> float:
    """A step in the one maze that there is."""
    A_MAZE.reset()
    return A_MAZE.step(text)


async def waits_here(text: str) -> str:
    """A coroutine, which stays where the engine is."""
    time.sleep(0.0)
    return text


class Maze:
    def reset(self) -> None: ...

    def step(self, text: str) -> float:
        return float(len(text))


A_MAZE = Maze()


class TestNobodyBlocks:  # FR036
    def test_calls_that_block(self) -> None:
        class Sleeps(Pays):
            async def reset(self, row: Row) -> Reply:
                time.sleep(0.0)
                rest(0.0)
                return Reply(row.messages)

            async def step(self, answer: Answer) -> Reply:
                subprocess.run(["true"], check=True)
                return Reply(reward=1.0)

        said = [finding.message for finding in played(Sleeps).check() if finding.rule == "FR036"]
        assert [message.split(" (")[0] for message in said] == [
            "reset is async and calls time.sleep",
            "reset is async and calls time.sleep",
            "step is async and calls subprocess.run",
        ]
        assert "await asyncio.to_thread(subprocess.run, ...), or a plain `def step`" in said[2]

    def test_tools_and_agents(self) -> None:
        async def look_up(word: str) -> str:
            time.sleep(0.0)
            return word

        async def waits(chat: Chat, row: Row) -> float:
            time.sleep(0.0)
            return float(len((await chat.answer_by_tools()).text))

        assert found(played(waits)) == found(played(hands_on, tools=[look_up])) == [("FR036", "interact")]

    def test_what_does_not(self) -> None:
        class Patient(Pays):
            def reset(self, row: Row) -> Reply:  # type: ignore[override]
                time.sleep(0.0)
                return Reply(row.messages)

            async def step(self, answer: Answer) -> Reply:
                def later() -> None:
                    time.sleep(0.0)

                rest = Clock().sleep
                rest(1.0)
                await asyncio.to_thread(time.sleep, 0.0)
                await asyncio.to_thread(later)
                return Reply(reward=1.0)

        assert found(played(Patient)) == []


class Clock:
    def sleep(self, seconds: float) -> None: ...


class TestToolsAreCalled:  # FR037
    def test_one_turn(self) -> None:
        graph = played(hands_on, tools=[add], max_turns=1)
        assert found(graph) == [("FR037", "interact")] and found(mended(graph)) == []
        assert found(played(Pays, max_turns=1)) == []  # a bandit

    def test_an_agent_that_answers_no_call(self) -> None:
        graph = played(scores, tools=[add])
        assert found(graph) == [("FR037", "interact")] and found(mended(graph)) == []
        assert "chat.answer_by_tools()" in the_message(graph, "FR037")
        for environment in (Pays, hands_on, helped_by_tools):
            assert found(played(environment, tools=[add])) == []


async def helped_by_tools(chat: Chat, row: Row) -> float:
    return float(len((await chat.answer_by_tools()).text))


class Short(TorchRollout):
    """An engine that says how many tokens it takes."""

    max_model_len: int | None = None


class TestEpisodesFit:  # FR038
    def test_an_answer_as_long_as_the_episode(self) -> None:
        graph = played(Pays, max_new_tokens=300)
        assert found(graph) == [("FR038", "interact")] and found(mended(graph)) == []
        assert "for the other 2 turns" in the_message(graph, "FR038")
        assert found(played(Pays, max_new_tokens=299)) == found(played(Pays, max_new_tokens=300, max_turns=1)) == []

    @pytest.mark.parametrize(("takes", "fits"), [(299, False), (300, True), (None, True)])
    def test_an_engine_that_takes_less(self, takes: int | None, fits: bool) -> None:
        graph = played(Pays).edit(bind={"rollout": Short("model", max_model_len=takes)})
        assert found(graph) == ([] if fits else [("FR038", "interact")])
        assert fits or found(mended(graph)) == []
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
            "import time\nfrom flowrl.episodes import Environment, Reply\nfrom others import Other\n"
            "class Sleeps(Environment):\n    async def step(self, answer):\n"
            "        time.sleep(1)\n        return Reply()\n"
            "class Derived(Other):\n    async def step(self, answer):\n        return Reply()\n"
            "async def agent(chat, row):\n    return 1.0\n"
        )
        monkeypatch.chdir(tmp_path)
        assert found(played("environments.py:Sleeps")) == [("FR034", "interact"), ("FR036", "interact")]
        assert found(played("environments.py:Derived")) == found(played("environments.py:agent")) == []
        assert found(played("environments.py:agent", pays=False)) == [("FR033", "interact")]

    def test_where_there_is_no_source_nothing_is_found(self) -> None:
        made: dict[str, Any] = {}
        exec("async def unseen(chat, row):\n    return 1.0", made)
        assert found(played(made["unseen"])) == found(played(made["unseen"], pays=False)) == []
