"""Tests of `gate.py` and `flowrl/edits/gating.py`: gates, inserted by a call or by an edit.

They cover the columns that pass, and gates in later edits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flowrl import INJECTED, After, Key, Metrics, Operator, PromptBatch, When, algorithm, operator
from flowrl import columns as c
from flowrl.core.graphs.gate import Gate
from flowrl.core.operators.roles import Reads, Role
from flowrl.core.operators.session import Session, State
from flowrl.errors import GraphError, ParameterError, PortError
from flowrl.graph import Graph
from flowrl.graphs import grpo, ppo
from flowrl.operators import (
    Collect,
    Filter,
    Generate,
    GroupAdvantage,
    Length,
    OldLogProb,
    Repeat,
    Reward,
    Spread,
    UpdateActor,
)
from flowrl.protocols.protocols import Scorer
from flowrl.schedules import Constant, Linear
from tests.support.errors import raises
from tests.support.jobs import column
from tests.support.kernel import LengthPenalty, answers, exact, wires

GRPO, PPO = grpo(exact, n=4), ppo(exact, n=4)
FILTERED = GRPO.edit(insert={"filter": After("reward", Filter(Spread()))})


class Answered(Operator):
    """Rows with a text; reads a column that exists before and after `Repeat`."""

    granularity = "row"

    def __call__(self, response_text: c.ResponseText, uid: c.Uid) -> c.RowMask:
        return torch.tensor([bool(text) for text in response_text])


class Odd(Operator):
    """Reads what is there on two row axes, and nothing else."""

    def __call__(self, uid: c.Uid) -> c.RowMask:
        return torch.ones(len(uid), dtype=torch.bool)


class Half(Operator):
    """Every row with a chance of a half, out of the key."""

    def __call__(self, response_mask: c.ResponseMask, key: Key = INJECTED, metrics: Metrics = INJECTED) -> c.RowMask:
        metrics.sum("half/asked", len(response_mask))
        return torch.rand(len(response_mask), generator=key.generator()) < 0.5


# ------------------------------------------------------------------------------------------------------------- by edits


@pytest.mark.parametrize("graph", [GRPO, PPO])
def test_an_inserted_gate_is_on_every_edge_to_nodes_downstream(graph: Graph) -> None:
    filtered = graph.edit(insert={"filter": After("reward", Filter(Spread()))})
    before = filtered.ancestors("filter")
    assert before == {"batch", "repeat", "generate", "reward"}
    for node in filtered.nodes.values():
        for edge in node.inputs.values():
            assert node.name in before | {"filter"} or edge.node not in before
    rows = {typed.axes[0] for edge, typed in filtered.types.items() if typed.axes and edge.node not in before}
    assert rows == {"batch@filter"}
    # What passes is what is read: nothing else crosses.
    read = {edge.output for node in filtered.nodes.values() for edge in node.inputs.values() if edge.node == "filter"}
    assert set(filtered["filter"].operator.signature.outputs) == read


@pytest.mark.parametrize("graph", [GRPO, PPO])
def test_dropping_a_gate_restores_the_original_graph(graph: Graph) -> None:
    filtered = graph.edit(insert={"filter": After("reward", Filter(Spread()))})
    assert filtered.edit(drop=["filter"]).fingerprint() == graph.fingerprint()
    assert Graph.from_dict(filtered.to_dict()).fingerprint() == filtered.fingerprint()


def test_later_edits_may_read_all_columns_through_a_gate() -> None:
    """An edit before the gate was put in, or after: the same graph."""
    to_ppo = {"replace": {"group_advantage": GroupAdvantage(eps=0.1)}, "drop": ["mismatch"]}
    assert FILTERED.edit(**to_ppo).fingerprint() == (  # type: ignore[arg-type]
        GRPO.edit(**to_ppo).edit(insert={"filter": After("reward", Filter(Spread()))}).fingerprint()  # type: ignore[arg-type]
    )
    # A reader downstream of the gate may read a column that had no reader there.
    second = FILTERED.edit(
        insert={"again": After("filter", Reward(exact))},
        wire={"group_advantage.token_level_rewards": "again.token_level_scores"},
    )
    assert wires(second, "again")["prompts.ground_truth"] == "filter.ground_truth"
    assert wires(second, "filter")["rows.ground_truth"] == "repeat.ground_truth"
    assert "token_level_scores" not in second["filter"].operator.signature.outputs


def test_a_second_gate_reads_the_rows_that_the_first_passes() -> None:
    twice = FILTERED.edit(insert={"short": After("filter", Filter(Length(most=5)))})
    assert wires(twice, "old_log_prob")["rollout.input_ids"] == "short.input_ids"
    assert wires(twice, "short")["rows.input_ids"] == "filter.input_ids"
    at_once = GRPO.edit(
        insert={"filter": After("reward", Filter(Spread())), "short": After("reward", Filter(Length(most=5)))}
    )
    assert at_once.fingerprint() == twice.fingerprint()
    assert twice.edit(drop=["filter", "short"]).fingerprint() == GRPO.fingerprint()


def test_nodes_inserted_with_a_gate_are_in_the_order_of_the_mapping() -> None:
    penalty, gate = After("reward", LengthPenalty()), After("reward", Filter(Spread()))
    first = GRPO.edit(insert={"penalty": penalty, "filter": gate})
    assert wires(first, "filter")["token_level_scores"] == "penalty.token_level_scores"
    downstream = GRPO.edit(insert={"filter": gate, "penalty": penalty})
    assert wires(downstream, "filter")["token_level_scores"] == "reward.token_level_scores"
    assert wires(downstream, "penalty")["token_level_scores"] == "filter.token_level_scores"


def test_a_gate_can_be_replaced_and_its_predicate_has_parameters() -> None:
    other = FILTERED.edit(replace={"filter": Filter(Length(most=5)).named("short")})
    assert wires(other, "old_log_prob")["rollout.input_ids"] == "short.input_ids"
    assert {"token_level_scores", "response_mask"} & {field.port for field in other["short"].inputs} == {
        "response_mask"
    }
    wider = FILTERED.edit(set={"filter.predicate.least": 0.5})
    assert wider["filter"].operator.predicate == Spread(0.5)  # type: ignore[attr-defined]
    assert str(FILTERED.diff(wider)) == "grpo -> grpo\n~ filter.predicate.least: 0.0 -> 0.5"
    assert "+ filter: Filter(predicate=Spread(least=0.0))  <- reward, generate, repeat" in str(GRPO.diff(FILTERED))
    assert "columns" not in FILTERED.mermaid()


def test_a_predicate_is_wired_to_the_rows_of_the_gate_by_type_or_explicitly() -> None:
    answered = GRPO.edit(insert={"filter": After("generate", Filter(Answered()))})
    assert wires(answered, "filter")["uid"] == "repeat.uid"  # and not that of before Repeat
    assert "reward" in answered.descendants("filter")
    assert wires(GRPO.edit(insert={"odd": After("generate", Filter(Odd()))}), "odd")["uid"] == "repeat.uid"
    late = GRPO.edit(insert={"filter": After("group_advantage", Filter(Length()))})
    assert {"reward", "group_advantage"} <= late.ancestors("filter")
    two = GRPO.edit(
        insert={"second": After("reward", Reward(exact)), "mean": After("reward", LengthPenalty())},
        wire={
            "mean.token_level_scores": "second.token_level_scores",
            "group_advantage.token_level_rewards": "mean.token_level_scores",
        },
    )
    wired = two.edit(insert={"filter": After("mean", Filter(Spread()))}, wire={"filter.uid": "repeat.uid"})
    assert wires(wired, "filter")["token_level_scores"] == "mean.token_level_scores"
    with raises("edit.unknown-port", node="filter", port="scores"):
        GRPO.edit(insert={"filter": After("reward", Filter(Spread()))}, wire={"filter.scores": "reward.x"})
    with raises("graph.unknown-output", node="filter", output="reward.x"):
        GRPO.edit(insert={"filter": After("reward", Filter(Spread()))}, wire={"filter.uid": "reward.x"})
    with raises("graph.axis-mismatch", node="filter", axis="batch", edge="batch.uid"):
        GRPO.edit(insert={"filter": After("reward", Filter(Spread()))}, wire={"filter.uid": "batch.uid"})


def test_a_gate_without_downstream_readers_of_its_rows_is_refused() -> None:
    with raises("gate.no-rows", node="filter", anchor="update_actor"):
        GRPO.edit(insert={"filter": After("update_actor", Filter(Spread()))})
    scored = GRPO.subgraph("reward")
    with raises("gate.no-reader", node="filter", anchor="reward"):
        scored.edit(insert={"filter": After("reward", Filter(Spread()))})


@operator
def long(response_mask: c.ResponseMask, *, least: float = 3.0) -> c.RowMask:
    return response_mask.sum(-1) >= least


def test_a_gate_may_run_in_some_steps_with_a_scheduled_function_predicate() -> None:
    keep = long(least=Linear(1.0, 5.0, steps=4))
    waiting = GRPO.edit(insert={"filter": After("reward", Filter(keep).when(every=2))})
    gate = waiting["filter"]
    assert gate.when == When(every=2)
    assert gate.in_step(2).when == When(every=2)
    assert repr(gate.in_step(2).operator) == "Filter(predicate=long, max_skips=20, on_underfill='error')"  # 3.0
    assert waiting.whens("sync") == (When(every=2),)
    assert Graph.from_dict(waiting.to_dict()).fingerprint() == waiting.fingerprint()
    assert waiting.edit(drop=["filter"]).fingerprint() == GRPO.fingerprint()
    assert (
        FILTERED.edit(when={"filter": When(start=1)}).edit(set={"filter.predicate.least": 1.0})["filter"].when.start
        == 1
    )


def test_the_target_group_count_of_a_gate_cannot_be_scheduled() -> None:
    def collecting(**settings: Any) -> Graph:
        return GRPO.edit(insert={"collect": After("reward", Collect(Spread(), **settings))})

    for given, what in (
        ({"groups": Linear(4, 8, steps=4)}, "target_groups"),
        ({"rounds": Linear(1, 8, steps=9)}, "rounds"),
    ):
        with pytest.raises(GraphError, match=rf"collect\.{what}.* in one step and .* in another"):
            collecting(**({"groups": 4} | given))
    constant = collecting(groups=Constant(4)).edit(set={"update_actor.mini_batch": 6})
    assert [finding.message[:36] for finding in constant.check(prompts=1)] == ["mini_batch=6 does not divide the 16 "]


# ------------------------------------------------------------------------------------------------------------- by calls


@algorithm
def called(batch: PromptBatch, gate: Gate) -> Any:
    prompts = Repeat(2)(batch)
    rollout = Generate()(prompts)
    scores = Reward(exact)(rollout, prompts)
    rollout, prompts, scores = gate(rollout, prompts, token_level_scores=scores)
    return GroupAdvantage()(scores, rollout.response_mask, prompts.uid)


def test_a_call_passes_records_and_named_columns() -> None:
    graph = called(Filter(Spread()))
    assert wires(graph, "group_advantage") == {
        "token_level_rewards": "filter.token_level_scores",
        "response_mask": "filter.response_mask",
        "uid": "filter.uid",
    }
    assert wires(graph, "filter")["token_level_scores"] == "reward.token_level_scores"
    assert set(graph["filter"].operator.signature.outputs) == {"token_level_scores", "response_mask", "uid"}


def test_a_direct_call_filters_records_and_columns() -> None:
    rollout = answers(rows=4)
    scores = torch.tensor([[0.0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 2], [0, 0, 0, 2]])
    uid = column(["a", "a", "b", "b"])
    kept, out, ids = Filter(Spread())(rollout, token_level_scores=scores, uid=uid)
    assert type(kept) is type(rollout)
    assert len(kept.input_ids) == 2
    assert torch.equal(out, scores[:2])
    assert ids.tolist() == ["a", "a"]
    alone = Filter(Length(most=4))(rollout)
    assert torch.equal(alone.input_ids, rollout.input_ids)


def test_a_call_in_a_skipped_step_returns_nothing_and_skips_downstream_calls() -> None:
    session, rollout = Session({}, seed=1), answers(rows=4)
    waits = Filter(Length(most=4)).when(every=2)
    with session.active():
        for step in range(3):
            session.begin_step(step)
            kept, ids = waits(rollout, uid=column(list("aabb")))
            downstream = Filter(Length(most=4))(kept)
            assert (type(ids) is np.ndarray) == (type(downstream.input_ids) is torch.Tensor) == (step != 1)


def test_gates_of_nested_algorithms_have_their_prefix() -> None:
    @algorithm
    def twice(batch: PromptBatch) -> Any:
        return called.under("first")(batch, gate=Filter(Spread())), called(batch, gate=Filter(Spread()))

    assert {"first_filter", "filter"} <= set(twice().nodes)
    assert wires(twice(), "first_group_advantage")["uid"] == "first_filter.uid"


def test_a_predicate_has_the_key_and_the_metrics_of_the_gate() -> None:
    session, rollout = Session({}, seed=1), answers(rows=64)
    with session.active():
        first, again = Filter(Half())(rollout), Filter(Half())(rollout)
        other = Filter(Half()).named("other")(rollout)
    assert 16 < len(first.input_ids) < 48
    assert len(first.input_ids) == len(again.input_ids)
    assert session.metrics["filter"]["half/asked"].value == 128
    assert session.metrics["filter"]["filter/offered"].value == 128
    assert session.metrics["other"]["other/kept"].value == len(other.input_ids)


class Asks(Operator):
    ref: Reads[Scorer] = Role("ref")

    def __call__(self, uid: c.Uid) -> c.RowMask: ...


class Counts(Operator):
    calls = State(lambda self: 0)

    def __call__(self, uid: c.Uid) -> c.RowMask: ...


class Named(Operator):
    def __call__(self, rows: c.Uid) -> c.RowMask: ...


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: Filter(GroupAdvantage()),
            ParameterError,
            r"group_advantage writes advantages: .*; expected one bool per row",
        ),
        (lambda: Filter(Asks()), ParameterError, r"asks uses an engine; a predicate reads columns only"),
        (lambda: Filter(Counts()), ParameterError, r"counts has state; a predicate reads columns only"),
        (lambda: Filter(Spread().when(every=2)), ParameterError, r"spread has when\(...\), .* on the gate instead"),
        (lambda: Filter(Named()), ParameterError, r"named has a port 'rows', which every gate has"),
        (lambda: Filter(3), ParameterError, r"predicate=3"),
        (
            lambda: Filter(Length())(answers(), uid=np.array([object(), object(), object()], dtype=object)),
            PortError,
            r"its batch axis has length 3",
        ),
    ],
)
def test_a_predicate_or_column_that_does_not_fit_is_refused(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("call", "code", "facts"),
    [
        (lambda: Filter(Spread())(torch.ones(2, 2)), "gate.missing-column", {"node": "filter", "found": "Tensor"}),
        (lambda: Filter(Spread())(scores=torch.ones(2, 2)), "gate.missing-column", {"column": "scores"}),
        (lambda: Filter(Spread())(answers()), "gate.missing-column", {"port": "token_level_scores"}),
        (lambda: Filter(Length(most=3))(answers()), "gate.dropped-all", {"node": "filter", "offered": 2}),
    ],
)
def test_calls_that_cannot_pass_rows_are_refused(call: Any, code: str, facts: dict[str, Any]) -> None:
    with raises(code, **facts):
        call()


def test_a_value_without_rows_cannot_pass_a_gate() -> None:
    @algorithm
    def valued(batch: PromptBatch) -> Any:
        rollout = Generate()(batch)
        adv = GroupAdvantage()(Reward(exact)(rollout, batch), rollout.response_mask, batch.uid)
        return Filter(Length())(rollout, updated=UpdateActor()(rollout, OldLogProb()(rollout), adv))

    with raises("gate.no-rows", node="filter", found="update_actor.updated"):
        valued()


def test_a_mini_batch_downstream_of_a_filter_is_refused_before_launch() -> None:
    [finding] = FILTERED.edit(set={"update_actor.mini_batch": 8}).check(prompts=8)
    assert (finding.rule, finding.node) == ("FR004", "update_actor")
    assert "the number of rows that pass filter is not known" in finding.message
    assert not FILTERED.check(prompts=8)
    assert isinstance(FILTERED["update_actor"].operator, UpdateActor)


def test_a_limit_of_skips_without_skips_is_refused() -> None:
    with raises("gate.skips-nothing", found=3):
        Filter(Spread(), max_skips=3)
    with raises("gate.skips-nothing", found=3):
        Collect(Spread(), groups=2, max_skips=3)
    assert Filter(Spread(), on_underfill="skip", max_skips=3).max_skips == 3
