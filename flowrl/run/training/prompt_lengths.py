"""Check that the prompts of a run fit into the models that answer them, before the first step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.lineage import generates, input_of
from flowrl.core.operators.operator_validation import sample_steps
from flowrl.data.sources.prompts import PromptStream
from flowrl.data.sources.source import Stream
from flowrl.data.text.vocabulary import stated
from flowrl.errors import DataError, GraphError
from flowrl.spec import parameters

SHOWN = 3
"""How many rows an error names."""


def refuse_long_prompts(graph: Graph, streams: Mapping[str, Stream]) -> None:
    """Refuse prompts that leave no room for a response of `max_new_tokens`; they would end the run in a later step.

    Operators that end an episode where its context is full have no such limit.
    """
    for node in filter(generates, graph.nodes.values()):
        stream, limit = streams.get(input_of(graph, node.name) or ""), positions_of(graph, node)
        if limit is None or not isinstance(stream, PromptStream) or (response := _response(node)) is None:
            continue
        _refuse_long_response(node, limit, response)
        room = limit - response
        if long := {index: tokens for index, tokens in stream.lengths() if tokens > room}:
            worst = max(long.values())
            named = ", ".join(f"{index} ({tokens} tokens)" for index, tokens in [*long.items()][:SHOWN])
            drop = f'PromptData(..., max_prompt_length={room}, overlong="drop"), or '
            raise DataError(
                f"{len(long)} of {stream.size} prompts are too long for {node.name}, whose model has {limit} "
                f"positions, {response} of them for the response (max_new_tokens): rows {named}"
                f"{', ...' if len(long) > SHOWN else ''}. Pass "
                f"{drop if len(long) < (stream.size or 0) else ''}{_shorter(node, max(1, limit - worst))}.",
                code="model.too-long",
                node=node.name,
                rows=list(long),
                expected=room,
                found=worst,
                positions=limit,
            )


def _refuse_long_response(node: Node, limit: int, response: int) -> None:
    """Refuse a `max_new_tokens` that leaves no room for a prompt."""
    if response >= limit:
        raise GraphError(
            f"{node.name} has max_new_tokens={response}, but its model has {limit} positions for prompt and "
            f"response. Lower it: {_shorter(node, limit // 2)}.",
            code="model.too-long",
            node=node.name,
            expected=limit,
            found=response,
        )


def _shorter(node: Node, tokens: int) -> str:
    """How to lower `max_new_tokens`, in Python and on the command line."""
    path = f"{node.name}.max_new_tokens"
    return f"edit(set={{{path!r}: {tokens}}}), or on the command line --set {path}={tokens}"


def positions_of(graph: Graph, node: Node) -> int | None:
    """The most tokens of a sequence of the model that a node samples from; None if its folder does not say."""
    limits = []
    for role in node.reads:
        folder = folder_of(graph, role)
        given = getattr(graph.bindings.get(role), "max_model_len", None)
        limits.append(given or (None if folder is None else _positions(folder)))
    return min((limit for limit in limits if limit is not None), default=None)


def folder_of(graph: Graph, role: str) -> str | None:
    """The folder of the model that a role starts from, which may be that of another role; None if there is none."""
    backend = graph.bindings.get(role)
    owner = graph.bindings.get(backend.shares) if backend is not None and backend.shares else backend
    return owner.starts_from if owner is not None else None


def _positions(folder: str) -> int | None:
    """The positions of the model in a folder; None if its configuration cannot be read, which loading reports."""
    try:
        found: Any = stated(json.loads(Path(folder, "config.json").read_bytes()), "max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, int) else None


def _response(node: Node) -> int | None:
    """The largest `max_new_tokens`; None for an operator without, or with a limit on the context."""
    every = [parameters(operator) for operator in sample_steps(node.operator)]
    found = [given["max_new_tokens"] for given in every if "max_new_tokens" in given and "context" not in given]
    return max(found, default=None)
