"""Rules about critics: whether their values can be believed, and what they are trained towards."""

from __future__ import annotations

from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.lineage import line, own_line
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge
from flowrl.protocols.protocols import Critic, Trainer
from flowrl.rules.rule import Findings, of_kind, policy_lines, read_through, rule, writers, writes


@rule("FR023", "Values that steer a policy are of a critic that is trained.", "hiyouga/LlamaFactory#124")
def _critic_is_trained(graph: Graph, prompts: int | None) -> Findings:
    if writers(graph, Critic):
        return  # then FR005 tells whose values these must be
    for node in policy_lines(graph):
        for role in sorted(read_through([node], Critic)):
            yield (
                node.name,
                f"its values are of {role!r}, which nothing trains, and a policy is trained by them; expected an "
                f"update of it: return UpdateCritic(critic=Role({role!r}))(...) too.",
            )


@rule("FR024", "A critic is trained no later than the policy that its values steer.", "RLinf/RLinf#209")
def _critic_goes_first(graph: Graph, prompts: int | None) -> Findings:
    updates = [(node.name, role, _start(graph, node.name)) for node, role in writers(graph, Critic)]
    for node, _ in writers(graph, Trainer):
        start, critics = _start(graph, node.name), read_through(own_line(graph, node.name), Critic)
        for role in sorted(critics):
            first = min(((began, name) for name, other, began in updates if other == role), default=(0, ""))
            if first[0] > start:
                yield (
                    first[1],
                    f"it trains {role!r} from step {first[0]} on, and {node.name} goes by values of {role!r} from step "
                    f"{start} on, which are those of a new head; expected the critic first: "
                    f"edit(when={{'{node.name}': When(start={first[0]})}}).",
                )


@rule(
    "FR025",
    "A critic learns returns as they were paid, not advantages that were scaled.",
    "luchris429/model-free-opponent-shaping#1",
)
def _returns_are_not_scaled(graph: Graph, prompts: int | None) -> Findings:
    for node, role in writers(graph, Critic):
        for field, edge in of_kind(graph, node, "return"):
            for n in line(graph, edge.node):
                if Effect.SCALED in n.effects and writes(n, "advantage"):
                    yield (
                        node.name,
                        f"its {field} come from {edge}, behind {n.name}, which divides by a standard deviation, so "
                        f"{role!r} learns another unit in each step; expected returns from before {n.name}, as GAE "
                        f"writes them.",
                    )


@rule(
    "FR026",
    "Returns of a critic and advantages by its values are of the same rewards.",
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
                        f"it learns returns of {other}, and {n.name} takes advantages of {own} by its values; expected "
                        f"the same rewards for both: edit(wire={{'{edge.node}.{port}': '{own}'}}).",
                    )


def _start(graph: Graph, name: str) -> int:
    """The first step in which a node can run."""
    return max((when.start for when in graph.whens(name)), default=0)


def _rewards(graph: Graph, node: Node) -> list[tuple[PortField, Edge]]:
    """The rewards or scores that a node reads, with their ports."""
    return of_kind(graph, node, "reward", "score")
