"""`Rule`: a row of the table of rules, and what the functions of rules share."""

from __future__ import annotations

import bisect
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flowrl.core.graphs.gate import ROWS
from flowrl.core.graphs.graph import Graph, Node, Use
from flowrl.core.graphs.lineage import origin, own_lineage
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.loss import Loss
from flowrl.core.operators.operator_validation import sample_steps
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge
from flowrl.errors import DefinitionError
from flowrl.protocols.protocols import Trainer
from flowrl.spec import parameters

Findings = Iterator[tuple[str, str]]
Check = Callable[[Graph, int | None], Findings]


@dataclass(frozen=True)
class Finding:
    """A violation: the rule's id, the node, and a message with the fix."""

    rule: str
    node: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule} {self.node}: {self.message}"


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    Args:
        id: ``FR001``, ...; never reused for another rule.
        reason: why the rule exists, in one line.
        source: the public issue that it was learned from, as ``owner/repository#number`` on GitHub; may be empty.
        check: yields ``(node, message)``; the second argument is the number of prompts per step, or None.
        everywhere: whether it also checks graphs that train nothing, such as those of validations.
    """

    id: str
    reason: str
    source: str
    check: Check
    everywhere: bool = False


RULES: list[Rule] = []
"""All rules whose modules were imported, including users' rules, by their ids."""

RETIRED = {
    "FR035": "Episodes share no state. flowrl no longer searches the source code of environments for shared state.",
    "FR036": "Coroutines do not block. flowrl no longer searches the source code of environments for blocking calls.",
    "FR040": "Row versions under `spans=True`. `graph.lag` is the only setting for spans; no node can contradict it.",
}
"""The ids of removed rules, which are never reused: what each required, and why it was removed."""


def rule(id: str, reason: str, source: str = "", everywhere: bool = False) -> Callable[[Check], Check]:
    """Register a function as a rule, with the fields of `Rule`; it then checks every graph."""

    def register(check: Check) -> Check:
        for other in [other for other in RULES if other.id == id]:
            if (before := _location(other.check)) != (location := _location(check)):
                raise DefinitionError(
                    f"The rule id {id} is already taken by {before}. Give {location} an id of its own, such as LAB001.",
                    code="rule.duplicate-id",
                    rule=id,
                    location=location,
                    taken_by=before,
                )
            RULES.remove(other)
        bisect.insort(RULES, Rule(id, reason, source, check, everywhere), key=lambda rule: rule.id)
        return check

    return register


def _location(check: Check) -> str:
    """The file and function of a rule."""
    return f"{inspect.getfile(check)}:{check.__qualname__}"


def writers(graph: Graph, protocol: type) -> list[tuple[Node, str]]:
    """The nodes that write a role through `protocol`, with the role."""
    uses = [(node, use) for node in graph.nodes.values() for use in node.uses if use.mode == "writes"]
    return [(node, use.role) for node, use in uses if use.goes_through(protocol)]


def policy_lines(graph: Graph) -> list[Node]:
    """The nodes on the way to updates of policies, each once."""
    return list({n.name: n for node, _ in writers(graph, Trainer) for n in own_lineage(graph, node.name)}.values())


def read_through(nodes: Iterable[Node], protocol: type) -> set[str]:
    """The roles that these nodes read through `protocol`."""
    return {use.role for node in nodes for use in node.uses if use.mode == "reads" and use.goes_through(protocol)}


def of_kind(graph: Graph, node: Node, *kinds: str) -> list[tuple[PortField, Edge]]:
    """The ports through which a node reads columns of these kinds, and the edges that wrote them."""
    read = [(f, edge) for f, edge in node.inputs.items() if getattr(graph.types[edge].type, "kind", None) in kinds]
    return [(f, origin(graph, edge)) for f, edge in read]


def writes(node: Node, kind: str) -> bool:
    """Whether a node writes a column of this kind; a gate does not write the columns that it passes."""
    outputs = node.signature.outputs.items()
    return kind in {getattr(t, "kind", None) for name, t in outputs if PortField(ROWS, name) not in node.inputs}


