"""Steps on Ray with engines that load nothing: how rows are shared out, what travels, what runs at once, turns."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flowrl.core.graphs.plan import Plan
from flowrl.data.proto.dataproto import DataProto
from flowrl.distributed.hosts.wire import pack
from flowrl.distributed.place import Colocate, Split
from flowrl.distributed.runner import Traffic
from flowrl.errors import DataError, GraphError, NodeError
from flowrl.graphs import grpo, ppo
from flowrl.run.engine.steps import Steps
from flowrl.run.engine.timeline import Span
from flowrl.run.engine.weights import TrainedWeights
from flowrl.run.placement.place import lay_out
from flowrl.run.prediction.pretend import PretendRunner, blank_batch
from flowrl.run.training.job import Job
from tests.on_ray.leftovers import leaves_nothing, process_ids
from tests.on_ray.toys import (
    Desk,
    GroupScore,
    ToyRollout,
    ToyTrainer,
    ToyTrainerEngine,
    assert_same_numbers,
    toy_job,
    wherever,
)
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
    """Bit for bit, but for the positions of padding, which say nothing."""
    assert a.columns.keys() == b.columns.keys()
    assert attended(a).digest() == attended(b).digest()


def attended(data: DataProto) -> DataProto:
    if "position_ids" not in data:
        return data
    return DataProto({**data.columns, "position_ids": data["position_ids"] * data["attention_mask"]})


def refuse_difference(local: list[Any], remote: list[Any]) -> None:
    """Every column of every node, every value but how weights travelled, and every metric: those that ranks report in
    parts, and those that each reports whole."""
    for a, b in zip(local, remote, strict=True):
        assert a.columns.keys() == b.columns.keys()
        for node in a.columns:
            same(a.columns[node], b.columns[node])
        assert_same_numbers(b.metrics.compute(), a.metrics.compute())
        assert list(wherever(a.metrics)) == list(wherever(b.metrics))
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
def test_any_ranks_give_the_bits_of_one_process(
    algorithm: str, rows: int, ranks: dict[str, int], place: Any, tiny: str, tmp_path: Path
) -> None:
    """Rows that the ranks do not divide, and fewer rows than ranks."""
    graph = graph_of(algorithm)
    keep = tuple(graph.nodes)
    with toy_job(graph, tmp_path / "local", tiny).open(seed=3) as executor:
        local = run(executor, rows, 3, keep)
    with leaves_nothing() as processes, toy_job(graph, tmp_path / "ray", tiny, ranks, place).open(seed=3) as executor:
        processes += process_ids(executor).values()
        remote = run(executor, rows, 3, keep)
        refuse_difference(local, remote)
        # Nothing asked for, so no tensor in the driver; the prompts went in once.
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
    assert sum(event["rows"] for event in updates) == 4 * total  # each rank has rows of its own


def test_traffic_is_what_nodes_read(tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One rank each: the bytes that hosts fetched are those of the columns that their nodes read, packed."""
    graph = graph_of("grpo")
    with leaves_nothing() as processes, toy_job(graph, tmp_path / "desk", tiny, place=Colocate(1)).open() as executor:
        processes += process_ids(executor).values()
        keep = tuple(graph.nodes)
        executor.sync()
        executor.runner.traffic = Traffic()
        result = executor.step(proto(prompt_batch(PROMPTS[:4])), 0, return_nodes=keep)
        fetched, driver = executor.runner.traffic.hosts, executor.runner.traffic.driver
        made = {
            (node, name): pack(column).nbytes
            for node, p in result.columns.items()
            for name, column in p.columns.items()
        }
        reads = [(edge.node, edge.output) for node in graph.nodes.values() for edge in node.inputs.values()]
        assert fetched == sum(made[edge] for edge in reads if edge in made)
        assert driver == sum(size for size in made.values())
        # Padding does not travel: a batch twice as wide costs what the narrow one does.
        executor.runner.traffic = Traffic()
        executor.step(proto(prompt_batch(PROMPTS[:4])), 0)
        narrow = executor.runner.traffic.hosts
        executor.runner.traffic = Traffic()
        executor.step(proto(prompt_batch(PROMPTS[:4], width=100)), 0)
        assert abs(executor.runner.traffic.hosts - narrow) < 0.35 * narrow
        # What raises is named, and the executor goes on afterwards.
        with pytest.raises(GraphError, match="the batch lacks prompt_mask"):
            executor.step(proto(prompt_batch(PROMPTS[:4])).drop("prompt_mask"), 1)
        desk = Desk(str(tmp_path / "desk"))
        desk.fail("ref.log_probs")
        with pytest.raises(NodeError, match=r"ref_log_prob failed in step 8 on ref rank 0: ValueError") as caught:
            executor.step(proto(prompt_batch(PROMPTS[:4])), 7)
        assert "ref.log_probs was told to fail" in str(caught.value)
        assert "it was given rollout.input_ids: int64[12, " in str(caught.value)
        assert isinstance(caught.value.__cause__, ValueError)
        assert "toys.py" in caught.value.__notes__[0]
        executor.sync()
        # What a node warns of in its own process is heard here.
        executor.state.update({"mismatch.seen": {"steps": 10, "largest": 0.0, "alarm": False}})
        again = executor.step(proto(prompt_batch(PROMPTS[:4])), 8)
        assert again.metrics["actor/trained"].compute() == 12
        [said] = [record for record in caplog.records if record.name.endswith("corrections")]
        assert said.getMessage().startswith("mismatch, step 11: the engine's log-probs differ from the trainer's by")
        assert executor.state["mismatch.seen"] == {"steps": 11, "largest": 0.0, "alarm": True}


