"""A toy instead of `flowrl.backends.sglang.server`: it records weights, scores every token 0, needs no SGLang."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection
from typing import Any

from safetensors.torch import load

from flowrl.backends.sglang.requests import ResponseRequest
from flowrl.sync.digest import Algorithm, tensor_digest

WORD = 20
"""The only token that it samples."""
ENDLESS = 100
"""Tokens; a longer response never ends, and blocks concurrent ones."""


class Toy:
    """Methods are named by the ``call`` of the request, as those of the real server."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        if "no_such_argument" in arguments:
            raise TypeError("unexpected keyword argument 'no_such_argument'")
        self.room, self.version = arguments["max_total_tokens"], "default"
        self.digests: dict[str, str] = {}

    def describe(self, body: bytes) -> dict[str, Any]:
        return {"vocabulary": 85, "dtype": "float32", "cached_tokens": self.room, "support": 50}

    def generate(self, body: bytes, new: list[ResponseRequest], seconds: float) -> dict[str, Any]:
        counts = {request.name: request.sampling["max_new_tokens"] for request in new}
        if max(counts.values(), default=0) > ENDLESS:
            signal.pause()
        return {"responses": {name: self.response(count) for name, count in counts.items()}}

    def response(self, count: int) -> dict[str, Any]:
        versions = [self.version] * count
        return {"ids": [WORD] * count, "log_probs": [0.0] * count, "versions": versions, "ended": "length", "cached": 0}

    def score(self, body: bytes, rows: list[list[int]], width: int) -> dict[str, Any]:
        return {"log_probs": [0.0] * width * len(rows)}

    def begin(self, body: bytes, caches: str | None = None) -> dict[str, Any]:
        self.digests = {}
        return {"without_token": []}

    def take(self, body: bytes, algorithms: dict[str, Algorithm]) -> dict[str, Any]:
        self.digests |= {name: tensor_digest(name, tensor, algorithms[name]) for name, tensor in load(body).items()}
        return {}

    def end(self, body: bytes, version: str, caches: str | None = None) -> dict[str, Any]:
        self.version = version
        return {"digests": self.digests}


def main(requests: Connection, replies: Connection) -> None:
    """Main function of the process; runs until the parent ends it."""
    arguments, _ = requests.recv(), requests.recv_bytes()
    toy: Any = None
    message: dict[str, Any] = {"call": "describe"}
    body = b""
    while True:
        try:
            toy = toy or Toy(arguments)
            reply = getattr(toy, message.pop("call"))(body, **message)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.send(reply)
        message, body = requests.recv(), requests.recv_bytes()