def log_probs(nodes: Iterable[Node], kind: str) -> Iterator[Use]:
    """The uses of roles by which `nodes` compute log-probs of `kind`."""
    for node in nodes:
        if writes(node, kind):
            yield from (use for use in node.uses if use.mode == "reads")


TRUNCATIONS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""The parameters of operators that truncate the distribution they sample from, with values that do not."""

PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""The parameters of operators that penalize tokens of the context, with values that do not."""


def episodes_of(graph: Graph, node: Node) -> Node:
    """The node that plays the episodes whose other side a node with `Effect.ASKED` writes."""
    return graph[next(origin(graph, edge).node for field, edge in node.inputs.items() if field.name == "asked")]


def sampling_of(graph: Graph, node: Node) -> tuple[str, list[dict[str, Any]]]:
    """The path of the parameters by which a node's tokens are sampled, and their values in each sample step."""
    if Effect.ASKED not in node.effects:
        return node.name, [parameters(now) for now in sample_steps(node.operator)]
    episodes, other = episodes_of(graph, node), parameters(node.initial_operator)["other"]
    given = [parameters(now).get("others_sampling", {}) for now in sample_steps(episodes.operator)]
    if any(other not in by_name for by_name in given):
        return sampling_of(graph, episodes)
    return f"{episodes.name}.others_sampling.{other}", [parameters(by_name[other]) for by_name in given]


def sampling(graph: Graph, node: Node) -> dict[str, float]:
    """The parameters that make a node sample greedily, as ``"node.parameter"``, with values that do not."""
    (path, [given, *_]), free = sampling_of(graph, node), {"temperature": 1.0, "top_k": 0, "min_p": 0.0}
    greedy = {
        "temperature": given.get("temperature") != 1.0,
        "top_k": given.get("top_k") == 1,
        "min_p": given.get("min_p") == 1,
    }
    every = {f"{path}.{name}": value for name, value in free.items() if greedy[name]}
    return every or {f"{path}.temperature": 1.0}


def whole_distribution(graph: Graph, node: Node) -> dict[str, float]:
    """The parameters that make a node sample from another distribution than the policy's, as ``"node.parameter"``, with
    values that do not."""
    (path, [given, *_]), free = sampling_of(graph, node), TRUNCATIONS | PENALTIES
    found = {f"{path}.{name}": value for name, value in free.items() if given.get(name, value) != value}
    return found or {f"{path}.{name}": value for name, value in TRUNCATIONS.items()}


def set_role(use: Use, role: str) -> str:
    """The edit that gives a node another role: ``edit(set={'old_log_prob.actor': Role('actor')})``."""
    return set_roles([use], role)


def set_roles(uses: Iterable[Use], role: str) -> str:
    """The edit that gives several nodes another role."""
    roles = ", ".join(f"'{use.node}.{use.field}': Role({role!r})" for use in uses)
    return f"edit(set={{{roles}}})"


def repeated(graph: Graph, name: str, times: int) -> str:
    """The edit that gives the node `name` several rows per prompt."""
    sources = [node for node in graph.nodes.values() if node.name in graph.ancestors(name)]
    repeats = [n.name for n in sources if "n" in parameters(n.operator) and n.operator.creates_axis("batch")]
    if repeats:
        return f"edit(set={{'{repeats[0]}.n': {times}}})"
    if len(graph.inputs) == 1 and "repeat" not in graph:
        return f"edit(insert={{'repeat': After('{next(iter(graph.inputs))}', Repeat({times}))}})"
    return f"insert Repeat({times}) before the node that generates"


def losses_of(update: Node) -> Iterator[Loss]:
    """The losses among an update's parameters."""
    yield from (value for value in parameters(update.initial_operator).values() if isinstance(value, Loss))


def kinds_of_loss(loss: Loss) -> set[str]:
    """The kinds of columns that a loss reads."""
    return {str(getattr(t, "kind", "")) for t in loss.signature.fields.values()}
