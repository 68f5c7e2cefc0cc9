"""Rules about episodes: rewards, tools, context, and the tokens that scores are placed on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.lineage import generates, line, origin
from flowrl.core.operators.symbols import Edge
from flowrl.protocols.protocols import Critic, Trainer
from flowrl.rules.environment_source import EnvironmentSource
from flowrl.rules.rule import Findings, rule, writers
from flowrl.spec import parameters

_BY_TOOLS = frozenset({"answer_by_tools", "calls", "tool"})
"""The members of a chat that execute tool calls."""


class _Episodes(NamedTuple):
    """A node that plays episodes, its parameters, and the source of its environment."""

    node: Node
    given: Mapping[str, Any]
    environment: EnvironmentSource


def _episodes(graph: Graph) -> Iterator[_Episodes]:
    for node in graph.nodes.values():
        given = parameters(node.initial_operator) if generates(node) else {}
        if {"environment", "tools", "max_turns", "context"} <= given.keys():
            yield _Episodes(node, given, EnvironmentSource.of(given["environment"]))


@rule(
    "FR033",
    "What an environment pays reaches an update: a reward function in its place makes it unheard.",
    "verl-project/verl#2540",
)
def _paid_is_heard(graph: Graph, prompts: int | None) -> Findings:
    for one, others, readers in _scored(graph):
        if others and one.environment.gives_rewards:
            wire = dict.fromkeys(readers, f"{one.node.name}.token_level_scores")
            yield (
                one.node.name,
                f"its environment gives rewards, and no update reads them, but those of {', '.join(others)} alone; "
                f"expected one of the two: take rewards out of the environment, or let these count: "
                f"edit(drop={[*others]!r}, wire={wire!r}).",
            )


@rule("FR034", "Somebody pays for an episode: where nobody does, every reward is 0.", "huggingface/trl#6427")
def _somebody_pays(graph: Graph, prompts: int | None) -> Findings:
    for one, others, _ in _scored(graph):
        if not others and one.environment.gives_none:
            yield (
                one.node.name,
                "its environment gives no reward, and no other node does, so every reward is 0; expected some from the "
                "environment, Reply(..., reward=1.0) or what an agent returns, or a reward function: Reward(fn).",
            )


@rule("FR037", "Tools that the policy is told of are called for it.", "awslabs/agentcore-rl-toolkit#97")
def _tools_are_called(graph: Graph, prompts: int | None) -> Findings:
    for one in _episodes(graph):
        name, used = one.node.name, one.environment.used_of_chat
        if not one.given["tools"]:
            continue
        if one.given["max_turns"] == 1:
            yield (
                name,
                f"it has tools and one turn, so the policy never reads what a call gave; expected more: "
                f"edit(set={{'{name}.max_turns': 4}}).",
            )
        elif used is not None and not used & _BY_TOOLS:
            yield (
                name,
                f"its tools are told to the policy, and its agent answers no call; expected "
                f"`await chat.answer_by_tools()` in it, or no tools: edit(set={{'{name}.tools': ()}}).",
            )


@rule("FR038", "An episode fits into its context, and that into its engine.", "NovaSky-AI/SkyRL#406")
def _episodes_fit(graph: Graph, prompts: int | None) -> Findings:
    for one in _episodes(graph):
        name, context, turns = one.node.name, one.given["context"], one.given["max_turns"]
        longest = one.given["max_new_tokens"]
        if turns > 1 and longest >= context:
            yield (
                name,
                f"one answer may have {longest} tokens and the whole episode {context}, so the first may leave no room "
                f"for the other {turns - 1} turns; expected answers that leave some: "
                f"edit(set={{'{name}.max_new_tokens': {max(1, context // (2 * turns))}}}), or a longer context.",
            )
        for role in one.node.reads:
            takes = parameters(graph.bindings[role]).get("max_model_len") if role in graph.bindings else None
            if takes is not None and takes < context:
                yield (
                    name,
                    f"an episode may have {context} tokens, and the engine {role!r} takes {takes}; expected no more "
                    f"than that: edit(set={{'{name}.context': {takes}}}), or an engine that takes more: "
                    f"max_model_len={context}.",
                )


@rule("FR039", "A reward stands on a token that was sampled: who places it reads the mask.", "verl-project/verl#6392")
def _placed_on_the_mask(graph: Graph, prompts: int | None) -> Findings:
    updates = [node.name for by in (Trainer, Critic) for node, _ in writers(graph, by)]
    on_the_way = {node.name for update in updates for node in line(graph, update)}
    for node in graph.nodes.values():
        read = {getattr(graph.types[edge].type, "kind", "") for edge in node.inputs.values()}
        if node.is_input or node.name not in on_the_way or read & {"mask", "score", "reward"}:
            continue
        for output, typed in _scores(graph, node):
            if typed[1:] and typed[1].partition("@")[2] != node.name:
                yield (
                    node.name,
                    f"it writes {output} on tokens, and reads no mask that says which of these were sampled: what "
                    f"stands on another is lost, such as one that an environment said; expected `response_mask: "
                    f"ResponseMask` among its ports, and the score on the last token there.",
                )


def _scores(graph: Graph, node: Node) -> list[tuple[str, tuple[str, ...]]]:
    """The scores that a node writes, with their axes."""
    edges = [edge for edge in graph.types if edge.node == node.name]
    scores = [edge for edge in edges if getattr(graph.types[edge].type, "kind", "") == "score"]
    return [(edge.output, graph.types[edge].axes) for edge in scores if origin(graph, edge) == edge]


def _scored(graph: Graph) -> Iterator[tuple[_Episodes, tuple[str, ...], tuple[str, ...]]]:
    """Episodes; the nodes whose scores updates read in the place of theirs, none where theirs alone count; and the
    ports that read these. Those whose scores count beside others' are left out."""
    ways = [{n.name: n for n in line(graph, node.name)} for by in (Trainer, Critic) for node, _ in writers(graph, by)]
    for one in _episodes(graph):
        way = {name: node for found in ways if one.node.name in found for name, node in found.items()}
        read = [(f"{node.name}.{place}", origin(graph, e)) for node in way.values() for place, e in node.inputs.items()]
        scores = [(reader, edge.node) for reader, edge in read if _is_score_of(graph, edge, one.node.name)]
        others = tuple(dict.fromkeys(node for _, node in scores if node != one.node.name))
        heard = any(node == one.node.name for _, node in scores)
        if heard != bool(others):
            yield one, others, tuple(reader for reader, _ in scores if reader.partition(".")[0] not in others)


def _is_score_of(graph: Graph, edge: Edge, name: str) -> bool:
    """Whether it is a score on the tokens of a node."""
    return getattr(graph.types[edge].type, "kind", "") == "score" and f"response@{name}" in graph.types[edge].axes
