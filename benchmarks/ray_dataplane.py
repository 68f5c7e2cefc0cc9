"""The data plane of a PPO step, compared with one routed through the driver, for columns of two sizes.

Both follow the plan of PPO without computing anything: for each node, a worker process reads its inputs and writes its
outputs.

flowrl: columns stay in the object store, packed without padding; a node fetches those that it reads, and the driver
holds references. All nodes run on workers, including those without a role.

Driver, as in verl's single controller: the driver holds the batch as a TensorDict. It sends all of it to each node with
a role, pickled with `torch.save` like verl's DataProto, and receives the outputs the same way. Nodes without a role run
in the driver and cost nothing here. Generation receives only the prompts.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import ray
import torch
from harness import medians, table
from tensordict import TensorDict

from flowrl import Colocate
from flowrl.columns import ColumnType
from flowrl.core.graphs.graph import Node
from flowrl.core.graphs.plan import Plan
from flowrl.core.operators.symbols import Edge
from flowrl.distributed.cluster.cluster import connected
from flowrl.distributed.hosts.wire import pack, unpack
from flowrl.graph import Graph
from flowrl.graphs import ppo

Columns = dict[str, Any]
SIZES = {"demo": (256, 16, 28), "64 MB": (970, 256, 1024)}  # rows, widths of prompt and response


class Whole:
    """A batch pickled as a whole: tensors in one storage, with `torch.save`, and objects with pickle."""

    def __init__(self, tensors: TensorDict, objects: Columns) -> None:
        self.tensors, self.objects = tensors, objects

    @staticmethod
    def of(columns: Mapping[str, Any]) -> Whole:
        """Tensors and object arrays by name."""
        tensors = {name: column for name, column in columns.items() if isinstance(column, torch.Tensor)}
        rows = len(next(iter(columns.values())))
        return Whole(TensorDict(tensors, batch_size=[rows]), {n: c for n, c in columns.items() if n not in tensors})

    def __getstate__(self) -> Any:
        saved = io.BytesIO()
        torch.save(self.tensors.contiguous().consolidate(), saved)
        return saved.getvalue(), self.objects

    def __setstate__(self, state: Any) -> None:
        saved, self.objects = state
        self.tensors = torch.load(io.BytesIO(saved), weights_only=False)


class Worker:
    """A process with prepared outputs, so that only the transport takes time."""

    def __init__(self, written: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        self.written = written

    def flow(self, reads: Mapping[str, list[Any]], writes: list[str]) -> tuple[int, dict[str, Any]]:
        """flowrl: fetch and unpack columns, pack and put others; return the bytes of both, and references."""
        fetched = [ray.get(refs[0]) for refs in reads.values()]
        for column in fetched:
            unpack(column)
        outputs = {name: pack(self.written[name]) for name in writes}
        moved = sum(column.nbytes for column in (*fetched, *outputs.values()))
        return moved, {name: [ray.put(column)] for name, column in outputs.items()}

    def whole(self, batch: Whole, writes: list[str]) -> Whole:
        """Driver: receive a whole batch as the argument, and return the written columns."""
        return Whole.of({name: self.written[name] for name in writes})


def columns_of(rows: int, prompt: int, response: int) -> Columns:
    """All columns of a PPO step, with ragged prompts and responses: few long ones, many below half the width."""
    draw = np.random.default_rng(0)
    prompts = np.clip(draw.normal(0.5, 0.2, rows) * prompt, 1, prompt).astype(int)
    responses = np.clip(draw.lognormal(-1.2, 0.6, rows) * response, 1, response).astype(int)
    prompt_mask = torch.arange(prompt) >= torch.from_numpy(prompt - prompts)[:, None]
    response_mask = torch.arange(response) < torch.from_numpy(responses)[:, None]
    attended = torch.cat([prompt_mask, response_mask], 1)
    ids = torch.randint(2, 100, attended.shape).masked_fill(~attended, 0)
    text = np.array([chr(97 + i % 26) * int(n) for i, n in enumerate(responses)], dtype=object)
    names = np.array([f"0/{i}/0" for i in range(rows)], dtype=object)

    def per_token() -> torch.Tensor:
        return torch.randn(rows, response).masked_fill(~response_mask, 0.0)

    return {
        "prompts": ids[:, :prompt],
        "prompt_mask": prompt_mask,
        "responses": ids[:, prompt:],
        "input_ids": ids,
        "attention_mask": attended,
        "position_ids": (attended.cumsum(1) - 1).clamp(min=0),
        "response_mask": response_mask,
        "temperature": torch.ones(rows),
        "policy_version": torch.zeros(rows, dtype=torch.int64),
        "token_version": torch.zeros(rows, response, dtype=torch.int64).masked_fill(~response_mask, -1),
        "response_text": text,
        "raw_prompt": np.array([[{"role": "user", "content": "?" * int(n)}] for n in prompts] + [None], object)[:-1],
        "extra_info": np.array([{"index": i} for i in range(rows)], dtype=object),
        **dict.fromkeys(("uid", "row_id", "data_source", "ground_truth"), names),
        **{
            name: per_token()
            for name in (
                "rollout_log_probs",
                "old_log_probs",
                "ref_log_prob",
                "values",
                "token_level_scores",
                "token_level_rewards",
                "advantages",
                "returns",
            )
        },
    }


def written(node: Node) -> list[str]:
    """The columns that a node writes."""
    return [name for name, type in node.signature.outputs.items() if isinstance(type, ColumnType)]


def flow_step(plan: Plan, columns: Columns, worker: Any, counted: dict[str, int]) -> None:
    """A step of flowrl's data plane; `counted` receives the bytes that driver and workers move."""
    refs: dict[Edge, Any] = {}
    through = moved = 0
    for name in plan.graph.inputs:
        for column in written(plan.graph[name]):
            packed = pack(columns[column])
            through += packed.nbytes
            refs[Edge(name, column)] = [ray.put(packed)]
    for node in plan.order:
        reads = {field: refs[edge] for field, edge in node.inputs.items() if edge in refs}
        size, outputs = ray.get(worker.flow.remote(reads, written(node)))
        moved += size
        refs |= {Edge(node.name, column): ref for column, ref in outputs.items()}
    counted["driver"], counted["workers"] = through, moved


