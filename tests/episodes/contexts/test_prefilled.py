"""Shared prefixes of segments are prefilled once, by `chat.py` and `backends/torch/generate/decoder.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flowrl import Key
from flowrl.backends import TorchRollout
from flowrl.data.metrics import Metrics
from flowrl.episodes import Chat, Endpoint, Row
from flowrl.operators import Interact
from flowrl.protocols.protocols import Request, Response
from flowrl.run.engine.build import EngineBuilder
from tests.episodes.endpoint.clients import Client
from tests.episodes.endpoint.test_clients import Recorded
from tests.operators.engines.test_interact import prompts_of
from tests.support.models import tiny_folder

ROUNDS, BRANCHES = 3, 3
ROOT = "the root of all branches " * 4


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


async def in_turn(chat: Chat, row: Row) -> None:
    """Three branches from the first answer, each of which continues after all others."""
    await chat.answer([user(ROOT)])
    branches = [[*chat.messages, user(f"{i} is the number of the branch")] for i in range(BRANCHES)]
    for _ in range(ROUNDS):
        for i, branch in enumerate(branches):
            chat.rewrite(branch)
            await chat.answer()
            branches[i] = [*chat.messages, user("and what is then?")]


async def at_once(url: str, key: str, row: Row) -> None:
    """The same, with concurrent requests."""
    client = Client(url, key, row)
    client.messages = [user(ROOT)]
    async with client.http:
        await client.ask()
        branches = [[*client.messages, user(f"{i} is the number of the branch")] for i in range(BRANCHES)]
        for _ in range(ROUNDS):
            answers = await asyncio.gather(*map(client.post, branches))
            messages = [answer.json()["choices"][0]["message"] for answer in answers]
            branches = [
                [*branch, message, user("and what is then?")]
                for branch, message in zip(branches, messages, strict=True)
            ]


def needed(sampled: Sequence[tuple[Request, Response]]) -> int:
    """The distinct prefixes of all contexts and answers, of which decoding computes those that end in an answer."""
    read = {tuple(request.ids[:n]) for request, _ in sampled for n in range(1, len(request.ids) + 1)}
    whole = [([*request.ids], answer.ids) for request, answer in sampled]
    decoded = {(*ids, *tokens[:n]) for ids, tokens in whole for n in range(1, len(tokens))}
    return len(read - decoded)


@pytest.mark.parametrize("environment", [in_turn, Endpoint(at_once)], ids=["in turn", "at once"])
def test_a_prefix_of_several_segments_is_prefilled_once(environment: Any, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, max_position_embeddings=2048)
    engine = TorchRollout(folder, frozen=True, device="cpu").build(EngineBuilder({}, seed=0))
    recorded, metrics = Recorded(engine), Metrics()
    settings: dict[str, Any] = {"max_turns": 10, "context": 2000, "max_new_tokens": 8, "ignore_eos": True}
    Interact(environment, rewrites="segment", rollout=recorded, **settings)(
        prompts_of(engine.tokenizer, 1), key=Key.of(3), metrics=metrics
    )
    assert len(recorded.sampled) == 1 + ROUNDS * BRANCHES
    repeated = engine.context_tokens - engine.cached_tokens - needed(recorded.sampled)
    # branches that begin together each compute the mark of the user's turn, which is no part of the answer before it
    assert 0 <= repeated <= (2 * (BRANCHES - 1) if isinstance(environment, Endpoint) else 0)
    assert engine.context_tokens > 3 * needed(recorded.sampled)
