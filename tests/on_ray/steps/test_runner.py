"""Tests of `flowrl/distributed/runner.py`: steps on Ray with toy engines.

They cover distribution of rows, traffic, concurrency, and turns.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flowrl.core.graphs.after import After
from flowrl.core.graphs.plan import Plan
from flowrl.data.proto.dataproto import DataProto
from flowrl.distributed.hosts.wire import pack
from flowrl.distributed.place import Colocate, Split
from flowrl.distributed.runner import Traffic
from flowrl.errors import DataError, NodeError
from flowrl.graphs import grpo, ppo
from flowrl.run.engine.steps import Steps
from flowrl.run.engine.timeline import Span
from flowrl.run.engine.weights import TrainedWeights
from flowrl.run.placement.place import lay_out
from flowrl.run.prediction.pretend import PretendRunner, blank_batch
from flowrl.run.training.job import Job
from tests.on_ray.process_leaks import leaves_nothing, process_ids
from tests.on_ray.toys import (
    Desk,
    GroupScore,
    Picky,
    Spoils,
    ToyRollout,
    ToyTrainer,
    ToyTrainerEngine,
    assert_same_numbers,
    toy_job,
    without_placement,
)
from tests.support.errors import raises
from tests.support.jobs import prompt_batch, proto
from tests.support.paper import fixed
from tests.support.rewards import digits

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

PROMPTS = [[11, 12], [13], [14, 15, 16, 17, 18], [19, 20, 21], [22]]


def graph_of(algorithm: str) -> Any:
    if algorithm == "ppo":
        return ppo(digits, n=1, max_new_tokens=6, ppo_epochs=2)
    return grpo(digits, n=3, max_new_tokens=6)


def run(executor: Any, rows: int, steps: int, keep: tuple[str, ...] = ()) -> list[Any]:
    executor.sync()
    return [executor.step(proto(prompt_batch(PROMPTS[:rows])), step, return_nodes=keep) for step in range(steps)]


def same(a: DataProto, b: DataProto) -> None:
    """Equal bit for bit, without the positions of padding, which have no meaning."""
    assert a.columns.keys() == b.columns.keys()
    assert attended(a).digest() == attended(b).digest()


def attended(data: DataProto) -> DataProto:
    if "position_ids" not in data:
        return data
    return DataProto({**data.columns, "position_ids": data["position_ids"] * data["attention_mask"]})


def refuse_difference(local: list[Any], remote: list[Any]) -> None:
    """Compare all columns, values (without the transport of weights) and metrics of all nodes."""
    for a, b in zip(local, remote, strict=True):
        assert a.columns.keys() == b.columns.keys()
        for node in a.columns:
            same(a.columns[node], b.columns[node])
        assert_same_numbers(b.metrics.compute(), a.metrics.compute())
        assert list(without_placement(a.metrics)) == list(without_placement(b.metrics))
        receipt, other = a.values["sync"]["receipt"], b.values["sync"]["receipt"]
        assert (receipt.version, receipt.digest, receipt.bytes) == (other.version, other.digest, other.bytes)
        assert (receipt.transport, other.transport) == ("copy", "object store")


@pytest.mark.parametrize(
    ("algorithm", "rows", "ranks", "place"),
    [
        ("ppo", 5, {"actor": 2, "ref": 3, "critic": 2, "rollout": 1}, Colocate(3)),
        ("grpo", 3, {"actor": 2, "ref": 2, "rollout": 1}, Split(2, 1)),
        pytest.param(
            "ppo", 2, {"actor": 1, "ref": 2, "critic": 3, "rollout": 2}, Split(3, 2), marks=pytest.mark.nightly
        ),
    ],
)
def test_any_number_of_ranks_is_bit_equal_to_one_process(
    algorithm: str, rows: int, ranks: dict[str, int], place: Any, tiny: str, tmp_path: Path
) -> None:
    """Numbers of rows that the ranks do not divide, and fewer rows than ranks."""
    graph = graph_of(algorithm)
    keep = tuple(graph.nodes)
    with toy_job(graph, tmp_path / "local", tiny).open(seed=3) as executor:
        local = run(executor, rows, 3, keep)
    with leaves_nothing() as processes, toy_job(graph, tmp_path / "ray", tiny, ranks, place).open(seed=3) as executor:
        processes += process_ids(executor).values()
        remote = run(executor, rows, 3, keep)
        refuse_difference(local, remote)
        # Without returned nodes, no tensor reaches the driver, and the prompts are put once.
        executor.runner.traffic = Traffic()
        executor.step(proto(prompt_batch(PROMPTS[:rows])), 3)
        assert executor.runner.traffic.driver == 0
        assert 0 < executor.runner.traffic.input < 4096
    events = Desk(str(tmp_path / "ray")).events()
    shares = [event for event in events if (event["role"], event["what"]) == ("ref", "log_probs")]
    assert Counter(event["rank"] for event in shares) == dict.fromkeys(range(ranks["ref"]), 4)
    total = rows * (3 if algorithm == "grpo" else 1)
    assert sum(event["rows"] for event in shares) == 4 * total
    updates = [event for event in events if (event["role"], event["what"]) == ("actor", "update")]
    assert sum(event["rows"] for event in updates) == 4 * total  # ranks have disjoint rows


def test_hosts_fetch_only_the_columns_that_their_nodes_read(
    tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With one rank each, hosts fetch the packed size of the columns that their nodes read."""
    graph = graph_of("grpo")
    with leaves_nothing() as processes, toy_job(graph, tmp_path / "desk", tiny, place=Colocate(1)).open() as executor:
        processes += process_ids(executor).values()
        keep = tuple(graph.nodes)
        executor.sync()
        executor.runner.traffic = Traffic()
        result = executor.step(proto(prompt_batch(PROMPTS[:4])), 0, return_nodes=keep)
        fetched, driver = executor.runner.traffic.hosts, executor.runner.traffic.driver
        produced = {
            (node, name): pack(column).nbytes
            for node, p in result.columns.items()
            for name, column in p.columns.items()
        }
        reads = [(edge.node, edge.output) for node in graph.nodes.values() for edge in node.inputs.values()]
        assert fetched == sum(produced[edge] for edge in reads if edge in produced)
        assert driver == sum(size for size in produced.values())
        # Padding is not sent: a batch twice as wide costs as much as the narrow one.
        executor.runner.traffic = Traffic()
        executor.step(proto(prompt_batch(PROMPTS[:4])), 0)
        narrow = executor.runner.traffic.hosts
        executor.runner.traffic = Traffic()
        executor.step(proto(prompt_batch(PROMPTS[:4], width=100)), 0)
        assert abs(executor.runner.traffic.hosts - narrow) < 0.35 * narrow
        # Errors name the node, and the executor can continue.
        with raises("step.missing-columns", node="batch", missing=("prompt_mask",)):
            executor.step(proto(prompt_batch(PROMPTS[:4])).drop("prompt_mask"), 1)
        desk = Desk(str(tmp_path / "desk"))
        desk.fail("ref.log_probs")
        facts = {"node": "ref_log_prob", "step": 8, "host": "ref rank 0", "error": "ValueError"}
        with raises("step.node-failed", **facts) as caught:
            executor.step(proto(prompt_batch(PROMPTS[:4])), 7)
        assert "ref.log_probs was set to fail" in caught.value.message
        assert "inputs: rollout.input_ids: int64[12, " in caught.value.message
        assert isinstance(caught.value.__cause__, ValueError)
        assert "toys.py" in caught.value.__notes__[0]
        executor.sync()
        # Warnings of a node in its process are logged in the driver.
        executor.state.update({"mismatch.seen": {"steps": 10, "largest": 0.0, "alarm": False}})
        again = executor.step(proto(prompt_batch(PROMPTS[:4])), 8)
        assert again.metrics["actor/trained"].compute() == 12
        [warning] = [record for record in caplog.records if record.name.endswith("corrections")]
        assert warning.getMessage().startswith("mismatch, step 11: the engine's log-probs differ from the trainer's by")
        assert executor.state["mismatch.seen"] == {"steps": 11, "largest": 0.0, "alarm": True}


