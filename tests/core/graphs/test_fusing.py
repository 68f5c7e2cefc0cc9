"""Fused passes of plans, and the reasons against fusing; see `tests/run/engine/test_fused.py` for the numbers."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import pytest
from torch import Tensor

from flowrl import columns as c
from flowrl import graphs
from flowrl.core.graphs.after import After
from flowrl.core.graphs.fusing import Fusing, as_in_graph, describe, fused, fusings, scorers
from flowrl.core.graphs.plan import Plan
from flowrl.core.operators.loss import Loss
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.roles import Reads, Role
from flowrl.core.operators.symbols import Edge
from flowrl.core.operators.when import When
from flowrl.graph import Graph
from flowrl.operators import OldLogProb, RolloutCorrection, UpdateActor
from flowrl.protocols.protocols import Scorer
from flowrl.records import Updated
from flowrl.schedules import Constant
from tests.support.kernel import BINDINGS, FakeTrainer, exact, readers, wires


class Same(FakeTrainer):
    """Declares that it trains and scores with the same bits."""

    why_not_fusable: ClassVar[str | None] = None
    ranks: int = 1


def bound(name: str, **settings: Any) -> Graph:
    """An installed algorithm whose actor is `Same`."""
    algorithm = getattr(graphs, name)
    graph: Graph = algorithm(**settings) if name in WITHOUT_REWARD else algorithm(exact, **settings)
    return with_bindings(graph)


def with_bindings(graph: Graph) -> Graph:
    backends = {"actor": Same(), "teacher": FakeTrainer(), **{k: v for k, v in BINDINGS.items() if k != "actor"}}
    return graph.bind(**{role: backends[role] for role in graph.roles()}).graph


WITHOUT_REWARD = {"distill", "distill_full", "distill_top", "dpo", "sft"}


def why(graph: Graph) -> str | None:
    """Why the one thing that looks as if it could be fused is not."""
    [found] = fusings(graph)
    assert (found.scorer, found.update) == ("old_log_prob", "update_actor")
    assert (found.why_not is None) == ("old_log_prob" not in fused(graph))
    return found.why_not


class TestFused:
    def test_outputs_and_operators_have_the_names_of_the_graph(self) -> None:
        """An update is also written as the graph has it, which errors show."""
        graph = bound("grpo")
        update = fused(graph)["update_actor"].operator
        assert as_in_graph(update, Edge("update_actor", "old_log_probs")) == Edge("old_log_prob", "old_log_probs")
        [own] = graph["update_actor"].signature.outputs
        assert as_in_graph(update, Edge("update_actor", own)) == Edge("update_actor", own)
        assert repr(update) == f"{graph['update_actor'].operator!r}, fused with old_log_prob"

    def test_grpo_computes_old_log_probs_in_its_update(self) -> None:
        graph = bound("grpo")
        before = graph.fingerprint(), graph.mermaid()
        one = fused(graph)
        assert fusings(graph) == [Fusing("old_log_prob", "update_actor", None)]
        assert (graph.fingerprint(), graph.mermaid()) == before and "old_log_prob" in graph
        assert set(graph.nodes) - set(one.nodes) == {"old_log_prob"} and not set(one.nodes) - set(graph.nodes)
        assert (one.name, one.sinks, one.bindings) == (graph.name, graph.sinks, graph.bindings)
        assert wires(one, "mismatch") == wires(graph, "mismatch") | {"old_log_probs": "update_actor.old_log_probs"}
        kept = {port: edge for port, edge in wires(graph, "update_actor").items() if port != "old_log_probs"}
        assert wires(one, "update_actor") == kept
        assert readers(one, "update_actor.updated") == {"sync"}
        order = [node.name for node in Plan(one).order]
        assert order.index("update_actor") < order.index("mismatch")
        assert scorers(one) == {"old_log_prob": "update_actor"} and scorers(graph) == {}
        assert fusings(one) == [] and fused(one) == one

    def test_the_fused_column_keeps_its_type_and_axes(self) -> None:
        graph = bound("grpo")
        types = {str(edge): typed for edge, typed in [*graph.types.items(), *fused(graph).types.items()]}
        assert types["update_actor.old_log_probs"] == types["old_log_prob.old_log_probs"]

    def test_fusing_keeps_parameters_and_step_conditions(self) -> None:
        graph = (
            bound("grpo", clip=0.3)
            .edit(set={"update_actor.entropy": 0.01})
            .edit(when={name: When(start=2) for name in ("old_log_prob", "update_actor")})
        )
        [update] = [node for node in fused(graph).nodes.values() if node.name == "update_actor"]
        theirs = graph["update_actor"]
        assert isinstance(update.operator, UpdateActor) and isinstance(theirs.operator, UpdateActor)
        assert update.when == theirs.when == When(start=2)
        for name in ("loss", "aggregation", "norm", "kl", "entropy", "actor"):
            assert getattr(update.operator, name) == getattr(theirs.operator, name)

    @pytest.mark.parametrize(
        "name",
        ["grpo", "dr_grpo", "gspo", "grpo_sft", "cispo", "gmpo", "sapo", "dppo", "reinforce_plus_plus_baseline"],
    )
    def test_these_algorithms_of_the_package_fuse(self, name: str) -> None:
        assert why(bound(name)) is None

    @pytest.mark.parametrize("name", ["rloo", "reinforce_plus_plus", "remax"])
    def test_algorithms_with_kl_in_the_reward_fuse_once_it_is_dropped(self, name: str) -> None:
        assert why(bound(name).edit(drop=["kl_shape"])) is None

    def test_a_lag_does_not_prevent_fusing(self) -> None:
        graph = bound("grpo").edit(lag=1, allow={"FR006": "it is tested"})
        assert why(graph) is None
        assert (fused(graph).lag, fused(graph).allow) == (graph.lag, graph.allow)

    def test_only_one_of_two_old_log_prob_nodes_is_fused(self) -> None:
        graph = bound("grpo").edit(
            insert={"other": After("old_log_prob", OldLogProb())},
            wire={"mismatch.old_log_probs": "other.old_log_probs"},
        )
        one = fused(graph)
        assert "other" in one and "old_log_prob" not in one
        assert [line.before for line in Plan(one).state_edges if line.role == "actor"] == ["other"]


class JudgeOutput(NamedTuple):
    """The output of `Judge`."""

    seen: int


class Masks(NamedTuple):
    """The inputs of a model over something other than tokens."""

    response_mask: c.ResponseMask
    policy_version: c.PolicyVersion


class Judge(Operator):
    """Reads log-probs, and uses another engine."""

    ref: Reads[Scorer] = Role("ref")

    def __call__(self, old_log_probs: c.OldLogProbs) -> JudgeOutput: ...


class Passes(Operator):
    """Reads log-probs, and uses no weights."""

    def __call__(self, old_log_probs: c.OldLogProbs) -> JudgeOutput: ...


class SecondOutput(NamedTuple):
    """The output of `SecondJudge`."""

    twice: int


class SecondJudge(Operator):
    """Reads what another operator made of log-probs, and uses another engine."""

    ref: Reads[Scorer] = Role("ref")

    def __call__(self, first: JudgeOutput) -> SecondOutput: ...


class LateJudge(Operator):
    """Reads log-probs after the update, and uses another engine."""

    ref: Reads[Scorer] = Role("ref")

    def __call__(self, old_log_probs: c.OldLogProbs, updated: Updated) -> JudgeOutput: ...


class Flat(Operator):
    """Rewrites a mask."""

    def __call__(self, response_mask: c.ResponseMask) -> c.ResponseMask: ...


class Older(Loss):
    """A loss whose port has another name than the output of `OldLogProb`."""

    def __call__(self, log_probs: c.LogProbs, before: c.OldLogProbs, advantages: c.Advantages) -> Tensor:
        return -(log_probs - before) * advantages


class Mine(UpdateActor):
    """May compute something else."""


class Record(NamedTuple):
    """More than tokens."""

    input_ids: c.InputIds
    attention_mask: c.AttentionMask
    position_ids: c.PositionIds
    response_mask: c.ResponseMask
    temperature: c.Temperature
    policy_version: c.PolicyVersion


class TestNotFused:
    def test_no_fusing_if_an_ancestor_of_the_update_reads_the_column(self) -> None:
        assert why(bound("ppo")) == "kl_shape reads it before"
        assert why(bound("distill")) == "reverse_kl reads it before"
        decoupled = bound("grpo").edit(insert={"correction": After("group_advantage", RolloutCorrection())})
        assert why(decoupled) == "correction reads it before"

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"ppo_epochs": 2}, "update_actor makes several passes over the rows (ppo_epochs=2)"),
            ({"mini_batch": 4}, "update_actor changes weights between mini-batches (mini_batch=4)"),
        ],
    )
    def test_no_fusing_if_the_update_takes_several_optimizer_steps(self, settings: Any, reason: str) -> None:
        assert why(bound("grpo", **settings)) == reason

    def test_no_fusing_if_the_number_of_epochs_is_scheduled(self) -> None:
        graph = bound("grpo").edit(set={"update_actor.ppo_epochs": Constant(1)})
        assert (why(graph) or "").startswith("update_actor makes several passes over the rows (ppo_epochs=Constant(")

    def test_no_fusing_with_a_loss_over_the_whole_batch(self) -> None:
        assert why(bound("kl_cov")) == "update_actor needs all rows at once (the loss KLCov is of a batch)"

    def test_no_fusing_with_a_subclass_of_the_update(self) -> None:
        mine = bound("grpo").edit(replace={"update_actor": Mine().named("update_actor")})
        assert why(mine) == "update_actor is of a subclass, Mine"

    def test_no_fusing_if_scorer_and_update_read_different_records(self) -> None:
        assert why(bound("grpo").edit(set={"old_log_prob.reads": Record})) == "update_actor reads another record"
        both = {"old_log_prob.reads": Record, "update_actor.reads": Record}
        assert why(bound("grpo").edit(set=both)) is None

    def test_no_fusing_if_the_update_reads_the_column_at_another_port(self) -> None:
        graph = bound("grpo").edit(set={"update_actor.loss": Older()})
        assert wires(graph, "update_actor")["before"] == "old_log_prob.old_log_probs"
        assert why(graph) == "update_actor reads before of it"

    def test_no_fusing_if_another_node_may_write_the_weights_before(self) -> None:
        unordered = bound("grpo_sft").edit(set={"imitate.prior_updates": 0})
        assert why(unordered) == "imitate may write the weights of 'actor' before update_actor"

    def test_no_fusing_if_scorer_and_update_read_different_rows(self) -> None:
        graph = bound("grpo").edit(
            insert={"flat": After("generate", Flat())},
            wire={"old_log_prob.rollout.response_mask": "generate.response_mask"},
        )
        assert why(graph) == "it reads generate.response_mask, and update_actor flat.response_mask"

    def test_no_fusing_if_scorer_and_update_run_in_different_steps(self) -> None:
        graph = bound("grpo").edit(when={"update_actor": When(every=2)})
        assert why(graph) == "update_actor does not run in the same steps"

    def test_a_bound_backend_is_asked_even_if_unbound_roles_are_assumed_to_fuse(self) -> None:
        graph = bound("grpo")
        [found] = fusings(graph.edit(bind={"actor": FakeTrainer()}), unbound=True)
        assert found.why_not == "FakeTrainer does not declare that it trains and scores with the same bits"
        assert fusings(graph.bound({}), unbound=True)[0].why_not is None

    def test_no_fusing_if_the_graph_returns_the_column(self) -> None:
        graph = bound("grpo")
        returned = graph.build(graph.name, graph.nodes, [*graph.sinks, "old_log_prob"], bindings=graph.bindings)
        assert why(returned) == "grpo returns what it writes"

    def test_no_fusing_if_a_reader_uses_weights_from_before_the_update(self) -> None:
        """After the update, these weights might differ."""
        graph = bound("grpo").edit(insert={"judge": After("old_log_prob", Judge())})
        assert why(graph) == "judge reads it, which uses the weights of 'ref' before the update"
        passed = bound("grpo").edit(insert={"passes": After("old_log_prob", Passes())})
        judged = passed.edit(insert={"second": After("passes", SecondJudge())})
        assert why(judged) == "passes reads it for second, which uses the weights of 'ref' before the update"

    def test_readers_after_the_update_may_use_weights(self) -> None:
        assert why(bound("grpo").edit(insert={"judge": After("update_actor", LateJudge())})) is None

    def test_no_fusing_unless_the_backend_declares_the_same_bits(self) -> None:
        graph = bound("grpo")
        says_nothing = graph.edit(bind={"actor": FakeTrainer()})
        assert why(says_nothing) == "FakeTrainer does not declare that it trains and scores with the same bits"
        assert why(graph.edit(bind={"actor": Same(ranks=2)})) is None
        masks = {"old_log_prob": OldLogProb(reads=Masks), "update_actor": UpdateActor(reads=Masks)}
        without_tokens = bound("grpo", kl_coef=0.0).edit(replace=masks)
        assert why(without_tokens) is None
        assert (
            why(without_tokens.edit(bind={"actor": Same(ranks=2)}))
            == "each of the 2 ranks of 'actor' gets all rows, since their lengths are unknown"
        )
        assert why(graph.bound({})) == "'actor' is not bound, so it is unknown whether both have the same bits"


class TestDescribe:
    def test_the_plan_describes_fused_and_unfused_passes(self) -> None:
        graph = bound("grpo", n=4)
        summary = "old_log_prob is the first pass of update_actor: computed once, saves a forward pass over"
        assert describe(graph, True) == [f"{summary} the rows of a step"]
        assert describe(graph, True, prompts=8) == [f"{summary} 32 rows"]
        [line] = describe(graph, False, prompts=8)
        assert "optimize=False" in line and "32 rows" in line
        assert describe(bound("ppo"), True) == ["old_log_prob is not fused into update_actor: kl_shape reads it before"]
        assert describe(bound("sft"), True) == []


def test_torch_trainers_declare_the_same_bits_but_subclasses_do_not() -> None:
    from flowrl.backends import TorchTrainer  # here, since it takes seconds

    class Derived(TorchTrainer):
        """May compute otherwise."""

    assert TorchTrainer("model").why_not_fusable is None
    assert TorchTrainer("model", gradient_checkpointing=True).why_not_fusable is None
    assert "offload=True" in (TorchTrainer("model", offload=True).why_not_fusable or "")
    assert "Derived does not declare" in (Derived("model").why_not_fusable or "")
