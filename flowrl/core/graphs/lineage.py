"""Lineage of rows: which responses an update trains on, and how many rows each prompt has.

Names of roles and nodes do not matter. The axes of a column record which node created them; this separates the
responses that are trained on from others that are only read (a baseline's, a judge's, an opponent's).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flowrl.columns import ColumnType
from flowrl.core.graphs.gate import ROWS, Gate
from flowrl.core.graphs.graph import Graph, Node, Use
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge
from flowrl.protocols.protocols import Synced
from flowrl.protocols.scorers import Follower

_ENCODES = {Effect.RETOKENIZES, Effect.ASKED}


def line(graph: Graph, name: str) -> list[Node]:
    """The node and its ancestors, in the graph's order."""
    names = graph.ancestors(name) | {name}
    return [node for node in graph.nodes.values() if node.name in names]


def transfers(node: Node) -> bool:
    """Whether a node sends the weights of one role to another: a sync, or an update of a reference."""
    return node.is_sync or any(use.mode == "writes" and use.goes_through(Follower) for use in node.uses)


def generates(node: Node) -> bool:
    """Whether an engine generates responses in this node."""
    return any(use.mode == "reads" and not use.asked and use.goes_through(Synced) for use in node.uses)


def makers(graph: Graph, name: str) -> list[Node]:
    """The nodes that created the tokens that an update reads, back to sampling, in the graph's order.

    Empty if the tokens come from the data. An update that reads no tokens may train on the output of any ancestor.
    """
    made = _makers(graph, name)
    return [node for node in line(graph, name) if made is None or node.name in made]


def trained_on(graph: Graph, name: str) -> list[Node]:
    """Those of the `makers` in which an engine generates responses."""
    return [node for node in makers(graph, name) if generates(node)]


def samplers(graph: Graph, name: str) -> list[Use]:
    """The uses of the engines that sample what an update trains on."""
    uses = (use for node in trained_on(graph, name) for use in node.uses if use.mode == "reads" and not use.asked)
    return [use for use in uses if use.goes_through(Synced)]


def own_lineage(graph: Graph, name: str) -> list[Node]:
    """The ancestors of an update, itself included, that read or write columns of the tokens that it reads."""
    made = _makers(graph, name)
    if made is None:
        return line(graph, name)
    found = []
    for node in line(graph, name):
        written = (Edge(node.name, output) for output in node.signature.outputs)
        if node.name == name or made & set(_makers_of(graph, (*node.inputs.values(), *written))):
            found.append(node)
    return found


def response_makers(graph: Graph, name: str) -> set[str]:
    """The nodes that created the axes, except for rows, of a node's inputs: those that generate, if it reads scores."""
    return set(_makers_of(graph, (origin(graph, edge) for edge in graph[name].inputs.values())))


def vocabularies(graph: Graph) -> dict[str, set[str]]:
    """The roles whose engines read tokens of the graph, by the node that retokenized them or has them from another
    engine; ``""`` for the data's tokens. Other roles, such as a judge, read text and tokenize it."""
    found: dict[str, set[str]] = {}
    for node in graph.nodes.values():
        if read := [*_tokens(graph, node)]:
            makers = dict.fromkeys(_makers_of(graph, read))
            encoders = [name for name in makers if _ENCODES & graph[name].effects]
            found.setdefault(next(iter(encoders), ""), set()).update(use.role for use in node.uses)
    return found


def rearranges_rows(graph: Graph, name: str) -> bool:
    """Whether a node reads sampled tokens and writes rows of its own, such as pairs, or those of a store."""
    node = graph[name]
    if isinstance(node.initial_operator, Gate) or not node.operator.creates_axis("batch"):
        return False
    return any(generates(graph[maker]) for maker in _makers_of(graph, _tokens(graph, node)))


def rows_per_prompt(graph: Graph, name: str) -> int:
    """The number of rows that reach the node per prompt of the step."""
    factor = 1
    while (maker := _row_maker(graph, name)) is not None:
        factor *= graph[maker].rows_factor
        name = maker
    return factor


def origin(graph: Graph, edge: Edge) -> Edge:
    """The output that a column comes from; gates only pass columns on."""
    while isinstance(graph[edge.node].initial_operator, Gate):
        passed = graph[edge.node].inputs.get(PortField(ROWS, edge.output))
        if passed is None:
            break  # the gate itself writes it
        edge = passed
    return edge


def last_gate(graph: Graph, name: str) -> Gate | None:
    """The last gate that the rows of a node passed; None if no gate drops any."""
    line = [graph[other].initial_operator for other in graph.nodes if other in graph.ancestors(name)]
    return next((operator for operator in reversed(line) if isinstance(operator, Gate)), None)


def rows_of_step(graph: Graph, name: str, prompts: int | None) -> int | None:
    """The number of rows that reach the node `name` in a step; None if unknown."""
    gate = last_gate(graph, name)
    filled = prompts if gate is None else gate.target_groups
    return None if filled is None else filled * rows_per_prompt(graph, name)


def input_of(graph: Graph, name: str) -> str | None:
    """The input that a node's rows come from; None for a node that reads no columns."""
    while not graph[name].is_input:
        maker = _row_maker(graph, name)
        if maker is None:
            return None
        name = maker
    return name


def _row_maker(graph: Graph, name: str) -> str | None:
    """The node that created the rows that a node reads."""
    axes = (graph.types[edge].axes for edge in graph[name].inputs.values())
    return next((_maker(found[0]) for found in axes if found), None)


def _makers(graph: Graph, name: str) -> set[str] | None:
    """The nodes that created the tokens that a node reads, back to sampling; None without tokens."""
    read = list(_tokens(graph, graph[name]))
    if not read:
        return None
    made: set[str] = set()
    waiting = set(_makers_of(graph, read))
    while waiting:
        maker = graph[waiting.pop()]
        if maker.is_input or maker.name in made:
            continue
        made.add(maker.name)
        if not generates(maker):  # it created a new axis from tokens that it read
            waiting |= set(_makers_of(graph, _tokens(graph, maker)))
    return made


def _tokens(graph: Graph, node: Node) -> Iterator[Edge]:
    for edge in node.inputs.values():
        if getattr(graph.types[edge].type, "kind", None) == "tokens":
            yield edge


def _makers_of(graph: Graph, edges: Iterable[Edge]) -> Iterator[str]:
    """The nodes that created the axes of these columns, except for rows."""
    for edge in edges:
        typed = graph.types[edge]
        if isinstance(typed.type, ColumnType):
            yield from map(_maker, typed.axes[1:])


def _maker(identity: str) -> str:
    return identity.partition("@")[2]
