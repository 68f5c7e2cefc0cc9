"""Rules about episodes: rewards, tools, context, and the tokens that scores are placed on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from flowrl.core.graphs.gate import Gate
from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.lineage import generates, line, origin
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.symbols import Edge
from flowrl.protocols.protocols import Critic, Trainer
from flowrl.rules.environment_source import EnvironmentSource
from flowrl.rules.rule import Findings, episodes_of, rule, writers
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
    "Environment rewards must reach an update; a later reward function discards them.",
    "verl-project/verl#2540",
)
def _environment_rewards_count(graph: Graph, prompts: int | None) -> Findings:
    for one, others, readers in _scored(graph):
        if others and one.environment.gives_rewards:
            wire = dict.fromkeys(readers, f"{one.node.name}.token_level_scores")
            yield (
                one.node.name,
                f"Its environment gives rewards, but updates read only those of {', '.join(others)}. Train on the "
                f"environment's rewards: edit(drop={[*others]!r}, wire={wire!r}), or remove them from the environment.",
            )


@rule(
    "FR034",
    "Episodes need a reward, from their environment or another node; otherwise every reward is 0.",
    "huggingface/trl#6427",
)
def _episodes_are_rewarded(graph: Graph, prompts: int | None) -> Findings:
    for one, others, _ in _scored(graph):
        if not others and one.environment.gives_none:
            yield (
                one.node.name,
                "Neither its environment nor another node gives rewards, so every reward is 0. Give rewards in the "
                "environment with Reply(..., reward=1.0), return one from the agent, or add a reward function: "
                "Reward(fn).",
            )


@rule(
    "FR037",
    "The policy's tool calls must be executed, and a turn must remain to read the results.",
    "awslabs/agentcore-rl-toolkit#97",
)
def _tools_are_called(graph: Graph, prompts: int | None) -> Findings:
    for one in _episodes(graph):
        name, used = one.node.name, one.environment.used_of_chat
        if not one.given["tools"]:
            continue
        if one.given["max_turns"] == 1:
            yield (
                name,
                f"It has tools but a single turn, so the policy never reads the result of a call. Allow more turns: "
                f"edit(set={{'{name}.max_turns': 4}}).",
            )
        elif used is not None and not used & _BY_TOOLS:
            yield (
                name,
                f"It offers tools to the policy, but its agent executes no tool calls. Use `await "
                f"chat.answer_by_tools()` in the agent, or remove the tools: edit(set={{'{name}.tools': ()}}).",
            )


@rule(
    "FR038",
    "An answer must leave room in its episode's context, and the context must fit the engine.",
    "NovaSky-AI/SkyRL#406",
)
def _episodes_fit(graph: Graph, prompts: int | None) -> Findings:
    for one in _episodes(graph):
        name, context, turns = one.node.name, one.given["context"], one.given["max_turns"]
        longest = one.given["max_new_tokens"]
        if turns > 1 and longest >= context:
            yield (
                name,
                f"One answer may have {longest} tokens and the whole episode {context}, so the first may leave no "
                f"room for the other {turns - 1} turns. Shorten the answers: edit(set={{'{name}.max_new_tokens': "
                f"{max(1, context // (2 * turns))}}}), or raise context.",
            )
        for role in one.node.reads:
            supported = parameters(graph.bindings[role]).get("max_model_len") if role in graph.bindings else None
            if supported is not None and supported < context:
                yield (
                    name,
                    f"An episode may have {context} tokens, but the engine {role!r} supports {supported}. Lower the "
                    f"context: edit(set={{'{name}.context': {supported}}}), or raise the engine's limit: "
                    f"max_model_len={context}.",
                )


@rule(
    "FR039",
    "Rewards belong on sampled tokens, so whatever places them must read `response_mask`.",
    "verl-project/verl#6392",
)
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
                    f"It places {output} on tokens without reading which of them were sampled, so a score on another "
                    f"token, such as one of an environment's reply, is lost. Add the port `response_mask: "
                    f"ResponseMask` and place scores on the last sampled token.",
                )


@rule(
    "FR046",
    "A model must read each segment of an episode by itself, or its tokens attend to those of other contexts.",
    "huggingface/alignment-handbook#204",
)
def _segments_are_apart(graph: Graph, prompts: int | None) -> Findings:
    asked = [node.name for node in graph.nodes.values() if Effect.ASKED in node.effects]
    segmented = [one.node.name for one in _episodes(graph) if one.given.get("rewrites") == "segment"]
    for name in (*segmented, *asked):
        ids, places = (Edge(name, column) for column in ("input_ids", "position_ids"))
        for node in graph.nodes.values():
            read = {origin(graph, edge) for edge in node.inputs.values()}
            if ids not in read or isinstance(node.initial_operator, Gate):
                continue
            bound = [(role, graph.bindings[role]) for role in (*node.reads, *node.writes) if role in graph.bindings]
            joined = [f"{role!r} is bound to {type(backend).__name__}" for role, backend in bound if _joins(backend)]
            if joined or places not in read:
                keep = f"Keep each episode in one: edit(set={{'{name}.rewrites': 'refuse'}}), or separate"
                yield (
                    node.name,
                    f"The episodes of {name} have segments, but it reads a row as a single sequence"
                    f"{': ' if joined else ''}{', '.join(joined)}. {'Separate' if name in asked else keep} the tokens "
                    f"of a row where its position_ids are 0 (a backend then declares reads_segments).",
                )


@rule(
    "FR047",
    "The rows of another engine of episodes must be of the role that they ask by that name.",
    "NVIDIA-NeMo/Gym#3083",
    everywhere=True,
)
def _asked_by_its_name(graph: Graph, prompts: int | None) -> Findings:
    for node in graph.nodes.values():
        if Effect.ASKED not in node.effects:
            continue
        episodes, given = episodes_of(graph, node), parameters(node.initial_operator)
        [role], name = node.reads, given["other"]
        asked = {use.field.rpartition(".")[2]: use.role for use in episodes.uses if use.asked}
        fitting = next((known for known, other in asked.items() if other == role), None)
        if asked.get(name) == role:
            continue
        fix = f"Name it: edit(set={{'{node.name}.other': {fitting!r}}})"
        if fitting is None and name in asked:
            fix = f"Use the role: edit(set={{'{node.name}.role': Role({asked[name]!r})}})"
        elif fitting is None:
            others = ", ".join(f"{known!r}: Role({other!r})" for known, other in {**asked, name: role}.items())
            fix = f"Let the episodes ask it: edit(set={{'{episodes.name}.others': {{{others}}}}})"
        yield (
            node.name,
            f"It makes rows of the engine {name!r} of the role {role!r}, but {episodes.name} asks "
            f"{', '.join(f'{other!r} as {known!r}' for known, other in asked.items()) or 'no other engine'}. {fix}.",
        )


def _joins(backend: Any) -> bool:
    return not getattr(backend, "reads_segments", False)


def _scores(graph: Graph, node: Node) -> list[tuple[str, tuple[str, ...]]]:
    """The scores that a node writes, with their axes."""
    edges = [edge for edge in graph.types if edge.node == node.name]
    scores = [edge for edge in edges if getattr(graph.types[edge].type, "kind", "") == "score"]
    return [(edge.output, graph.types[edge].axes) for edge in scores if origin(graph, edge) == edge]


def _scored(graph: Graph) -> Iterator[tuple[_Episodes, tuple[str, ...], tuple[str, ...]]]:
    """Episodes; the nodes whose scores updates read instead of theirs, none if only theirs count; and the ports that
    read these. Omits episodes whose scores count together with others."""
    ways = [{n.name: n for n in line(graph, node.name)} for by in (Trainer, Critic) for node, _ in writers(graph, by)]
    for one in _episodes(graph):
        way = {name: node for found in ways if one.node.name in found for name, node in found.items()}
        read = [(f"{node.name}.{place}", origin(graph, e)) for node in way.values() for place, e in node.inputs.items()]
        scores = [(reader, edge.node) for reader, edge in read if _is_score_of(graph, edge, one.node.name)]
        others = tuple(dict.fromkeys(node for _, node in scores if node != one.node.name))
        used = any(node == one.node.name for _, node in scores)
        if used != bool(others):
            yield one, others, tuple(reader for reader, _ in scores if reader.partition(".")[0] not in others)


def _is_score_of(graph: Graph, edge: Edge, name: str) -> bool:
    """Whether it is a score on the tokens of a node."""
    return getattr(graph.types[edge].type, "kind", "") == "score" and f"response@{name}" in graph.types[edge].axes
