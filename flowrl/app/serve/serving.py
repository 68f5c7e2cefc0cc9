"""An episode that does not end, whose requests are those of anyone who has its key."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from flowrl.app.targets import graph_of, load_target
from flowrl.core.operators.roles import RoleRef
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.data.now import Now
from flowrl.data.proto.column_math import objects
from flowrl.episodes import Endpoint, Row
from flowrl.episodes.endpoint.server import endpoint_server
from flowrl.episodes.parsers import call_format
from flowrl.errors import ParameterError
from flowrl.operators import Interact
from flowrl.protocols.backend import Backend
from flowrl.records import PromptBatch
from flowrl.run.engine.build import EngineBuilder

_ENDLESS: Mapping[str, Any] = {
    **{"max_turns": 1 << 62, "timeout": 1e9, "rewrites": "segment", "max_segments": None},
    **{"failed": "error", "tries": 1, "concurrency": None},
}
"""Parameters of `Interact` for an episode of any length and any conversations."""


def of_model(backend: Backend) -> tuple[Backend, Interact]:
    """A model with the usual sampling."""
    return backend, Interact(Endpoint(_wait), max_new_tokens=1024)


def of_job(target: str, imports: bool) -> tuple[Backend, Interact]:
    """The policy of a job that plays episodes with an `Endpoint`, before training; programs ask no other engines.

    Raises:
        ParameterError: it has no `Endpoint`, or its engine names no model.
    """
    found = load_target(target, imports)
    graph = graph_of(found, target)
    interacts = [node.operator for node in graph.nodes.values() if isinstance(node.operator, Interact)]
    played = next((one for one in interacts if isinstance(one.resolved(), Endpoint)), None)
    if played is None:
        raise ParameterError(
            f"{target} plays no episodes with an Endpoint, so it has no sampling and parser to serve. Name a model "
            f"folder, or a job with Interact(Endpoint(...)).",
            code="cli.wrong-target",
            target=target,
            found=graph.name,
        )
    bindings, role = graph.bindings, played.rollout
    assert isinstance(role, RoleRef)
    backend: Any = bindings.get(role.name)
    owner = None if backend is None or backend.shares is None else bindings.get(backend.shares)
    model = getattr(backend, "model", None) or (None if owner is None else owner.starts_from)
    if model is None:
        raise ParameterError(
            f"{target} binds no model to the role {role.name!r}. Bind it, or name a model folder.",
            code="cli.wrong-target",
            target=target,
            found=role.name,
        )
    alone = dataclasses.replace(played, others={}, others_sampling={})
    return dataclasses.replace(backend, model=model, frozen=True), alone


def serve_forever(
    backend: Backend,
    episodes: Interact,
    sampling: Mapping[str, Any],
    endpoint: Mapping[str, Any],
    parser: str | None,
    port: int,
    seed: int,
    announce: Callable[[str], None],
) -> None:
    """Serve a policy until Ctrl-C.

    Args:
        sampling: other parameters of `episodes`.
        endpoint: other parameters of its endpoint.
        parser: another format of calls.
        announce: prints a line.
    """
    served = dataclasses.replace(episodes.resolved(), **endpoint)
    served = served if parser is None else dataclasses.replace(served, parser=parser)
    call_format(served.parser).refuse_missing()

    async def wait(url: str, key: str, row: Row) -> None:
        announce(f"export OPENAI_BASE_URL={url} OPENAI_API_KEY={key}")
        await _wait(url, key, row)

    try:
        with EngineBuilder({"rollout": backend}, seed).live() as engines:
            endpoint_server(port)
            agent = dataclasses.replace(served, agent=wait, score=None, logs=None)
            playing = dataclasses.replace(
                episodes, environment=agent, rollout=engines["rollout"], **_ENDLESS, **sampling
            )
            playing(_one_row(), key=Key.of(seed), metrics=Metrics(), now=Now(0))
    except KeyboardInterrupt:
        announce("The endpoint is closed.")


async def _wait(url: str, key: str, row: Row) -> None:
    await asyncio.Event().wait()


def _one_row() -> PromptBatch:
    """The row of the episode, whose prompt is not read: requests have the conversations."""
    import torch

    ids = torch.zeros(1, 1, dtype=torch.int64)
    text = {"uid": "serve", "row_id": "serve", "data_source": "serve"}
    return PromptBatch(
        prompts=ids,
        prompt_mask=ids == 0,
        **{name: objects([value]) for name, value in text.items()},
        ground_truth=objects([None]),
        extra_info=objects([{}]),
        raw_prompt=objects([[{"role": "user", "content": "-"}]]),
    )
