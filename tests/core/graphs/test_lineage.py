"""Rules follow rows: responses that are only read may be greedy, frozen or of another policy; trained ones not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flowrl import columns as c
from flowrl import graphs
from flowrl.backends import SGD, TorchRollout, TorchTrainer
from flowrl.core.graphs.after import After
from flowrl.core.graphs.lineage import own_lineage, rows_per_prompt, trained_on
from flowrl.core.graphs.plan import Plan
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.roles import Role, Writes
from flowrl.data.keys import Key
from flowrl.graph import Graph, algorithm
from flowrl.operators import (
    Generate,
    GroupAdvantage,
    OldLogProb,
    Repeat,
    Reward,
    RolloutCorrection,
    Sync,
    UpdateActor,
)
from flowrl.protocols.protocols import Trainer
from flowrl.records import FROZEN, PromptBatch, RolloutBatch, Updated
from flowrl.run.engine.build import EngineBuilder
from tests.support.errors import raises
from tests.support.jobs import PROMPTS, weights_of
from tests.support.kernel import exact
from tests.support.other_policies import JudgePrompt, judged, league, self_play, twice
from tests.support.runs import walk


def found(graph: Graph) -> list[tuple[str, str]]:
    return [(finding.rule, finding.node) for finding in graph.check(prompts=4)]


def sampled(graph: Graph, update: str) -> list[str]:
    return [node.name for node in trained_on(graph, update)]


class TestWhatIsLegal:
    @pytest.mark.parametrize("graph", [graphs.remax(exact), judged(), self_play(), league(), twice()])
    def test_graphs_with_several_policies_or_samplers_have_no_finding(self, graph: Graph) -> None:
        assert found(graph) == []

    def test_only_what_the_update_reads_is_trained_on(self) -> None:
        assert sampled(graphs.remax(exact), "update_actor") == ["generate"]
        assert sampled(judged(), "update_actor") == ["generate"]
        assert sampled(league(), "update_actor") == ["generate"]
        assert sampled(league(), "update_b") == ["generate_b"]

    def test_nodes_of_other_rows_are_not_in_the_lineage_of_an_update(self) -> None:
        own = {node.name for node in own_lineage(league(), "update_b")}
        assert {"generate_b", "old_b", "duel_b", "group_advantage_b"} <= own
        assert not own & {"generate", "old_log_prob", "group_advantage", "repeat"}

    def test_greedy_baseline_responses_need_no_lag_correction(self) -> None:
        ahead = graphs.remax(exact).edit(lag=1)
        assert found(ahead) == [("FR006", "generate")]  # and not greedy
        assert found(ahead.edit(set={"update_actor.loss.ratio_to": "rollout"})) == []

    def test_self_judging_and_draft_improving_policies_have_no_finding(self) -> None:
        own_judge = judged().edit(set={"judge.rollout": Role("rollout"), "judge.top_k": 5})
        assert "judge_prompt" in {node.name for node in own_lineage(own_judge, "update_actor")}
        assert found(own_judge) == []
        assert found(own_judge.edit(lag=1)) == [("FR006", "generate")]  # and not what it says as a judge
        corrected = {"correction": After("group_advantage", RolloutCorrection())}
        assert found(own_judge.edit(lag=1, insert=corrected)) == []

        @algorithm
        def improved(batch: PromptBatch):  # type: ignore[no-untyped-def]
            prompts = Repeat(2)(batch)
            draft = Generate(temperature=0.0).named("draft")(prompts)
            rows = Generate()(JudgePrompt()(draft.input_ids, draft.attention_mask, prompts.row_id))
            advantages = GroupAdvantage()(Reward(exact)(rows, prompts), rows.response_mask, prompts.uid)
            return Sync()(UpdateActor()(rows, old_log_probs=OldLogProb()(rows), advantages=advantages))

        assert sampled(improved(), "update_actor") == ["generate"]
        assert found(improved()) == []


class TestPlanted:
    def test_greedy_training_rows_are_found(self) -> None:
        assert found(graphs.remax(exact).edit(set={"generate.temperature": 0.0})) == [("FR007", "generate")]

    def test_training_on_the_greedy_baseline_rows_is_found(self) -> None:
        @algorithm
        def baseline(batch: PromptBatch, *, on_greedy: bool):  # type: ignore[no-untyped-def]
            prompts = Repeat(2)(batch)
            greedy = Generate(temperature=0.0).named("greedy")(prompts)
            rows = greedy if on_greedy else Generate()(prompts)
            advantages = GroupAdvantage()(Reward(exact)(rows, prompts), rows.response_mask, prompts.uid)
            return Sync()(UpdateActor()(rows, old_log_probs=OldLogProb()(rows), advantages=advantages)), greedy

        assert found(baseline(on_greedy=True)) == [("FR007", "greedy")]
        assert found(baseline(on_greedy=False)) == []

    def test_training_on_rows_of_the_judge_is_found(self) -> None:
        graph = judged(train_on="judge", temperature=1.0)
        assert found(graph) == [("FR002", "update_actor")]
        assert "on responses of 'judge'" in graph.check()[0].message
        assert ("FR007", "judge") in found(judged(train_on="judge"))

    def test_training_on_rows_of_the_frozen_opponent_is_found(self) -> None:
        assert found(self_play(train_on="opponent")) == [("FR002", "update_actor")]

    def test_training_on_rows_of_another_policy_is_found(self) -> None:
        assert found(league(crossed=True)) == [("FR002", "update_b")]

    def test_old_log_probs_of_another_policy_are_found(self) -> None:
        assert found(league(old_of="actor")) == [("FR009", "old_b")]

    def test_a_second_update_without_prior_updates_is_found(self) -> None:
        graph = twice(prior_updates=0)
        assert found(graph) == [("FR002", "update_actor"), ("FR008", "update_actor")]
        assert "UpdateActor(prior_updates=1)" in graph.check()[1].message
        assert found(graph.edit(set={"again.prior_updates": 1})) == []

    def test_a_third_update_needs_prior_updates_2(self) -> None:
        assert ("FR008", "last") in found(twice(third=1))
        assert found(twice(third=2)) == []

    def test_a_sync_between_two_updates_is_found(self) -> None:
        assert found(twice(sync_first=True)) == [("FR002", "again")]

    def test_tokens_on_a_new_axis_still_come_from_the_generator(self) -> None:
        class Back(Operator):
            def __call__(self, prompts: c.Prompts, prompt_mask: c.PromptMask) -> RolloutBatch: ...

        class Equal(Operator):
            def __call__(self, response_mask: c.ResponseMask) -> c.Advantages: ...

        @algorithm
        def cut(batch: PromptBatch, *, temperature: float):  # type: ignore[no-untyped-def]
            rollout = Generate(temperature)(batch)
            question = JudgePrompt()(rollout.input_ids, rollout.attention_mask, batch.row_id)
            rows = Back()(question.prompts, question.prompt_mask)
            equal = Equal()(rows.response_mask)
            return Sync()(UpdateActor()(rows, old_log_probs=OldLogProb()(rows), advantages=equal))

        assert sampled(cut(temperature=1.0), "update_actor") == ["generate"]
        assert found(cut(temperature=1.0)) == []
        assert found(cut(temperature=0.0)) == [("FR007", "generate")]

    def test_an_update_that_reads_no_tokens_may_train_on_any_ancestor(self) -> None:
        class Remote(Operator):
            """Trains on text, which it tokenizes itself."""

            actor: Writes[Trainer] = Role("actor")

            def __call__(self, texts: c.ResponseText, baseline: c.RowScores) -> Updated: ...

        graph = graphs.remax(exact).edit(
            replace={"update_actor": Remote()},
            drop=["sync"],
            wire={"remote.texts": "generate.response_text", "remote.baseline": "row_score.row_scores"},
        )
        assert sampled(graph, "remote") == ["generate", "greedy"]
        assert found(graph) == [("FR002", "remote"), ("FR007", "greedy")]


def test_rows_of_a_prompt_multiply_along_their_axis() -> None:
    graph = graphs.grpo(exact, n=4).edit(insert={"again": After("repeat", Repeat(3))})
    assert [rows_per_prompt(graph, name) for name in ("batch", "repeat", "again", "generate", "sync")] == [
        1,
        1,
        4,
        12,
        1,
    ]


# ---- one step with live engines


def trainer(folder: str) -> TorchTrainer:
    return TorchTrainer(folder, optimizer=SGD(lr=0.05), device="cpu")


def still(folder: str) -> TorchRollout:
    """An engine that keeps the weights of the folder."""
    return TorchRollout(folder, device="cpu", frozen=True)


def moved(before: Any, engine: Any) -> bool:
    return any(not torch.equal(before[name], after) for name, after in weights_of(engine).items())


@pytest.mark.parametrize(
    ("graph", "others"),
    [(judged(), ("judge",)), (self_play(), ("opponent",)), (league(), ("actor_b", "rollout_b")), (twice(), ())],
    ids=["judged", "self_play", "league", "twice"],
)
def test_graphs_with_several_policies_run_two_steps(graph: Graph, others: tuple[str, ...], tiny: str) -> None:
    bound: dict[str, Any] = {"actor": trainer(tiny), "rollout": TorchRollout()}
    bound |= {"actor_b": trainer(tiny), "rollout_b": TorchRollout(tiny, device="cpu")} if "actor_b" in others else {}
    bound |= {role: still(tiny) for role in others if role not in bound}
    job = graph.bind(**bound)
    job.refuse_unready(prompts=3)
    engines = job.build(0)
    steps = walk(job.graph, **engines)
    steps.sync()
    before = {role: weights_of(engines[role]) for role in bound if role.startswith("actor")}
    for step in range(2):
        result = steps.step(PROMPTS, step, return_nodes=list(graph.nodes))
        assert all(math.isfinite(value) for value in result.metrics.compute().values())
    assert all(moved(weights, engines[role]) for role, weights in before.items())
    if others[:1] in (("judge",), ("opponent",)):
        assert result.columns[others[0]].columns["policy_version"].unique().tolist() == [FROZEN]
        assert engines[others[0]].receipt.transport == "folder"
    if graph.name == "twice":
        assert result.values["update_actor"]["updated"].version == 3
        assert result.values["again"]["updated"].version == 4 == engines["rollout"].receipt.version


def test_the_second_of_two_updates_starts_from_the_weights_of_the_first(tiny: str) -> None:
    """By hand: the same two updates as graphs of their own, on the same rows."""
    job = twice().bind(actor=trainer(tiny), rollout=TorchRollout())
    both = job.build(0)
    steps = walk(job.graph, **both)
    steps.sync()
    kept = steps.step(PROMPTS, 0, return_nodes=list(job.graph.nodes)).columns
    alone = EngineBuilder({"actor": trainer(tiny)}, 0).engine("actor")
    rows = kept["generate"].to_record(RolloutBatch)
    old = kept["old_log_prob"].columns["old_log_probs"]
    for source in ("group_advantage", "return_to_go"):
        update = UpdateActor(actor=alone, prior_updates=int(source == "return_to_go"))
        update(rows, old_log_probs=old, advantages=kept[source].columns["advantages"], key=Key.of(0))
    assert all(torch.equal(weight, dict(alone.weights())[name]) for name, weight in both["actor"].weights())


def test_prior_updates_define_the_order_of_two_updates() -> None:
    order = [node.name for node in Plan(twice()).order]
    assert order.index("old_log_prob") < order.index("update_actor") < order.index("again") < order.index("sync")


def test_an_engine_without_a_sync_must_be_frozen(tiny: str) -> None:
    job = judged().bind(actor=trainer(tiny), rollout=TorchRollout(), judge=TorchRollout(tiny, device="cpu"))
    with raises("backend.never-synced", role="judge", backend="TorchRollout"):
        job.refuse_unready()
    job = judged().bind(actor=trainer(tiny), rollout=still(tiny), judge=still(tiny))
    with raises("backend.frozen", role="rollout", node="sync"):
        job.refuse_unready()
