"""Tests of `episodes.py` and `environment_source.py`: each rule finds the environment that violates it, and accepts
similar ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from flowrl import columns as c
from flowrl.backends import TorchRewardModel, TorchRollout, TorchScorer, TorchTrainer
from flowrl.core.graphs.after import After
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.roles import Role
from flowrl.episodes import Answer, Chat, Environment, Reply, Row
from flowrl.graph import Graph
from flowrl.graphs import grpo, ppo
from flowrl.operators import Interact, ModelReward, OverlongPenalty
from tests.operators.engines.two_policies import both
from tests.rules.findings import edited_by, fixed, found, the_message
from tests.support.kernel import exact


class Pays(Environment):
    """Rewards the correct response."""

    async def step(self, answer: Answer) -> Reply:
        return Reply("again", reward=1.0 if answer.text == "4" else None, done=answer.turn == 1)


class PaysAtOnce(Environment):
    """Rewards every response."""

    def step(self, answer: Answer) -> Reply:  # type: ignore[override]
        return Reply("again", 1.0)


class Silent(Environment):
    """Gives no reward; a function does."""

    async def step(self, answer: Answer) -> Reply:
        if answer.turn == 1:
            return Reply(done=True)
        return Reply("again", None)


async def scores(chat: Chat, row: Row) -> float:
    return float((await chat.answer()).text == row.ground_truth)


async def rewards(chat: Chat, row: Row) -> None:
    await chat.answer()
    chat.reward(1.0)


async def gives_no_reward(chat: Chat, row: Row) -> None:
    await chat.answer()
    await chat.answer("Are you sure?")


async def delegates(chat: Chat, row: Row) -> None:
    await helper(chat)


async def helper(chat: Chat) -> None:
    chat.reward(float(len((await chat.answer_by_tools()).text)))


def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


def episodes(environment: Any, pays: bool = True, base: Any = grpo, **settings: Any) -> Graph:
    """A graph with episodes, rewarded by their environment or by a function."""
    settings = {"max_turns": 3, "context": 300, "max_new_tokens": 16, **settings}
    edited: Graph = base(exact).edit(
        replace={"generate": Interact(environment, **settings)}, drop=["reward"] if pays else []
    )
    return edited


class TestEnvironmentRewardsCount:  # FR033
    @pytest.mark.parametrize("environment", [Pays, PaysAtOnce, scores, rewards])
    @pytest.mark.parametrize("base", [grpo, ppo])
    def test_a_reward_function_discards_environment_rewards(self, environment: Any, base: Any) -> None:
        graph = episodes(environment, pays=False, base=base)
        assert found(graph) == [("FR033", "interact")]
        assert "only those of reward." in the_message(graph, "FR033")
        assert found(fixed(graph)) == found(episodes(environment, base=base)) == []

    @pytest.mark.parametrize("environment", [Silent, gives_no_reward, delegates])
    def test_environment_that_may_give_no_rewards_has_no_finding(self, environment: Any) -> None:
        assert found(episodes(environment, pays=False)) == []

    def test_penalty_added_to_environment_rewards_has_no_finding(self) -> None:
        graph = episodes(Pays).edit(insert={"overlong": After("interact", OverlongPenalty(most=40, buffer=8))})
        assert found(graph) == []


class TestEpisodesAreRewarded:  # FR034
    @pytest.mark.parametrize("environment", [Silent, gives_no_reward])
    def test_episodes_without_any_reward_are_found(self, environment: Any) -> None:
        graph = episodes(environment)
        assert found(graph) == [("FR034", "interact")]
        assert "Reply(..., reward=1.0)" in the_message(graph, "FR034") and "Reward(fn)" in the_message(graph, "FR034")
        assert found(episodes(environment, pays=False)) == []

    def test_episodes_with_tools_only_are_found(self) -> None:
        assert found(episodes(None, tools=[add])) == [("FR034", "interact")]

    def test_environment_whose_rewards_the_source_does_not_show_has_no_finding(self) -> None:
        class Inherits(Silent):
            async def step(self, answer: Answer) -> Reply:
                return await super().step(answer)

        class Maker(Environment):
            async def step(self, answer: Answer) -> Reply:
                return Reply(**{"done": True})

        for environment in (delegates, Inherits, Maker):
            assert found(episodes(environment)) == []


class TestToolsAreCalled:  # FR037
    def test_tools_with_one_turn_are_found(self) -> None:
        graph = episodes(delegates, tools=[add], max_turns=1)
        assert found(graph) == [("FR037", "interact")] and found(fixed(graph)) == []
        assert found(episodes(Pays, max_turns=1)) == []  # a bandit

    def test_tools_of_an_agent_that_runs_no_tool_calls_are_found(self) -> None:
        graph = episodes(scores, tools=[add])
        assert found(graph) == [("FR037", "interact")] and found(fixed(graph)) == []
        assert "chat.answer_by_tools()" in the_message(graph, "FR037")
        for environment in (Pays, delegates, runs_tools):
            assert found(episodes(environment, tools=[add])) == []


async def runs_tools(chat: Chat, row: Row) -> float:
    return float(len((await chat.answer_by_tools()).text))


class Short(TorchRollout):
    """An engine with a context limit in tokens."""

    max_model_len: int | None = None


class TestEpisodesFit:  # FR038
    def test_response_limit_that_fills_the_context_is_found(self) -> None:
        graph = episodes(Pays, max_new_tokens=300)
        assert found(graph) == [("FR038", "interact")] and found(fixed(graph)) == []
        assert "for the other 2 turns" in the_message(graph, "FR038")
        assert found(episodes(Pays, max_new_tokens=299)) == found(episodes(Pays, max_new_tokens=300, max_turns=1)) == []

    @pytest.mark.parametrize(("limit", "fits"), [(299, False), (300, True), (None, True)])
    def test_engine_with_a_shorter_context_than_episodes_is_found(self, limit: int | None, fits: bool) -> None:
        graph = episodes(Pays).edit(bind={"rollout": Short("model", max_model_len=limit)})
        assert found(graph) == ([] if fits else [("FR038", "interact")])
        assert fits or found(fixed(graph)) == []
        assert found(episodes(Pays).edit(bind={"rollout": TorchRollout("model")})) == []


class TestPlacedOnTheMask:  # FR039
    class Blind(Operator):
        """Puts the score on the last token, sampled or not."""

        def __call__(self, responses: c.Responses, response_text: c.ResponseText) -> c.TokenLevelScores:
            scores = torch.zeros(responses.shape)
            scores[:, -1] = torch.tensor(np.vectorize(len)(response_text))
            return scores

    class Masked(Operator):
        """Puts the score on the last sampled token."""

        def __call__(self, response_mask: c.ResponseMask, response_text: c.ResponseText) -> c.TokenLevelScores: ...

    @pytest.mark.parametrize("graph", [grpo(exact), ppo(exact), episodes(Silent, pays=False)])
    def test_reward_operator_without_the_response_mask_is_found(self, graph: Graph) -> None:
        blind = graph.edit(replace={"reward": self.Blind()})
        assert found(blind) == [("FR039", "blind")]
        assert "`response_mask: ResponseMask`" in the_message(blind, "FR039")
        assert found(graph.edit(replace={"reward": self.Masked()})) == []


class OwnTrainer(TorchTrainer):
    """A trainer of a user, which reads a row as one sequence."""

    reads_segments: ClassVar[bool] = False


class TestSegmentsAreApart:  # FR046
    def segmented(self, **bindings: Any) -> Graph:
        roles = {"actor": TorchTrainer("model"), "ref": TorchScorer("model"), "rollout": TorchRollout()} | bindings
        return episodes(Pays, rewrites="segment").edit(bind=roles)

    def test_a_model_that_joins_segments_is_found(self) -> None:
        graph = self.segmented(actor=OwnTrainer("model"))
        assert ("FR046", "update_actor") in found(graph) and {rule for rule, _ in found(graph)} == {"FR046"}
        messages = [finding.message for finding in graph.check(prompts=4)]
        assert all("'actor' is bound to OwnTrainer" in message for message in messages)
        assert found(edited_by(graph, messages[0])) == found(self.segmented()) == []
        assert found(episodes(Pays).edit(bind={"actor": OwnTrainer("model")})) == []

    def test_a_reward_model_of_tokens_is_found(self) -> None:
        graph = episodes(Pays, rewrites="segment", pays=False).edit(replace={"reward": ModelReward()})
        bound = graph.edit(bind={"reward_model": TorchRewardModel("model")})
        assert ("FR046", "model_reward") in found(bound) and ("FR046", "model_reward") not in found(graph)

    def test_an_operator_that_reads_tokens_without_positions_is_found(self) -> None:
        class Repeats(Operator):
            def __call__(
                self, input_ids: c.InputIds, token_level_scores: c.TokenLevelScores, response_mask: c.ResponseMask
            ) -> c.TokenLevelScores: ...

        graph = episodes(Pays, rewrites="segment").edit(insert={"repeats": After("interact", Repeats())})
        assert [node for rule, node in found(graph) if rule == "FR046"] == ["repeats"]


class TestOtherEngines:  # FR047
    """The rows of a second policy; FR002 and FR007 hold for it as for the first."""

    def test_rows_of_a_role_that_is_not_asked_by_that_name_are_found(self) -> None:
        graph = both()
        assert found(graph) == []
        for wrong, count in (
            ({"sampled.other": "usr"}, 1),
            ({"sampled.role": Role("guest"), "sync_user.rollout": Role("guest")}, 1),
            ({"interact.others": {}, "interact.others_sampling": {}}, 1),
            ({"interact.others": {"guest": Role("user")}, "interact.others_sampling": {}}, 1),
        ):
            edited = graph.edit(set=wrong)
            assert [node for rule, node in found(edited) if rule == "FR047"] == ["sampled"] * count
            assert "FR047" not in {rule for rule, _ in found(edited_by(edited, the_message(edited, "FR047")))}

    def test_an_asked_engine_needs_its_own_sync_and_not_that_of_the_policy(self) -> None:
        graph = both().edit(drop=["sync_user"])
        assert found(graph) == [("FR002", "update_user")]
        fixed = edited_by(graph, the_message(graph, "FR002"))
        assert found(fixed) == []

    def test_greedy_answers_of_the_other_engine_are_found_where_they_are_sampled(self) -> None:
        cold = both().edit(set={"interact.others_sampling.user.temperature": 0.0})
        assert found(cold) == [("FR007", "sampled")]
        assert "'interact.others_sampling.user.temperature': 1.0" in the_message(cold, "FR007")
        assert found(edited_by(cold, the_message(cold, "FR007"))) == []
        shared = both().edit(set={"interact.others_sampling": {}, "interact.temperature": 0.0})
        assert found(shared) == [("FR007", "interact"), ("FR007", "sampled")]
        frozen = both().edit(drop=["sync_user", "update_user"], set={"interact.others_sampling.user.temperature": 0.0})
        assert found(frozen) == []

    def test_a_trainer_that_joins_segments_is_found(self) -> None:
        graph = both().edit(bind={"user_actor": OwnTrainer("model")})
        assert ("FR046", "update_user") in found(graph) and ("FR046", "update_actor") not in found(graph)


class TestEnvironmentsByReference:
    """The rules parse an environment that a graph names by its file; they never run it."""

    def test_rules_parse_environments_and_agents_of_a_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "environments.py").write_text(
            "from flowrl.episodes import Environment, Reply\nfrom others import Other\n"
            "class Unpaid(Environment):\n    async def step(self, answer):\n        return Reply()\n"
            "class Derived(Other):\n    async def step(self, answer):\n        return Reply()\n"
            "async def agent(chat, row):\n    return 1.0\n"
        )
        monkeypatch.chdir(tmp_path)
        assert found(episodes("environments.py:Unpaid")) == [("FR034", "interact")]
        assert found(episodes("environments.py:Derived")) == found(episodes("environments.py:agent")) == []
        assert found(episodes("environments.py:agent", pays=False)) == [("FR033", "interact")]

    def test_agent_without_source_has_no_finding(self) -> None:
        made: dict[str, Any] = {}
        exec("async def unseen(chat, row):\n    return 1.0", made)
        assert found(episodes(made["unseen"])) == found(episodes(made["unseen"], pays=False)) == []
