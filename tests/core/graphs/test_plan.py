"""Plans: weights are read before they are written, synced after, in one fixed topological order."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl import columns as c
from flowrl.core.graphs.graph import Input, Node
from flowrl.core.graphs.plan import Plan, StateEdge, state_edges
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.roles import Reads, Role, Writes
from flowrl.core.operators.symbols import Edge
from flowrl.errors import GraphError
from flowrl.graph import Graph, algorithm
from flowrl.graphs import grpo, ppo
from flowrl.operators import GAE, Generate, Reward, UpdateCritic, Value
from flowrl.protocols.protocols import Critic
from flowrl.records import CriticUpdated, PromptBatch, Tokens
from tests.support.errors import raises
from tests.support.kernel import exact


class Probe(Operator):
    """Reads a critic, without outputs."""

    critic: Reads[Critic] = Role("critic")

    def __call__(self, rollout: Tokens) -> CriticUpdated: ...


class Reprobe(Operator):
    """Reads a critic once it was updated."""

    critic: Reads[Critic] = Role("critic")

    def __call__(self, updated: CriticUpdated) -> CriticUpdated: ...


@algorithm
def probed(batch: PromptBatch) -> Any:
    rollout = Generate()(batch)
    values = Value()(rollout)
    returns = GAE()(Reward(exact)(rollout, batch), values, rollout.response_mask).returns
    updated = UpdateCritic()(rollout, values, returns)
    return Reprobe()(updated), Probe()(rollout)  # recorded after the update, and still to run before it


def names(plan: Plan) -> list[str]:
    return [node.name for node in plan.order]


class TestStateEdges:
    def test_ppo_reads_weights_before_they_are_updated(self) -> None:
        assert set(state_edges(ppo(exact))) == {
            StateEdge("old_log_prob", "update_actor", "actor"),
            StateEdge("value", "update_critic", "critic"),
            StateEdge("generate", "sync", "rollout"),
        }

    def test_a_reader_without_a_data_dependency_precedes_the_writer(self) -> None:
        graph = probed()
        assert StateEdge("probe", "update_critic", "critic") in state_edges(graph)
        assert not nx.has_path(graph.network, "probe", "update_critic")
        order = names(Plan(graph))
        assert order.index("probe") < order.index("update_critic") < order.index("reprobe")

    def test_a_node_downstream_of_the_writer_reads_the_new_weights(self) -> None:
        assert not any("reprobe" in (edge.before, edge.after) for edge in state_edges(probed()))

    def test_roles_have_separate_state_edges(self) -> None:
        graph = probed().edit(replace={"probe": Probe(critic=Role("other"))})
        assert not any(edge.before == "probe" for edge in state_edges(graph))


class TestOrder:
    @pytest.mark.parametrize("make", [ppo, grpo])
    def test_weights_are_read_then_updated_then_synced(self, make: Any) -> None:
        order = names(Plan(make(exact)))
        assert "batch" not in order
        for reader in ("generate", "old_log_prob", "ref_log_prob", "reward"):
            assert order.index(reader) < order.index("update_actor")
        assert order.index("update_actor") < order.index("sync") == max(order.index("sync"), order.index("reward"))

    def test_the_plan_keeps_the_order_of_the_graph_where_state_allows(self) -> None:
        assert names(Plan(ppo(exact))) == list(ppo(exact).nodes)[1:]
        assert list(probed().nodes).index("probe") > list(probed().nodes).index("update_critic")

    def test_plans_are_deterministic(self) -> None:
        assert len({tuple(names(Plan(ppo(exact)))) for _ in range(5)}) == 1
        graph = ppo(exact)
        assert names(Plan(Graph.from_dict(graph.to_dict()))) == names(Plan(graph))

    def test_a_plan_lists_its_syncs(self) -> None:
        assert [node.name for node in Plan(ppo(exact)).syncs] == ["sync"]
        assert Plan(ppo(exact).subgraph(until="update_actor")).syncs == []

    def test_a_cycle_of_data_and_state_is_named(self) -> None:
        class Chained(Operator):
            """Reads one critic after another was written."""

            critic: Reads[Critic] = Role("a")

            def __call__(self, rollout: Tokens, updated: CriticUpdated) -> c.Values: ...

        class Write(Operator):
            critic: Writes[Critic] = Role("a")

            def __call__(self, values: c.Values) -> CriticUpdated: ...

        @algorithm
        def crossed(batch: PromptBatch) -> Any:
            # read_b needs what wrote a, and read_a what wrote b: each reads too late for the other's writer
            rollout = Generate()(batch)
            start = Value(critic=Role("c"))(rollout)
            write_a = Write(critic=Role("a")).named("write_a")(start)
            write_b = Write(critic=Role("b")).named("write_b")(start)
            read_b = Chained(critic=Role("b")).named("read_b")(rollout, write_a)
            read_a = Chained(critic=Role("a")).named("read_a")(rollout, write_b)
            return Write(critic=Role("c")).named("x")(read_a), Write(critic=Role("d")).named("y")(read_b)

        with raises("graph.weights-cycle") as error:
            _ = Plan(crossed()).order
        assert set(error.value.facts["nodes"]) == {"write_a", "read_b", "write_b", "read_a"}


class TestWaves:
    def test_waves_of_ppo_match_those_by_hand(self) -> None:
        """Old, ref, value and reward depend only on the rollout, and each update on its training signal."""
        assert [[node.name for node in wave] for wave in Plan(ppo(exact)).waves] == [
            ["repeat"],
            ["generate"],
            ["old_log_prob", "ref_log_prob", "value", "reward"],
            ["mismatch", "kl_shape"],
            ["gae"],
            ["whiten", "update_critic"],
            ["update_actor"],
            ["sync"],
        ]

    def test_a_writer_is_in_a_later_wave_than_its_readers(self) -> None:
        waves = [{node.name for node in wave} for wave in Plan(probed()).waves]
        at = {name: i for i, wave in enumerate(waves) for name in wave}
        assert at["probe"] < at["update_critic"] < at["reprobe"]


class TestText:
    def test_the_text_of_grpo_is_unchanged(self) -> None:
        assert str(Plan(grpo(exact))) == GRPO

    def test_the_text_lists_only_wired_inputs(self) -> None:
        reads = str(Plan(ppo(exact))).partition("update_actor")[2].partition("sync")[0]
        assert "from whiten: advantages" in reads and "ref_log_prob" not in reads

    def test_lines_are_at_most_120_characters_long(self) -> None:
        assert max(map(len, str(Plan(ppo(exact))).splitlines())) <= 120

    def test_a_graph_of_one_node_has_a_plan(self) -> None:
        text = str(Plan(ppo(exact).subgraph(until="repeat")))
        assert text.splitlines()[:2] == [
            "ppo: 1 nodes in 1 waves; nodes of a wave run in parallel",
            "1  repeat  general  row",
        ]

    def test_a_node_runs_where_its_role_lives(self) -> None:
        graph = ppo(exact)
        homes = {name: graph[name].home for name in ("generate", "update_critic", "sync", "gae")}
        assert homes == {"generate": "rollout", "update_critic": "critic", "sync": "rollout", "gae": None}


GRPO = """\
grpo: 9 nodes in 6 waves; nodes of a wave run in parallel
1  repeat           general             row
     from batch: data_source, extra_info, ground_truth, prompt_mask, prompts, raw_prompt, row_id, uid
