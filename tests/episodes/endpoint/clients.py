"""A client of chat completions for tests, and the episodes that agents play with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from flowrl.episodes import Endpoint, Row
from flowrl.episodes.play import EpisodeResult
from tests.episodes import scripted
from tests.episodes.scripted import Script, Scripted


class Client:
    """A connection to an endpoint, with the conversation so far."""

    def __init__(self, url: str, key: str, row: Row) -> None:
        self.http = httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=30)
        self.url, self.key, self.row = url, key, row
        self.messages: list[dict[str, Any]] = [dict(message) for message in row.messages]

    async def post(self, messages: Any = None, headers: Any = None, **fields: Any) -> httpx.Response:
        """The response to a request, of the conversation so far."""
        body = {"model": "m", "messages": self.messages if messages is None else messages, **fields}
        return await self.http.post("/chat/completions", json=body, headers=headers)

    async def ask(self, content: str | None = None, **fields: Any) -> dict[str, Any]:
        """The message that answers the conversation, with a further one of the user; both join it."""
        if content is not None:
            self.messages.append({"role": "user", "content": content})
        response = await self.post(**fields)
        assert response.status_code == 200, response.text
        message: dict[str, Any] = response.json()["choices"][0]["message"]
        self.messages.append(message)
        return message


def played(
    agent: Callable[[Client], Awaitable[float | None]], script: Script, endpoint: Any = None, **settings: Any
) -> tuple[list[EpisodeResult], Scripted]:
    """The episodes of an agent that has a client."""

    async def with_client(url: str, key: str, row: Row) -> float | None:
        client = Client(url, key, row)
        try:
            return await agent(client)
        finally:
            await client.http.aclose()

    return scripted.played(Endpoint(with_client, **(endpoint or {})), script, **settings)
