"""A graph as a call of an algorithm and one edit, which sets only what differs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flowrl.graph import Graph
from flowrl.importers.settings import Settings
from flowrl.importers.writer import Call, Function, Name, Program, call, is_public, value_of, without_functions
from flowrl.spec import Spec, parameters


def across(machines: int, gpus: int) -> dict[str, Any]:
    """The options of a place whose `gpus` are on several machines, which have joined Ray; the last may have fewer."""
    return {"per_machine": -(-gpus // machines), "address": "auto"} if machines > 1 else {}


def _changes(path: str, now: Any, wanted: Any) -> dict[str, Any]:
    """What to set so that the value at a path is the wanted one: single parameters, if its class is the same."""
    value = value_of(wanted)
    if now == value:
        return {}
    if not isinstance(value, Spec) or type(now) is not type(value):
        return {path: wanted}
    parts = [(f"{path}.{name}", part, getattr(now, name)) for name, part in parameters(value).items()]
    return {name: part for name, part, before in parts if part != before}


def _is_public(after: Call) -> bool:
    return not any(isinstance(item, Name) and not is_public(item.text) for item in after.args)


@dataclass
class GraphPlan:
    """An algorithm, and what its graph must have."""

    algorithm: str
    settings: dict[str, Any] = field(default_factory=dict)
    reward: Any = None
    """The reward function, as it is written; `has_reward` says whether the algorithm takes one."""
    has_reward: bool = True
    wanted: dict[str, Any] = field(default_factory=dict)
    """By path, such as ``"update_actor.loss"``, the value that the graph must have."""
    replace: dict[str, Any] = field(default_factory=dict)
    insert: dict[str, Any] = field(default_factory=dict)
    drop: list[str] = field(default_factory=list)
    wire: dict[str, str] = field(default_factory=dict)
    allow: dict[str, str] = field(default_factory=dict)
    """By rule, why the graph may break it: the other framework does."""
    own: dict[str, Any] = field(default_factory=dict)
    """By path, values that the file defines, such as a loss."""
    bound: dict[str, Any] = field(default_factory=dict)
    """Backends of roles that the graph adds."""

    def edited(self) -> Graph:
        """The graph, with None as its reward function, and without operators that the file defines."""
        graph: Graph = value_of(self.head(None))
        edit = self.edit(own=False)
        edit["insert"] = {name: after for name, after in self.insert.items() if _is_public(after)}
        edit["allow"] = {}
        return graph.edit(**value_of({name: part for name, part in edit.items() if part}))

    def advantages(self) -> str:
        """The node of the algorithm whose advantages the update reads."""
        inputs = self._algorithm().nodes["update_actor"].inputs
        return next(edge.node for port, edge in inputs.items() if str(port) == "advantages")

    def readers(self, port: str) -> list[str]:
        """The ports of this name in the algorithm, such as ``"gae.token_level_rewards"``."""
        graph = self._algorithm()
        return [f"{node.name}.{port}" for node in graph.nodes.values() if port in map(str, node.inputs)]

    def set_kl_coef(self, coef: float) -> None:
        """The coefficient of KL in the loss; REINFORCE++ with a baseline takes none of 0, and the edit removes it."""
        if coef or self.algorithm != "reinforce_plus_plus_baseline":
            self.settings["kl_coef"] = coef

    def add_kl_shape(self, shape: Call) -> None:
        """KL in the reward of an algorithm that has it in the loss, if at all."""
        self.insert["kl_shape"] = call("After", "reward", shape)
        self.wire |= {port: "kl_shape.token_level_rewards" for port in self.readers("token_level_rewards")}

    def head(self, reward: Any) -> Call:
        """The call of the algorithm."""
        given = dict(self.settings)
        if reward is None and "others" in given:
            given["others"] = dict.fromkeys(given["others"])
        return call(self.algorithm, *[reward] * self.has_reward, **given)

    def _algorithm(self) -> Graph:
        """The graph of the algorithm without the nodes that are dropped."""
        graph: Graph = value_of(self.head(None))
        return graph.edit(drop=[name for name in self.drop if name in graph.nodes])

    def edit(self, own: bool = True) -> dict[str, Any]:
        """The arguments of the edit; what the algorithm has is left out, and without `own` what the file defines."""
        graph: Graph = value_of(self.head(None))
        drop = [name for name in self.drop if name in graph.nodes]
        changed: dict[str, Any] = {}
        for path, value in self.wanted.items():
            node, _, rest = path.partition(".")
            if node in graph.nodes and node not in (*drop, *self.replace):
                now: Any = graph.nodes[node].operator
                for name in rest.split("."):
                    now = getattr(now, name)
                changed |= _changes(path, now, value)
        if own:
            changed = {path: value for path, value in changed.items() if path not in self.own} | self.own
        parts = {"replace": self.replace, "insert": self.insert, "drop": drop, "wire": self.wire, "set": changed}
        parts["allow"] = self.allow
        return {name: part for name, part in parts.items() if part}


@dataclass
class Imported:
    """A configuration as a training of flowrl."""

    title: str
    graph: GraphPlan
    bind: dict[str, Any]
    training: dict[str, Any]
    settings: Settings
    functions: list[str] = field(default_factory=list)
    imports: dict[str, set[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What only a run of the script would decide."""
    warnings: list[str] = field(default_factory=list)
    """Signs that the configuration is of another version."""

    def program(self, reward: bool = True) -> Program:
        """The file; without its reward functions, the graph can be checked where these do not exist."""
        head, edit = self.graph.head(self.graph.reward), self.graph.edit()
        if not reward:
            head, edit = without_functions(self.graph.head(None)), without_functions(edit)
        return Program(self.title, head, edit, self.bind, self.training, self.functions, self.imports)


__all__ = ["Call", "Function", "GraphPlan", "Imported", "Name", "across", "call", "value_of"]
