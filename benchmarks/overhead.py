"""Overhead of a graph: tracing, editing and checking one, and running its nodes."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from harness import medians, table

from flowrl import DataProto, Graph, Operator, algorithm
from flowrl.columns import OldLogProbs, RefLogProbs, ResponseMask, TokenLevelScores, Values
from flowrl.core.graphs.plan import Plan
from flowrl.demo.verifier import compute_score
from flowrl.graphs import grpo, ppo
from flowrl.operators import GAE, KLShape, Whiten
from flowrl.operators.advantages.gae import GAEOutput, gae, whiten
from flowrl.operators.advantages.per_token import kl_penalty, select
from flowrl.operators.kl import kl_shape
from flowrl.run.engine.local import local_steps

NODES = 32


class Shift(Operator):
    """A minimal operator."""

    def __call__(self, token_level_scores: TokenLevelScores) -> TokenLevelScores:
        return token_level_scores + 1.0


class Scored(NamedTuple):
    """Input of the part of PPO between the models and the updates."""

    token_level_scores: TokenLevelScores
    old_log_probs: OldLogProbs
    ref_log_prob: RefLogProbs
    values: Values
    response_mask: ResponseMask


@algorithm
def chain(batch: Scored) -> TokenLevelScores:
    """`NODES` sequential nodes."""
    scores = batch.token_level_scores
    for i in range(NODES):
        scores = Shift().named(f"shift_{i}")(scores)
    return scores


def chain_by_functions(batch: Scored) -> torch.Tensor:
    """The same sum without operators."""
    scores = batch.token_level_scores
    for _ in range(NODES):
        scores = scores + 1.0
    return scores


@algorithm
def shaping(batch: Scored) -> GAEOutput:
    """Three real nodes: rewards, advantages, whitening."""
    mask = batch.response_mask
    rewards = KLShape(0.001)(batch.token_level_scores, batch.old_log_probs, batch.ref_log_prob, mask)
    advantages, returns = GAE()(rewards, batch.values, mask)
    return GAEOutput(Whiten()(advantages, mask), returns)


def shaping_by_functions(batch: Scored) -> GAEOutput:
    """The same numbers, with the metrics of `KLShape`, by the functions that the operators call."""
    scores, old, ref, values, mask = batch
    rewards = kl_shape(scores, old, ref, mask, 0.001)
    kl = kl_penalty(old, ref, "k1")
    _ = float(select(kl, mask).sum()) / int(mask.sum())
    advantages, returns = gae(rewards, values, mask, 1.0, 0.95)
    return GAEOutput(whiten(advantages, mask), returns)


def random_batch(rows: int, tokens: int) -> Scored:
    """A mask of all tokens."""
    shape = (rows, tokens)
    return Scored(*(torch.randn(shape) for _ in range(4)), response_mask=torch.ones(shape, dtype=torch.bool))


def of_graphs() -> None:
    """All work before a model loads."""
    first: Graph = ppo(compute_score)
    second = grpo(compute_score)
    data = first.to_dict()
    taken = medians(
        {
            "trace PPO": lambda: ppo(compute_score),
            "trace PPO and edit it to GRPO": lambda: grpo(compute_score),
            "check all rules": lambda: first.check(prompts=32),
            "plan": lambda: Plan(Graph.from_dict(data)).order,
            "fingerprint": first.fingerprint,
            "diff PPO and GRPO": lambda: first.diff(second),
            "draw Mermaid": first.mermaid,
            "write as data": first.to_dict,
            "read from data": lambda: Graph.from_dict(data),
        },
        seconds=5,
    )
    taken["plan"] -= taken["read from data"]  # a new graph per plan, because a graph caches its results
    table(f"A graph of {len(first.nodes)} nodes", ["", "ms"], [[name, f"{1e3 * s:.2f}"] for name, s in taken.items()])


def of_nodes() -> None:
    """The executor, the same operators called by hand, and the bare computation."""
    cases: list[tuple[str, Any, Any, int, tuple[int, int]]] = [
        ("x + 1", chain, chain_by_functions, NODES, (4, 8)),
        ("KLShape, GAE, Whiten", shaping, shaping_by_functions, 3, (256, 28)),
    ]
    rows = []
    for name, flow, functions, nodes, shape in cases:
        batch = random_batch(*shape)
        executor, proto = local_steps(Plan(flow()), {}, 0), DataProto.from_record(batch)
        taken = medians(
            {
                "functions": partial(functions, batch),
                "operators": partial(flow.step, batch),
                "executor": partial(executor.step, proto, 0),
            },
            seconds=5,
        )
        for way, seconds in taken.items():
            over = (seconds - taken["functions"]) / nodes
            numbers = [f"{1e3 * seconds:.3f}", f"{1e6 * over:.0f}", f"{seconds / taken['functions']:.2f}"]
            rows.append([f"{name} {list(shape)}, {nodes} nodes, by {way}", *numbers])
    table("Running nodes", ["", "ms", "over functions, µs per node", "ratio"], rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    of_graphs()
    of_nodes()