def test_the_first_node_that_wrote_nan_is_named_with_the_row_of_the_step(tiny: str, tmp_path: Path) -> None:
    """Not the row of the rank, which has 2 of the 5 rows at most."""
    graph = ppo(digits, n=1, max_new_tokens=6).edit(insert={"spoils": After("ref_log_prob", Spoils(22))})
    graph = graph.edit(insert={"picky": After("spoils", Picky(0))})
    with toy_job(graph, tmp_path, tiny, {"ref": 3}, Colocate(3)).open(seed=3) as executor:
        executor.sync()
        with raises("step.node-failed", node="picky", step=1, origin="spoils.ref_log_prob", row=4, token=0) as caught:
            executor.step(proto(prompt_batch(PROMPTS)), 0)
    assert caught.value.message.startswith("spoils wrote nan in step 1: ref_log_prob at row 4, token 0 (")
    assert "Then picky failed in step 1 on ref rank " in caught.value.message
    assert "ref_log_prob: float32[2, 6]" in caught.value.message


def test_independent_nodes_run_concurrently(tiny: str, tmp_path: Path) -> None:
    """Old log-prob, reference and value pass a barrier that only concurrent nodes can pass."""
    desk = tmp_path / "desk"
    job = toy_job(graph_of("ppo"), desk, tiny, place=Split(3, 1))
    Desk(str(desk)).meet(["actor.log_probs", "ref.log_probs", "critic.values"])
    with leaves_nothing() as processes, job.open() as executor:
        processes += process_ids(executor).values()
        run(executor, 3, 2)
        assert len({plan.slots for plan in executor.runner.hosts.processes}) == 4
    # Updates of actor and critic do not wait for each other either, and no engine sleeps.
    assert not [event for event in Desk(str(desk)).events() if event["what"] in ("sleep", "wake")]


