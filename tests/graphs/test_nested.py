"""Every algorithm of the shelf inside another one, and eagerly: `variants.py`, and `inlining.py` of the kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import Role, algorithm, graphs
from flowrl.backends import TorchRewardTrainer, TorchScorer
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.graph import Graph
from flowrl.graphs import dapo, grpo
from flowrl.operators import Generate
from flowrl.records import PromptBatch
from tests.look.recorded import ALGORITHMS, arguments_of, data_of, graph_of
from tests.nightly import nightly_except
from tests.run.training.interrupted import equal, flat
from tests.support.errors import raises
from tests.support.jobs import bind_tiny
from tests.support.kernel import exact


def merged(name: str) -> Graph:
    """An algorithm under a prefix, in one graph with a node on prompts of its own."""
    rewards, settings = arguments_of(name)
    nested: Any = getattr(graphs, name)
    inputs = graph_of(name).inputs

    def outer(*records: Any) -> Any:
        *own, prompts = records
        return nested.under("inner")(*own, *rewards, **settings), Generate(rollout=Role("other"))(prompts)

    names = [*inputs, "prompts"]
    annotations = {**inputs, "prompts": PromptBatch}
    text = f"def outer_({', '.join(names)}):\n    return outer({', '.join(names)})"
    namespace: dict[str, Any] = {"outer": outer}
    exec(text, namespace)
    function = namespace["outer_"]
    function.__annotations__ = annotations
    return algorithm(function)()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_has_the_same_nodes_inside_another(name: str) -> None:
    alone, whole = graph_of(name), merged(name)
    inner = {node: one for node, one in alone.nodes.items() if not one.is_input}
    assert set(whole.nodes) == {*alone.inputs, "prompts", "generate", *(f"inner_{node}" for node in inner)}
    for node, one in inner.items():
        found = whole[f"inner_{node}"]
        assert found.operator == one.operator and found.when == one.when
        edges = {
            place: edge if edge.node in alone.inputs else edge._replace(node=f"inner_{edge.node}")
            for place, edge in one.inputs.items()
        }
        assert found.inputs == edges
    assert set(whole.sinks) == {"generate", *(f"inner_{sink}" for sink in alone.sinks)}


@pytest.mark.runs
@pytest.mark.parametrize("name", nightly_except(["gspo", "dpo"], [name for name in ALGORITHMS if name != "dapo"]))
def test_an_eager_step_has_the_bits_of_a_step_of_the_graph(name: str, tiny: str, tmp_path: Path) -> None:
    rewards, settings = arguments_of(name)
    others = {
        "teacher": TorchScorer(tiny, device="cpu"),
        "reward_model": TorchRewardTrainer(tiny, device="cpu"),
    }
    job = bind_tiny(graph_of(name), tiny, **others)
    data = data_of(name, tmp_path)
    sources = data if isinstance(data, dict) else {next(iter(job.graph.inputs)): data}
    tokenizer = ChatTokenizer(tiny)
    batches = {name: source.load(tokenizer, 0).next(4) for name, source in sources.items()}
    with job.open() as steps:
        steps.sync()
        steps.step(batches, 0)
        expected = states(steps.runner.engines)
    with job.eager() as session:
        records = [batches[name].to_record(record) for name, record in job.graph.inputs.items()]
        getattr(graphs, name).step(*records, *rewards, **settings)
        found = states(session.engines)
    assert expected.keys() == found.keys() and [key for key in found if not equal(found[key], expected[key])] == []


def states(engines: Any) -> dict[str, Any]:
    return flat({role: one.state_dict() for role, one in engines.items() if hasattr(one, "state_dict")})


def test_two_of_a_kind_need_a_prefix_and_every_input() -> None:
    @algorithm
    def twice(batch: PromptBatch) -> Any:
        return grpo(batch, exact), grpo(batch, exact)

    @algorithm
    def other(batch: PromptBatch) -> Any:
        return dapo(batch, batch, reward_fn=exact)

    with raises("graph.duplicate-name", node="repeat"):
        twice()
    with raises("algorithm.bad-call", algorithm="dapo", expected=("batch",)):
        other()
    with raises("algorithm.bad-call", algorithm="grpo"):
        grpo.under("x")(exact)
    with raises("algorithm.bad-call", given="a b"):
        grpo.under("a b")


def test_a_graph_with_a_lag_does_not_nest() -> None:
    from flowrl.core.graphs.inlining import inline

    with raises("lag.unsupported", graph="grpo"):
        inline(grpo(exact).edit(lag=1), [torch.zeros(1)], {})
