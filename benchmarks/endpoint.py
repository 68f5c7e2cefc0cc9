"""What the endpoint costs: processor time a turn of its thread, and of matching requests to recorded tokens.

256 episodes, with 64 turns 32, play at once over the loopback, against a policy that answers at once. The messages of
an episode grow to about 2,000 tokens in 8 turns, and as fast in 64. The time of the thread includes HTTP and JSON;
`match` is the canonical form and the digests of a request, measured alone.

    python benchmarks/endpoint.py
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from harness import table

from flowrl.episodes import Row
from flowrl.episodes.endpoint.chat_completions import parse
from tests.episodes.scripted import SAMPLING, Scripted, played, row

TOKENS_A_TURN = 250


def thread_seconds(name: str) -> float:
    """The processor time of a thread of this process."""
    (thread,) = (one for one in threading.enumerate() if one.name == name)
    fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def speak(url: str, key: str, row: Row, turns: int, reply: str) -> None:
    """Play an episode over a connection, in bytes, so that the client takes little time."""
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 22)
    messages: list[Any] = list(row.messages)
    for _ in range(turns):
        body = json.dumps({"model": "m", "messages": messages}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert headers.startswith("http/1.1 200"), headers
        size = int(headers.partition("content-length: ")[2].partition("\r\n")[0])
        message = json.loads(await reader.readexactly(size))["choices"][0]["message"]
        messages += [message, {"role": "user", "content": reply}]
    writer.close()


def measure(turns: int, count: int) -> list[str]:
    """A line of the table."""
    from flowrl.episodes import Endpoint

    reply = "x" * (TOKENS_A_TURN - 20)  # a token each in the vocabulary of the tests

    async def agent(url: str, key: str, row: Row) -> float:
        await speak(url, key, row, turns, reply)
        return 1.0

    played(Endpoint(agent), lambda name, turn: "y", turns=turns, context=1 << 20)  # starts the server
    start, before = time.perf_counter(), thread_seconds("flowrl-endpoint")
    rows = [row(i) for i in range(count)]
    episodes, engine = played(Endpoint(agent), lambda name, turn: "y", rows=rows, turns=turns, context=1 << 20)
    spent, wall = thread_seconds("flowrl-endpoint") - before, time.perf_counter() - start
    assert isinstance(engine, Scripted) and all(one.fault is None for one in episodes)
    answers = count * turns
    said = [{"role": "user", "content": reply}, {"role": "assistant", "content": "y"}] * turns
    body = {"messages": said[:-1]}
    begin = time.thread_time()
    for _ in range(100):
        parse(body, SAMPLING, strict=False)
    match = (time.thread_time() - begin) / 100
    return [f"{turns} ({count})", f"{spent / answers * 1e3:.2f}", f"{match * 1e3:.2f}", f"{wall:.1f}"]


if __name__ == "__main__":
    heads = ["turns (episodes)", "thread, ms a turn", "match at the last turn, ms", "wall, s"]
    table("The endpoint on the loopback", heads, [measure(1, 256), measure(8, 256), measure(64, 32)])