def driver_step(plan: Plan, columns: Columns, worker: Any, count: Callable[[Whole], None] = lambda sent: None) -> None:
    """A step in which the driver holds the batch, sends all of it, and merges the outputs."""
    batch: Columns = {column: columns[column] for name in plan.graph.inputs for column in written(plan.graph[name])}
    for node in plan.order:
        if node.home is None:
            batch |= {column: columns[column] for column in written(node)}
        elif node not in plan.syncs:
            generates = "prompt_mask" in {edge.output for edge in node.inputs.values()}
            sent = Whole.of({n: batch[n] for n in ("prompts", "prompt_mask", "row_id")} if generates else batch)
            back = ray.get(worker.whole.remote(sent, written(node))) if written(node) else None
            if back is None:  # an update, which returns metrics
                ray.get(worker.whole.remote(sent, ["temperature"]))
            else:
                batch |= {**back.tensors, **back.objects}
                count(back)
            count(sent)


def compare(graph: Graph, size: str) -> list[list[str]]:
    """Rows of the table for one size."""
    plan, columns = Plan(graph), columns_of(*SIZES[size])
    worker: Any = ray.remote(num_cpus=1)(Worker).remote(columns)
    counted: dict[str, int] = {}
    routed: list[int] = []
    driver_step(plan, columns, worker, lambda sent: routed.append(len(pickle.dumps(sent))))
    taken = medians(
        {
            "flowrl": lambda: flow_step(plan, columns, worker, counted),
            "via the driver": lambda: driver_step(plan, columns, worker),
        },
        seconds=6,
    )
    ray.kill(worker)
    total = sum(column.nbytes for column in columns.values())

    def row(way: str, through: int, moved: int) -> list[str]:
        ratio = taken[way] / taken["via the driver"]
        return [
            f"{size} ({total / 1e6:.2f} MB), {way}",
            f"{through / 1e6:.2f}",
            f"{moved / 1e6:.2f}",
            f"{1e3 * taken[way]:.1f}",
            f"{ratio:.2f}",
        ]

    return [row("flowrl", counted["driver"], counted["workers"]), row("via the driver", sum(routed), sum(routed))]


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with connected(Colocate(gpus=1)):
        graph = ppo("flowrl.demo.verifier:compute_score")
        rows = [row for size in SIZES for row in compare(graph, size)]
    heads = ["a PPO step, all columns", "MB through the driver", "MB to and from workers", "ms", "ratio"]
    table("Transfer of the columns of a step, without computation", heads, rows)
