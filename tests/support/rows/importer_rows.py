"""Advantages, losses and their gradients of one step of an imported graph, on given rows and without a model."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.core.graphs.lineage import origin
from flowrl.core.operators.symbols import Edge
from flowrl.data.metrics import Metrics
from flowrl.graph import Graph
from flowrl.operators import Reward
from flowrl.operators.losses.objective import TokenObjective

Columns = Mapping[str, Any]


def rows(seed: int, groups: int, n: int, width: int, scores: str = "reals") -> dict[str, Any]:
    """Random columns of groups of n rows of up to `width` tokens; the first row has all.

    The log-probs of the policy, of the old one, of the engine and of the reference are up to some nats apart, so that
    clips and bounds are reached.

    Args:
        scores: ``"reals"``, or ``"bits"``: 0 and 1.
    """
    draw = torch.Generator().manual_seed(seed)
    number = groups * n
    lengths = torch.randint(1, width + 1, (number,), generator=draw)
    lengths[0] = width
    mask = torch.arange(width) < lengths[:, None]

    def near(log_probs: Tensor, scale: float) -> Tensor:
        return (log_probs + scale * torch.randn(mask.shape, generator=draw)).clamp(max=-0.01)

    log_probs = near(torch.full(mask.shape, -1.5), 0.8)
    old = near(log_probs, 0.3)
    last = mask & (torch.arange(width) == lengths[:, None] - 1)
    score = torch.rand(number, generator=draw) * 4 - 1
    score = (score > 1).float() if scores == "bits" else score
    return {
        "log_probs": log_probs,
        "old_log_probs": old,
        "rollout_log_probs": near(old, 0.2),
        "ref_log_prob": near(old, 2.0),
        "entropies": torch.rand(mask.shape, generator=draw),
        "values": torch.randn(mask.shape, generator=draw),
        "new_values": torch.randn(mask.shape, generator=draw),
        "response_mask": mask,
        "token_level_scores": torch.where(last, score[:, None], 0.0),
        "uid": np.array([f"p{row // n}" for row in range(number)], dtype=object),
    }


def numbers(graph: Graph, x: Columns) -> dict[str, Tensor]:
    """The advantages of a graph, and the loss and the gradient of each update, with all rows in one mini-batch."""
    found: dict[str, Tensor] = {}
    for name, output in (("update_actor", "log_probs"), ("update_critic", "new_values")):
        if name in graph.nodes:
            found |= _of_update(graph, name, x[output], x)
    return found


def _of_update(graph: Graph, name: str, output: Tensor, x: Columns) -> dict[str, Tensor]:
    node, cache = graph.nodes[name], dict[Edge, Any]()
    update: Any = node.operator
    columns = {field.name: _value(graph, edge, x, cache) for field, edge in node.inputs.items() if _read(edge)}
    kl, entropy = getattr(update, "kl", None), getattr(update, "entropy", 0.0)
    objective = TokenObjective(update.loss, update.aggregation, update.norm, kl, entropy)
    leaf = output.clone().requires_grad_()
    given = x["entropies"] if objective.wants_entropy else None
    loss = objective(leaf, given, SimpleNamespace(**columns), objective.weights(columns["response_mask"]), Metrics())
    about = name.removeprefix("update_")
    found = {f"{about} loss": loss.detach(), f"{about} gradient": torch.autograd.grad(loss, leaf)[0]}
    if about == "actor" and "advantages" in columns:
        found["advantages"] = columns["advantages"] * columns["response_mask"]
    return found


_TOKENS = frozenset({"response_mask", "rollout_log_probs", "uid", "old_log_probs", "ref_log_prob", "values"})


def _read(edge: Edge) -> bool:
    """Whether an update reads it without a model: no ids, positions and versions."""
    return edge.output in {*_TOKENS, "advantages", "returns", "token_level_rewards", "token_level_scores"}


def _value(graph: Graph, edge: Edge, x: Columns, cache: dict[Edge, Any]) -> Any:
    """The column of an edge: given, if an engine, a source or a reward function writes it, else computed."""
    edge = origin(graph, edge)
    node = graph.nodes[edge.node]
    if node.is_input or node.uses or isinstance(node.operator, Reward) or edge.output not in node.signature.outputs:
        return x[edge.output]
    if edge not in cache:
        if not node.signature.ports or node.operator.creates_axis("batch"):
            return x[edge.output]
        inputs = {field: _value(graph, one, x, cache) for field, one in node.inputs.items()}
        result: Any = node.operator.run(inputs)
        values = result if isinstance(result, tuple) else (result,)
        cache |= {Edge(node.name, name): value for name, value in zip(node.signature.outputs, values, strict=True)}
    return cache[edge]