2  generate         rollout             row
     from repeat: prompt_mask, prompts, row_id
3  old_log_prob     actor               row
     from generate: attention_mask, input_ids, position_ids, response_mask, temperature
3  ref_log_prob     ref                 row
     from generate: attention_mask, input_ids, position_ids, response_mask, temperature
3  reward           general             row
     from generate: response_mask, response_text
     from repeat: data_source, extra_info, ground_truth, row_id
4  mismatch         general             batch
     from generate: response_mask, rollout_log_probs
     from old_log_prob: old_log_probs
4  group_advantage  general             group
     from reward: token_level_scores
     from generate: response_mask
     from repeat: uid
5  update_actor     actor               batch
     from generate: attention_mask, input_ids, policy_version, position_ids, response_mask, temperature
     from old_log_prob: old_log_probs
     from group_advantage: advantages
     from ref_log_prob: ref_log_prob
6  sync             rollout with actor  batch
     from update_actor: updated
weights are read before they are written:
  rollout: generate before sync
  actor: old_log_prob before update_actor"""


class TestReaders:
    def test_readers_are_counted_per_node(self) -> None:
        plan = Plan(ppo(exact))
        for name in plan.graph.nodes:
            readers = {node.name for node in plan.graph.nodes.values() if name in node.sources}
            assert plan.readers.get(name, 0) == len(readers)
            assert readers <= plan.downstream(name)


class Plain(Operator):
    def __call__(self, a: c.Values, b: c.Values) -> c.Values: ...


class Reader(Operator):
    critic: Reads[Critic] = Role("p")

    def __call__(self, a: c.Values, b: c.Values) -> c.Values: ...


class Writer(Operator):
    critic: Writes[Critic] = Role("p")

    def __call__(self, a: c.Values, b: c.Values) -> c.Values: ...


class Start(Operator):
    def __call__(self, batch: PromptBatch) -> c.Values: ...


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Up to eight nodes that read or write one of two critics, each fed by two nodes before it."""
    batch = {field: Edge("batch", field.name) for field in Start().signature.fields}
    nodes = {"batch": Node("batch", Input(PromptBatch), {}), "n0": Node("n0", Start().named("n0"), batch)}
    for i in range(1, draw(st.integers(1, 8)) + 1):
        kind = draw(st.sampled_from([Plain, Reader, Writer]))
        operator = Plain() if kind is Plain else kind(critic=Role(draw(st.sampled_from(["p", "q"]))))
        inputs = {PortField(port): Edge(f"n{draw(st.integers(0, i - 1))}", "values") for port in ("a", "b")}
        nodes[f"n{i}"] = Node(f"n{i}", operator.named(f"n{i}"), inputs)
    return Graph.build("random", nodes, list(nodes))


