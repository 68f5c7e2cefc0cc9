"""Overhead of Ray: opening a job, running a node, and a step compared with its critical path.

The critical path sums the seconds of nodes in the same step, each from its first fetch to its last put. With fewer
cores than slots, concurrent nodes slow each other down, which lengthens the path.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from harness import medians, table
from harness.nodes import NODES, Idle, Scores, general_chain, role_chain
from transformers.utils import logging

from flowrl import Colocate, DataProto
from flowrl.backends import TorchRollout
from flowrl.core.graphs.plan import Plan
from flowrl.demo.model import build
from flowrl.demo.run import graphs, training
from flowrl.demo.task import write_dataset
from flowrl.distributed.cluster.cluster import connected
from flowrl.distributed.hosts.wire import pack, unpack
from flowrl.run.engine.local import local_steps
from flowrl.run.engine.timeline import critical_path
from flowrl.run.training.training import Training

STEPS = 6
WARM_START = 60  # steps of the demo's warm start: enough for answers to end


class Bare:
    """The minimal work of a node on Ray: fetch a column, add one, put it."""

    def shift(self, refs: list[Any]) -> Any:
        """The reference of the shifted column."""
        return ray.put(pack(unpack(ray.get(refs[0])) + 1.0))


def of_nodes() -> None:
    """A chain of trivial nodes, run in each way."""
    batch = DataProto.from_record(Scores(torch.randn(4, 8)))
    local = local_steps(Plan(general_chain()), {}, 0)
    bare: Any = ray.remote(num_cpus=0)(Bare).remote()
    column = batch["token_level_scores"]

    def by_hand() -> Any:
        ref = ray.put(pack(column))
        for _ in range(NODES):
            ref = ray.get(bare.shift.remote([ref]))
        return unpack(ray.get(ref))

    place = Colocate(gpus=1)
    job = role_chain().bind(ref=Idle(), place=place)
    with job.open() as at_role:
        general = at_role.fork(Plan(general_chain()), seed=0)
        taken = medians(
            {
                "LocalRunner": lambda: local.step(batch, 0),
                "a bare Ray actor, by hand": by_hand,
                "RayRunner, general host": lambda: general.step(batch, 0),
                "RayRunner, host of a role": lambda: at_role.step(batch, 0),
            },
            seconds=8,
        )
    ray.kill(bare)
    floor = taken["a bare Ray actor, by hand"]
    rows = [[way, f"{1e6 * s / NODES:,.0f}", f"{s / floor:.2f}"] for way, s in taken.items()]
    table(f"{NODES} trivial nodes, one after the other", ["", "µs per node", "vs a bare actor"], rows)


def demo(base: Path) -> Training:
    """The demo's PPO."""
    write_dataset(base / "data")
    return training(graphs()[1], build(base / "model", steps=WARM_START), base / "data", base / "runs", STEPS, seed=0)


def of_steps(whole: Training, started: float) -> None:
    """Demo steps in one process, and on four slots with one role each, with weight transfers to the rollout."""
    place = Colocate(gpus=4)
    opened, lines, paths_seen = [["start Ray", f"{started:.1f}"]], [], []
    ways = {
        "in one process": whole.job,
        "on Ray": replace(
            whole.job.edit(bind={"rollout": TorchRollout(whole.job.graph.bindings["actor"].model)}), place=place
        ),
    }
    for way, job in ways.items():
        begun = time.perf_counter()
        with job.open() as executor:
            opened.append([f"open the job {way}", f"{time.perf_counter() - begun:.1f}"])
            stream = whole.data.load(executor.tokenizer(), seed=0)
            executor.sync()
            makespans, paths, nodes, exports = [], [], [], []
            names: Counter[str] = Counter()
            for step in range(STEPS + 1):
                batch, spans = stream.next(whole.prompts), len(executor.timeline.spans)
                begun = time.perf_counter()
                result = executor.step(batch, step)
                makespans.append(time.perf_counter() - begun)
                path, length = critical_path(executor.plan.network, result.seconds)
                paths.append(length)
                nodes.append(sum(result.seconds.values()))
                exports.append(sum(s.seconds for s in executor.timeline.spans[spans:] if s.place == "driver"))
                names[" → ".join(path)] += 1
        # The first step warms up. The ratio is taken step by step, since steps differ more than ways do.
        over = statistics.median(m / p for m, p in zip(makespans[1:], paths[1:], strict=True))
        cells = (statistics.median(column[1:]) for column in (makespans, paths, nodes, exports))
        lines.append([way, *(f"{1e3 * s:.0f}" for s in cells), f"{over:.2f}"])
        paths_seen.append(f"  critical path {way}, mostly: {names.most_common(1)[0][0]}")
    table("Opening a job", ["", "s"], opened)
    heads = ["PPO on 4 slots", "step, ms", "critical path", "all nodes", "exports", "step / path"]
    table(f"{whole.job.graph.name}: median of {STEPS} steps of 256 rows", heads, lines)
    print("\n".join(paths_seen))


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on CPU slots, wherever this runs
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    begun = time.perf_counter()
    with connected(Colocate(gpus=4)), tempfile.TemporaryDirectory() as base:
        started = time.perf_counter() - begun
        of_nodes()
        of_steps(demo(Path(base)), started)
