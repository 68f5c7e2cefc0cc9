"""Rules about critics: whether their values are trained, and on which returns."""

from __future__ import annotations

from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.lineage import line, own_lineage
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge
from flowrl.protocols.protocols import Critic, Trainer
from flowrl.rules.inference import effects
from flowrl.rules.rule import Findings, of_kind, policy_lines, read_through, rule, writers, writes


@rule("FR023", "Values that a policy trains with must come from a trained critic.", "hiyouga/LlamaFactory#124")
def _critic_is_trained(graph: Graph, prompts: int | None) -> Findings:
    if writers(graph, Critic):
        return  # then FR005 checks whose values these are
    for node in policy_lines(graph):
        for role in sorted(read_through([node], Critic)):
            yield (
                node.name,
                f"Its values come from {role!r}, which nothing trains, but a policy trains with them. Train the "
                f"critic: return UpdateCritic(critic=Role({role!r}))(...) too.",
            )


@rule("FR024", "A critic must start training no later than the policy that uses its values.", "RLinf/RLinf#209")
def _critic_goes_first(graph: Graph, prompts: int | None) -> Findings:
    updates = [(node.name, role, _start(graph, node.name)) for node, role in writers(graph, Critic)]
    for node, _ in writers(graph, Trainer):
        start, critics = _start(graph, node.name), read_through(own_lineage(graph, node.name), Critic)
        for role in sorted(critics):
            first = min(((since, name) for name, other, since in updates if other == role), default=(0, ""))
            if first[0] > start:
                yield (
                    first[1],
                    f"It trains {role!r} from step {first[0]} on, but {node.name} uses values of {role!r} from step "
                    f"{start} on, when its head is untrained. Start the policy no earlier: edit(when={{'{node.name}': "
                    f"When(start={first[0]})}}).",
                )


@rule(
    "FR025",
    "A critic must learn unscaled returns, not returns of scaled advantages.",
    "luchris429/model-free-opponent-shaping#1",
)
def _returns_are_not_scaled(graph: Graph, prompts: int | None) -> Findings:
    for node, role in writers(graph, Critic):
        for field, edge in of_kind(graph, node, "return"):
            for n in line(graph, edge.node):
                if Effect.SCALED in effects(graph, n) and writes(n, "advantage"):
                    yield (
                        node.name,
                        f"Its {field} come from {edge}, after {n.name} divided by a standard deviation, so the unit "
                        f"that {role!r} learns changes in each step. Wire returns from before {n.name}, such as those "
                        f"of GAE.",
                    )


@rule(
    "FR026",
    "A critic's returns, and advantages that use its values, must come from the same rewards.",
    "NovaSky-AI/SkyRL#2104",
)
def _of_the_same_rewards(graph: Graph, prompts: int | None) -> Findings:
    policies = policy_lines(graph)
    for node, role in writers(graph, Critic):
        for _, edge in of_kind(graph, node, "return"):
            learned = _rewards(graph, graph[edge.node])
            for n in policies:
                values = [e.node for _, e in of_kind(graph, n, "value")]
                of_role = any(role in read_through(line(graph, name), Critic) for name in values)
                paid = _rewards(graph, n) if of_role and writes(n, "advantage") else []
                if learned and paid and {e for _, e in learned} != {e for _, e in paid}:
                    (port, other), (_, own) = learned[0], paid[0]
                    yield (
                        node.name,
                        f"It learns returns of {other}, but {n.name} computes advantages of {own} with its values. "
                        f"Use the same rewards for both: edit(wire={{'{edge.node}.{port}': '{own}'}}).",
                    )


def _start(graph: Graph, name: str) -> int:
    """The first step in which a node can run."""
    return max((when.start for when in graph.whens(name)), default=0)


def _rewards(graph: Graph, node: Node) -> list[tuple[PortField, Edge]]:
    """The rewards or scores that a node reads, with their ports."""
    return of_kind(graph, node, "reward", "score")