def test_independent_nodes_run_at_once(tiny: str, tmp_path: Path) -> None:
    """Old log-prob, reference and value get through a barrier that only concurrent nodes can pass."""
    desk = tmp_path / "desk"
    job = toy_job(graph_of("ppo"), desk, tiny, place=Split(3, 1))
    Desk(str(desk)).meet(["actor.log_probs", "ref.log_probs", "critic.values"])
    with leaves_nothing() as processes, job.open() as executor:
        processes += process_ids(executor).values()
        run(executor, 3, 2)
        assert len({plan.slots for plan in executor.runner.hosts.processes}) == 4
    # Updates of actor and critic do not wait for each other either; nobody had to sleep.
    assert not [event for event in Desk(str(desk)).events() if event["what"] in ("sleep", "wake")]


def turns_of(spans: list[Span]) -> list[str]:
    """What happens on the slots, and for whom they are cleared, in order, from the second step on."""
    shown = [span for span in spans if span.kind == "wait" or (span.kind == "node" and "general" not in span.place)]
    names = [span.name for span in sorted(shown, key=lambda span: span.start)]
    return names[len(names) - names[::-1].index("generate") :]


def test_one_slot_is_taken_by_turns(tiny: str, tmp_path: Path) -> None:
    """On a shared slot the one who works is awake, and alone; so are both sides of a sync, one after the other. The
    pretend runner takes the same turns."""
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


def test_whole_groups_go_to_one_rank(tiny: str, tmp_path: Path) -> None:
    """A node with a role that wants whole groups: no rank sees a part of one."""
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


def test_an_error_of_one_rank_is_its_own(tiny: str, tmp_path: Path) -> None:
    """One of two ranks raises: it is named, and not taken for a death."""
    job: Job = toy_job(graph_of("grpo"), tmp_path / "desk", tiny, {"ref": 2}, Colocate(2, restart="role"))
    with leaves_nothing() as processes, job.open() as executor:
        processes += process_ids(executor).values()
        run(executor, 2, 1)
        Desk(str(tmp_path / "desk")).fail("ref.log_probs")
        with pytest.raises(NodeError, match=r"ref_log_prob failed in step 2 on ref rank [01]: ValueError"):
            executor.step(proto(prompt_batch(PROMPTS[:2])), 1)
        with pytest.raises(NodeError) as caught:
            executor.step(proto(prompt_batch(PROMPTS[:2]))[:0], 1)
        assert isinstance(caught.value.__cause__, DataError)


@pytest.mark.parametrize("restart", ["never", "role"])
def test_an_engine_that_forgets_asleep_is_synced_before_it_generates(restart: Any, tiny: str, tmp_path: Path) -> None:
    """On one slot with a trainer, which takes its turn for a save after a step, or for what a restart goes back to."""
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
    if restart == "never":  # the sync of a step is good for the next, unless a save has come between
        assert sum(event["what"] == "sync" for event in Desk(str(desk)).events()) == 1 + 3 + 2


def test_paths_are_those_of_the_driver(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes work in its folder, whichever one Ray was started in."""
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


class Elsewhere(ToyTrainer):
    """Its rank 1 is as if it were on a machine with other files."""

    def build(self, context: Any) -> ToyTrainerEngine:
        if context.rank == 1:
            exists = os.path.exists
            os.path.exists = lambda path: "saved" not in str(path) and exists(path)  # in this process alone
        return super().build(context)


def test_a_folder_that_a_rank_does_not_share_gets_no_checkpoint(tiny: str, tmp_path: Path) -> None:
    desk = tmp_path / "desk"
    job = toy_job(graph_of("grpo"), desk, tiny, place=Colocate(2))
    job = job.edit(bind={"actor": Elsewhere(desk=str(desk), folder=tiny, ranks=2)})
    with leaves_nothing() as processes, job.open() as executor:
        processes += process_ids(executor).values()
        run(executor, 2, 1)
        with pytest.raises(DataError, match=r"actor rank 1 is on a machine that does not share .*saved"):
            executor.save(tmp_path / "saved")
    assert not [*(tmp_path / "saved").rglob("*")]
    assert all(event["what"] != "save_checkpoint" for event in Desk(str(desk)).events())