@given(graphs())
def test_every_order_respects_data_and_state(graph: Graph) -> None:
    def needs(name: str) -> set[str]:
        sources = graph[name].sources
        return set(sources).union(*(needs(source) for source in sources))

    def uses(kind: type) -> list[tuple[str, str]]:
        return [(n.name, n.operator.critic.name) for n in graph.nodes.values() if isinstance(n.operator, kind)]

    before = {(source, node.name) for node in graph.nodes.values() for source in node.sources}
    before |= {(r, w) for r, a in uses(Reader) for w, b in uses(Writer) if a == b and w not in needs(r)}
    plan = Plan(graph)
    try:
        order = ["batch", *names(plan)]
    except GraphError as error:
        cycle = [*error.facts["nodes"], error.facts["nodes"][0]]
        assert error.code == "graph.weights-cycle" and len(cycle) > 2
        assert all(hop in before for hop in pairwise(cycle))
    else:
        assert sorted(order) == sorted(graph.nodes)
        assert all(order.index(a) < order.index(b) for a, b in before)
        # a wave holds what must wait for as many nodes, one after another, as there are waves before it
        waits = dict.fromkeys(["batch"], 0)
        for name in order[1:]:
            waits[name] = 1 + max((waits[a] for a, b in before if b == name), default=0)
        assert waits | {"batch": 0} == {"batch": 0} | {n.name: i for i, w in enumerate(plan.waves, 1) for n in w}