def turns_of(spans: list[Span]) -> list[str]:
    """The nodes on the slots, and the sleeps and wakes between them, in order, from the second step on."""
    shown = [span for span in spans if span.kind == "wait" or (span.kind == "node" and "general" not in span.place)]
    names = [span.name for span in sorted(shown, key=lambda span: span.start)]
    return names[len(names) - names[::-1].index("generate") :]


def test_processes_take_turns_on_one_slot(tiny: str, tmp_path: Path) -> None:
    """On a shared slot only the working process is awake, in a sync both sides in turn. The pretend runner takes the
    same turns."""
    desk = tmp_path / "desk"
    job = toy_job(graph_of("ppo"), desk, tiny, place=Colocate(1))
    with leaves_nothing() as processes, job.open() as executor:
        processes += process_ids(executor).values()
        run(executor, 3, 2)
        kinds = Counter(span.kind for span in executor.timeline.spans)
        assert kinds["wait"] > 0
        assert kinds["transfer"] > 0
    plan, costs = Plan(job.graph), fixed(**dict.fromkeys(job.graph.nodes, 1.0))
    runner = PretendRunner(lay_out(job.graph, Colocate(1)), costs, job.graph.bindings)
    pretended = Steps(plan, runner, 0, TrainedWeights(plan, runner, 0))
    pretended.sync()
    for step in range(2):
        pretended.step(blank_batch(job.graph, 3), step)
    assert turns_of(pretended.timeline.spans) == turns_of(executor.timeline.spans)
    assert turns_of(executor.timeline.spans).count("wake") >= 4
    awake: set[str] = set()
    worked = Counter[str]()
    for event in Desk(str(desk)).events():
        match event["what"]:
            case "build":
                awake.add(event["role"])
            case "sleep":
                awake.remove(event["role"])
            case "wake":
                awake.add(event["role"])
            case work:
                assert awake == {event["role"]}, event
                worked[f"{event['role']}.{work}"] += 1
        assert len(awake) <= 1
    assert worked["actor.weights"] == worked["rollout.sync"] == 3


def test_groups_are_not_split_over_ranks(tiny: str, tmp_path: Path) -> None:
    """With ``granularity = "group"``, no rank gets a part of a group."""
    graph = graph_of("grpo").edit(replace={"ref_log_prob": GroupScore()})
    desk = tmp_path / "desk"
    with toy_job(graph, tmp_path / "local", tiny).open() as executor:
        local = run(executor, 5, 2, tuple(graph.nodes))
    with leaves_nothing() as processes, toy_job(graph, desk, tiny, {"ref": 2}, Colocate(2)).open() as executor:
        processes += process_ids(executor).values()
        refuse_difference(local, run(executor, 5, 2, tuple(graph.nodes)))
    rows = [
        event["rows"] for event in Desk(str(desk)).events() if event["what"] == "log_probs" and event["role"] == "ref"
    ]
    assert len(rows) == 4
    assert all(count % 3 == 0 for count in rows)
    assert sum(rows) == 30


