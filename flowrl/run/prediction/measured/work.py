"""`Work`: what a node does with its rows, read from the parameters of its operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from flowrl.core.graphs.graph import Node
from flowrl.data.proto.rows import is_count
from flowrl.run.prediction.cost import Load

Kind = Literal["generate", "score", "update", "sync", "other"]

_TOKENS = {"prompt_mask", "attention_mask"}  # nodes that write these write tokens


class Work(NamedTuple):
    """What a node does with its rows.

    Args:
        kind: ``"other"`` uses no engine.
        roles: of the engines that it uses.
        epochs: passes over the rows of an update.
        mini_batch: rows per optimizer step; None is all.
        tokens: the most tokens of a response that it generates.
    """

    kind: Kind = "other"
    roles: tuple[str, ...] = ()
    epochs: int = 1
    mini_batch: int | None = None
    tokens: int | None = None

    @staticmethod
    def of(node: Node) -> Work:
        """The work of a node."""
        operator, roles = node.initial_operator, tuple(use.role for use in node.uses)
        parameters = {name: getattr(operator, name, None) for name in ("ppo_epochs", "mini_batch", "max_new_tokens")}
        return _work(parameters, roles, node.is_sync, writes_tokens(node), bool(node.writes))

    @staticmethod
    def recorded(operator: Mapping[str, Any]) -> Work:
        """The work of an operator in the ``run.json`` of a run, whose class is not imported."""
        sync = str(operator.get("$type", "")).partition(":")[2] == "Sync"
        generates = "max_new_tokens" in operator
        return _work(operator, tuple(_roles(operator)), sync, generates, "ppo_epochs" in operator)

    def load(self, load: Load, rows: int) -> Load:
        """What one rank computes of its rows; `rows` are those of all ranks, which mini-batches divide."""
        if self.kind != "update":
            return load
        updates = self.epochs * (1 if self.mini_batch is None else max(1, rows // self.mini_batch))
        rows, tokens, padded = (self.epochs * term for term in (load.rows, load.tokens, load.padded))
        return Load(rows, tokens, padded, load.longest, updates)


def writes_tokens(node: Node) -> bool:
    """Whether a node writes rows of tokens, whose lengths a prediction samples."""
    return not _TOKENS.isdisjoint(node.signature.outputs)


def _work(parameters: Mapping[str, Any], roles: tuple[str, ...], sync: bool, generates: bool, writes: bool) -> Work:
    if sync:
        return Work("sync", roles)
    if writes:
        return Work("update", roles, _count(parameters, "ppo_epochs") or 1, _count(parameters, "mini_batch"))
    if generates and roles:
        return Work("generate", roles, tokens=_count(parameters, "max_new_tokens"))
    return Work("score" if roles else "other", roles)


def _count(parameters: Mapping[str, Any], name: str) -> int | None:
    """A parameter that is a number, and not a recorded schedule."""
    value = parameters.get(name)
    return value if is_count(value) else None


def _roles(value: Any) -> Iterator[str]:
    """The roles that a recorded operator names."""
    if isinstance(value, Mapping):
        if isinstance(role := value.get("$role"), str):
            yield role
        for one in value.values():
            yield from _roles(one)
    elif isinstance(value, list):
        for one in value:
            yield from _roles(one)
