"""A toy engine for the tests of hosted engines: it computes one token per request and step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flowrl.backends.hosted.arrival import IncomingWeights
from flowrl.backends.hosted.base import HostedRollout, RawResponse
from flowrl.backends.hosted.spec import EngineSpec
from flowrl.backends.rollout import StopRule
from flowrl.data.keys import Key
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import DataError, EngineError
from flowrl.protocols.protocols import Caches, Request, Response, Sampling
from flowrl.records import FROZEN
from flowrl.sync.probe import Probe

KEY = Key.of(3)
PROBE = Probe([[9, 20], [12]], [[33, 41, 7], [8, 30, 31]])
FIRST, LETTERS = 6, 70  # the range of sampled ids


def completion(ids: Sequence[int], seed: int, count: int) -> list[int]:
    """The deterministic completion of `ids`."""
    return [FIRST + (sum(ids) + seed + 3 * i) % LETTERS for i in range(count)]


class Toy(HostedRollout):
    """Records its calls in `calls`."""

    name = "Toy"

    def __init__(self, folder: str, **settings: Any) -> None:
        super().__init__(EngineSpec(folder, **settings), ChatTokenizer(folder), 0)
        self._probe, self._arithmetic = PROBE, self._dtype()
        self.calls: list[str] = []
        self.alive, self.version, self.log_prob, self.fault = True, str(FROZEN), -1.0, ""
        self.death: str | None = None
        self.scores: Sequence[float] = ()
        self.idle: str | None = None  # a request that makes no progress
        self.running: dict[str, tuple[list[int], Sampling, int, list[str]]] = {}

    @property
    def _lives(self) -> bool:
        return self.alive

    def _start(self) -> None:
        self.alive = True

    def _stop(self) -> None:
        self.alive = False
        self.running.clear()
        if self.fault == "close":
            raise OSError("no end")

    def _limits(self) -> tuple[int, int]:
        return FIRST + LETTERS, 64

    def _settings(self, sampling: Sampling, ending: StopRule) -> Any:
        if sampling.top_k:
            raise DataError("Toy has no top_k.", code="engine.unsupported-sampling")
        return sampling

    def _begin(self, name: str, ids: Sequence[int], settings: Any, seed: int) -> None:
        self._fail("begin")
        self.calls.append(f"begin {name}")
        assert name not in self.running and 0 <= seed < 2**63
        self.running[name] = ([*ids], settings, seed, [])

    def _advance(self) -> dict[str, RawResponse]:
        """Ignores stop tokens, so the base class must cut the response."""
        assert self.running
        self._fail("advance")
        if self.fault == "interrupted":
            raise KeyboardInterrupt
        responses = {}
        for name, (ids, sampling, seed, versions) in [*self.running.items()]:
            if self.idle == name:
                continue
            versions.append(self.version)
            if len(versions) == sampling.max_new_tokens or self.fault == "short":
                del self.running[name]
                tokens, log_probs = completion(ids, seed, len(versions)), [self.log_prob] * len(versions)
                responses[name] = RawResponse(tokens, log_probs, versions, "length", len(ids) // 2)
        return responses

    def _abort(self, name: str) -> None:
        self._fail("abort")
        self.calls.append(f"abort {name}")
        del self.running[name]

    def _fail(self, call: str) -> None:
        if self.fault == call:
            raise EngineError("The toy broke.", code="engine.call-failed", engine="Toy", call=call)

    def _halt(self, caches: Caches | None) -> list[str]:
        self.calls.append(f"halt {caches}")
        return [name for name, (*_, versions) in self.running.items() if not versions] if caches == "reuse" else []

    def _death(self) -> str | None:
        return self.death

    def _take_over(self, arrival: IncomingWeights, caches: Caches | None) -> str:
        self._fail("take")
        assert (caches is None) == (not self.running)
        self.calls.append(f"take {caches}")
        for _ in arrival.weights():
            pass
        self.version = str(arrival.version)
        return "copy"

    def _score(self, probe: Probe) -> list[float]:
        return [*self.scores]

    def _dtype(self) -> torch.dtype:
        return torch.float32

    def _release(self) -> None:
        assert not self.running

    def _resume(self) -> None: ...


def request_of(name: str, ids: Sequence[int], tokens: int = 3, turn: int = 0, **more: Any) -> Request:
    sampling = Sampling(1.0, more.pop("top_k", 0), 1.0, tokens, ignore_eos=True, **more)
    return Request(name, ids, sampling, KEY.response(name, turn))


def expected(request: Request, version: int = FROZEN) -> Response:
    ids = completion(request.ids, request.key.bits & (2**63 - 1), request.sampling.max_new_tokens)
    return Response(ids, [-1.0] * len(ids), [version] * len(ids), "length")