def test_an_error_of_one_rank_is_reported_as_its_error_and_not_as_a_death(tiny: str, tmp_path: Path) -> None:
    """One of two ranks raises: the error names it."""
    job: Job = toy_job(graph_of("grpo"), tmp_path / "desk", tiny, {"ref": 2}, Colocate(2, restart="role"))
    with leaves_nothing() as processes, job.open() as executor:
        processes += process_ids(executor).values()
        run(executor, 2, 1)
        Desk(str(tmp_path / "desk")).fail("ref.log_probs")
        with raises("step.node-failed", node="ref_log_prob", step=2, error="ValueError") as one:
            executor.step(proto(prompt_batch(PROMPTS[:2])), 1)
        assert one.value.facts["host"] in ("ref rank 0", "ref rank 1")
        with pytest.raises(NodeError) as caught:
            executor.step(proto(prompt_batch(PROMPTS[:2]))[:0], 1)
        assert isinstance(caught.value.__cause__, DataError)


@pytest.mark.parametrize("restart", ["never", "role"])
def test_an_engine_that_loses_its_weights_asleep_is_synced_before_generation(
    restart: Any, tiny: str, tmp_path: Path
) -> None:
    """On one slot with a trainer, which wakes for a save after a step, or for the snapshot of a restart."""
    graph = graph_of("grpo")
    with toy_job(graph, tmp_path / "local", tiny).open(seed=3) as executor:
        local = run(executor, 3, 3)
    desk = tmp_path / "desk"
    job = toy_job(graph, desk, tiny, place=Colocate(1, restart=restart))
    job = job.edit(bind={"rollout": ToyRollout(desk=str(desk), folder=tiny, loses_weights_asleep=True)})
    with leaves_nothing() as processes, job.open(seed=3) as executor:
        processes += process_ids(executor).values()
        executor.sync()
        remote = []
        for step in range(3):
            remote.append(executor.step(proto(prompt_batch(PROMPTS[:3])), step))
            executor.save(tmp_path / f"saved-{step}")
    refuse_difference(local, remote)
    if restart == "never":  # a sync is enough for the next step, too, unless a save follows
        assert sum(event["what"] == "sync" for event in Desk(str(desk)).events()) == 1 + 3 + 2


def test_hosts_have_the_working_directory_of_the_driver(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths are valid on hosts, wherever Ray was started."""
    monkeypatch.chdir(tmp_path)
    job = toy_job(graph_of("grpo"), Path("desk"), tiny, {"actor": 2}, Colocate(2))
    with leaves_nothing() as processes, job.open() as executor:
        processes += process_ids(executor).values()
        run(executor, 2, 1)
        executor.save(Path("saved"))
        executor.load(Path("saved"))
        executor.save_pretrained("actor", "trained")
    assert {event["role"] for event in Desk(str(tmp_path / "desk")).events()} == {"actor", "ref", "rollout"}
    assert (tmp_path / "saved" / "actor" / "state.pt").exists()
    assert (tmp_path / "trained" / "weights.pt").exists()


class OtherFileSystem(ToyTrainer):
    """Its rank 1 behaves as if it were on a machine with other files."""

    def build(self, context: Any) -> ToyTrainerEngine:
        if context.rank == 1:
            exists = os.path.exists
            os.path.exists = lambda path: "saved" not in str(path) and exists(path)  # only in this process
        return super().build(context)


def test_a_checkpoint_in_a_folder_that_is_not_shared_is_refused(tiny: str, tmp_path: Path) -> None:
    desk = tmp_path / "desk"
    job = toy_job(graph_of("grpo"), desk, tiny, place=Colocate(2))
    job = job.edit(bind={"actor": OtherFileSystem(desk=str(desk), folder=tiny, ranks=2)})
    with leaves_nothing() as processes, job.open() as executor:
        processes += process_ids(executor).values()
        run(executor, 2, 1)
        with raises("cluster.folder-not-shared", host="actor rank 1", path=str(tmp_path / "saved")):
            executor.save(tmp_path / "saved")
    assert not [*(tmp_path / "saved").rglob("*")]
    assert all(event["what"] != "save_checkpoint" for event in Desk(str(desk)).events())
