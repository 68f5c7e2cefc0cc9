"""IPO, SimPO, ORPO and KTO train on preferences; each differs from DPO by what its paper changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flowrl import PreferenceData, UnpairedData
from flowrl.data.proto.dataproto import DataProto
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.graph import Graph
from flowrl.graphs import dpo, ipo, kto, orpo, simpo
from flowrl.operators import IPO, KTO, ORPO, MismatchResponses, SimPO
from flowrl.records import UnpairedBatch
from tests.docs.reference.metric_names import undocumented
from tests.support.errors import raises
from tests.support.jobs import bind_tiny
from tests.support.runs import walk

pytestmark = pytest.mark.runs

PAIRS = [{"prompt": f"q{i}", "chosen": "12" * (1 + i % 3), "rejected": "abc"} for i in range(3)]
LABELED = [{"prompt": f"q{i}", "completion": ("12", "abc")[i % 2] * (1 + i % 3), "label": i % 2 == 0} for i in range(6)]


def batch_of(graph: Graph, tiny: str) -> DataProto:
    data = UnpairedData(LABELED) if graph.name == "kto" else PreferenceData(PAIRS)
    return data.load(ChatTokenizer(tiny), 0).all()


@pytest.mark.parametrize(
    ("graph", "roles"),
    [(ipo(), ["actor", "ref"]), (simpo(), ["actor"]), (orpo(), ["actor"]), (kto(), ["actor", "ref"])],
    ids=lambda x: getattr(x, "name", ""),
)
def test_the_loss_falls(graph: Graph, roles: list[str], tiny: str) -> None:
    assert sorted(graph.roles()) == roles and graph.check(prompts=8) == []
    job, batch = bind_tiny(graph, tiny), batch_of(graph, tiny)
    steps = walk(job.graph, **job.build(0))
    found = [steps.step(batch, step).metrics.compute() for step in range(4)]
    assert undocumented(found[0]) == []
    assert found[-1]["actor/pg_loss"] < found[0]["actor/pg_loss"]
    if graph.name == "kto":
        assert found[-1]["actor/kto_desirable"] > found[-1]["actor/kto_undesirable"]
    else:
        assert found[-1][f"actor/{graph.name}_margin"] > found[0][f"actor/{graph.name}_margin"]


def test_the_first_losses_are_those_of_a_policy_at_its_reference(tiny: str) -> None:
    """IPO: ``(1 / (2 tau))**2``; KTO: ``w / 2`` of each row, since its baseline is 0, too."""
    expected = {"ipo": (1 / (2 * 0.25)) ** 2, "kto": (2.0 * 3 + 1.0 * 3) / 6 / 2}
    for graph in (ipo(tau=0.25), kto(desirable=2.0)):
        job = bind_tiny(graph, tiny)
        metrics = walk(job.graph, **job.build(0)).step(batch_of(graph, tiny), 0).metrics.compute()
        assert metrics["actor/pg_loss"] == pytest.approx(expected[graph.name], rel=1e-4)


def test_the_baseline_of_kto_is_the_mean_ratio_of_mismatched_responses(tiny: str) -> None:
    """In the second step, when the policy has moved: by the engines' own log-probs, in float64."""
    job = bind_tiny(kto(beta=0.5), tiny)
    engines, batch = job.build(0), batch_of(job.graph, tiny)
    steps = walk(job.graph, **engines)
    steps.step(batch, 0)
    mixed = MismatchResponses()(batch.to_record(UnpairedBatch))
    moved = (engines["actor"].log_probs(mixed).double() - engines["ref"].log_probs(mixed).double()).sum(1)
    baseline = max(0.0, float(moved.mean()))
    kept = steps.step(batch, 1, return_nodes=["kto_baseline"]).columns["kto_baseline"].columns["kl_baseline"]
    torch.testing.assert_close(kept, torch.full((6,), baseline), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("graph", "lines"),
    [
        (ipo(), 1),
        (simpo(), 3),  # and the reference, which nothing reads
        (orpo(), 3),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_each_is_an_edit_of_dpo(graph: Graph, lines: int) -> None:
    changed = str(dpo().diff(graph)).splitlines()[1:]
    assert len(changed) == lines and any(line.startswith("~ update_actor.loss: DPO(") for line in changed)


def test_settings_reach_the_losses() -> None:
    found = [
        graph["update_actor"].operator.loss
        for graph in (ipo(tau=0.3, per_token=True), simpo(beta=2.5, gamma=0.5), orpo(coef=0.2))
    ]
    assert found == [IPO(0.3, True), SimPO(2.5, 0.5), ORPO(0.2)]
    assert kto(beta=0.3, desirable=2.0, undesirable=0.5)["update_actor"].operator.loss == KTO(0.3, 2.0, 0.5)
    assert all(graph(mini_batch=4)["update_actor"].operator.mini_batch == 4 for graph in (ipo, simpo, orpo, kto))


@pytest.mark.parametrize("algorithm", [ipo, orpo])
def test_settings_of_dpo_that_an_edit_does_not_have_are_refused(algorithm: Any) -> None:
    with raises("algorithm.unsupported-setting", parameter="beta"):
        algorithm(beta=0.1)
    with raises("algorithm.unsupported-setting", parameter="label_smoothing"):
        simpo(label_smoothing=0.1)


def test_a_step_of_kto_with_one_row_is_refused(tiny: str) -> None:
    job = bind_tiny(kto(), tiny)
    batch = UnpairedData(LABELED).load(ChatTokenizer(tiny), 0).next(1)
    with raises("rows.one-row", expected=2):
        walk(job.graph, **job.build(0)).step(batch, 0)
