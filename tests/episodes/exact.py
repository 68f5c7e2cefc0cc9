"""The expected batch of episodes, token by token, recomputed from conversations and sampled responses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.episodes import Answer, Environment, Reply, Row, Toolbox
from flowrl.operators import Interact
from flowrl.operators.advantages.groups import group_advantage
from flowrl.protocols.protocols import Request, Response
from flowrl.records import EpisodeBatch
from tests.operators.engines.test_interact import prompts_of
from tests.support.templates import tokenizer_of

KEY = Key.of(7)
HEADS = {
    "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "qwen2.5": "<|im_start|>assistant\n",
    "qwen3": "<|im_start|>assistant\n",
    "gemma": "<start_of_turn>model\n",
    "mistral": "[/INST]",
}
"""By template, the text directly before each assistant message."""

CALL = '<tool_call>{"name": "look", "arguments": {"there": "the end"}}</tool_call>'
TEXTS = (
    *("and the 12", "{", "12and the<>", "thé ß\n\n12", "?", CALL),
    *('<tool_call>{"name": "lok"}</tool_call>', "<tool_call>[1"),
)


class Recorded:
    """An engine that records the responses of the last attempt of each episode: by row id, one per turn."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.responses: dict[str, list[Response]] = {}
        self._turns: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request) -> None:
        self._turns[request.name] = next(t for t in range(100) if KEY.response(request.name, t) == request.key)
        self._engine.submit(request)

    def take(self, name: str) -> Response:
        response: Response = self._engine.take(name)
        self.responses[name] = [*self.responses.get(name, [])[: self._turns[name]], response]
        return response


class RandomPolicy:
    """Samples one of `TEXTS` by the request's key, in tokens that no tokenizer produces, with one of three ends."""

    receipt = SimpleNamespace(version=3)

    def __init__(self, tokenizer: ChatTokenizer, seed: int = 0) -> None:
        self.tokenizer, self._order = tokenizer, random.Random(seed)
        self._pending: dict[str, Request] = {}
        self._answers: dict[str, Response] = {}

    def submit(self, request: Request) -> None:
        self._pending[request.name] = request

    def step(self) -> list[str]:
        """Finish a random part of the pending requests."""
        ready = [name for name in self._pending if self._order.random() < 0.7] or list(self._pending)
        for name in ready:
            self._answers[name] = self._sampled(self._pending.pop(name))
        return ready

    def _sampled(self, request: Request) -> Response:
        numbers = random.Random(request.key.bits)
        text = numbers.choice(TEXTS)
        pieces = text if numbers.random() < 0.5 else [text]
        ids = [i for piece in pieces for i in self.tokenizer.encode(piece)]
        how: Any = numbers.choice(["turn_end", "turn_end", "turn_end", "eos_id", None])
        ids = [*ids, *([getattr(self.tokenizer, how)] if how else [])]
        sampled_ids = ids[: request.sampling.max_new_tokens]
        ended: Any = "stop" if how and sampled_ids == ids else "length"
        return Response(sampled_ids, [-numbers.random() for _ in sampled_ids], [3] * len(sampled_ids), ended)

    def take(self, name: str) -> Response:
        return self._answers.pop(name)

    def drop(self, name: str) -> None:
        self._pending.pop(name, None)
        self._answers.pop(name, None)

    def generate(self, *given: Any) -> Any: ...
    def sync(self, source: Any) -> Any: ...


def worth(response: Response) -> float:
    """The reward of `RandomEnvironment` for a response."""
    return len(response.ids) / 8 - 1


def random_environment(seed: int, failing: float = 0.0, tries: int = 1) -> type[Environment]:
    """Environments of 1 to 5 turns with random delays; some fail in a turn, in the first attempts or in all."""

    class RandomEnvironment(Environment):
        async def reset(self, row: Row) -> Reply:
            self.numbers = random.Random(f"{seed} {row.row_id}")
            self.turns = self.numbers.randint(1, 5)
            fails = self.numbers.random() < failing and row.attempt < tries
            self.fails_in = self.numbers.randint(1, self.turns) if fails else None
            return Reply(row.messages)

        async def step(self, answer: Answer) -> Reply:
            self.turns -= 1
            for _ in range(self.numbers.randint(0, 4)):
                await asyncio.sleep(0)
            if self.fails_in == self.turns + 1:
                raise OSError("planted")
            content = self.numbers.choice(["12 and the", "  12\n", "thé", "what?"])
            return Reply(content, reward=len(answer.ids) / 8 - 1, done=self.turns <= 0)

    return RandomEnvironment


async def look(there: str) -> str:
    """Look at a place."""
    return f"12 {there}"


SCHEMAS = Toolbox([look], "hermes").schemas


def expected(
    tokenizer: ChatTokenizer,
    head: str,
    messages: Sequence[Mapping[str, Any]],
    responses: Sequence[Response],
    tools: bool,
    worth: Callable[[Response], float],
) -> tuple[list[int], list[bool], list[float], list[float]]:
    """Id, mask, log-prob and reward of each token: the template's text between responses, and the responses."""
    template_kwargs = {"tools": SCHEMAS} if tools and tokenizer.template_reads("tools") else None
    text, at = tokenizer.conversation_text(messages, template_kwargs), 0
    ids: list[int] = []
    sampled: list[bool] = []
    log_probs: list[float] = []
    rewards: list[float] = []
    responses_text = [str(message["content"]) for message in messages if message["role"] == "assistant"]
    assert len(responses_text) == len(responses)
    for content, response in zip(responses_text, responses, strict=True):
        start = text.index(head, at) + len(head)
        between = tokenizer.encode(text[at:start])
        if ids and between[0] == ids[-1] == tokenizer.turn_end:  # the policy has written it
            between = between[1:]
        n, calls = len(response.ids), tools and "<tool_call>" in content
        ids += [*between, *response.ids]
        sampled += [False] * len(between) + [True] * n
        log_probs += [0.0] * len(between) + response.log_probs
        rewards += [0.0] * (len(between) + n - 1) + [0.0 if calls else worth(response)]
        shown = content if text.startswith(content, start) else content.strip()  # some templates trim
        assert text.startswith(shown, start)
        at = start + len(shown)
    return ids, sampled, log_probs, rewards


def assert_exact(
    batch: EpisodeBatch,
    names: Sequence[str],
    engine: Recorded,
    head: str,
    tools: bool,
    worth: Callable[[Response], float] = worth,
) -> int:
    """Assert that all ids, masks, log-probs and rewards are exact; returns the number of rows with responses."""
    width, whole = batch.responses.shape[1], 0
    for i, name in enumerate(names):
        if not batch.response_mask[i].any():
            assert not batch.token_level_scores[i].any() and not batch.rollout_log_probs[i].any()
            continue
        whole += 1
        ids, sampled, log_probs, rewards = expected(
            engine.tokenizer, head, batch.conversation[i], engine.responses[name], tools, worth
        )
        there = batch.attention_mask[i]
        assert batch.input_ids[i][there].tolist() == ids
        after_prompt = there[-width:]
        first = len(ids) - int(after_prompt.sum())
        assert not any(sampled[:first]) and sampled[first]
        assert batch.response_mask[i][after_prompt].tolist() == sampled[first:]
        assert not batch.response_mask[i][~after_prompt].any()
        assert torch.equal(batch.rollout_log_probs[i][after_prompt], torch.tensor(log_probs[first:]))
        assert torch.equal(batch.token_level_scores[i][after_prompt], torch.tensor(rewards[first:]))
        assert batch.turns[i] == len(engine.responses[name])
        assert torch.equal(batch.responses[i][after_prompt], batch.input_ids[i][there][first:])
    return whole


def played(
    name: str, tokenizer: ChatTokenizer, environment: Any, rows: int, seed: int = 0, group: int = 2, **settings: Any
) -> tuple[EpisodeBatch, Recorded, dict[str, float]]:
    """Play and check episodes with `RandomPolicy`; returns the batch, the engine and the metrics."""
    engine, metrics = Recorded(RandomPolicy(tokenizer, seed)), Metrics()
    tools = (look,) if name in ("qwen2.5", "qwen3") else ()
    settings = {"max_turns": 4, "context": 400, "max_new_tokens": 64, "tools": tools, "check": "loose", **settings}
    prompts = prompts_of(tokenizer, rows)
    prompts = prompts._replace(uid=prompts.uid.copy())
    prompts.uid[:] = [str(i // group) for i in range(rows)]
    batch = Interact(environment, rollout=engine, **settings)(prompts, key=KEY, metrics=metrics)
    assert_exact(batch, list(prompts.row_id), engine, HEADS[name], bool(tools))
    return batch, engine, metrics.compute()


def failures(rows: int, group: int = 8) -> None:
    """One episode in twenty fails in both attempts: all are counted, and each group's baseline equals one computed
    here from the remaining episodes."""
    environment = random_environment(5, failing=0.05, tries=2)
    batch, _, metrics = played(
        "mistral", tokenizer_of("mistral"), environment, rows, group=group, failed="leave", check="off"
    )
    left = ~batch.response_mask.any(1)
    assert metrics["episodes/failed"] == int(left.sum()) and metrics["episodes/tried_again"] == int(left.sum())
    assert 0.02 * rows < int(left.sum()) < 0.08 * rows
    uid = np.array([str(i // group) for i in range(rows)], dtype=object)
    found = group_advantage(batch.token_level_scores, batch.response_mask, uid)
    for first in range(0, rows, group):
        scores = {
            i: float(batch.token_level_scores[i].double().sum()) for i in range(first, first + group) if not left[i]
        }
        assert scores, "a group is lost"
        mean = sum(scores.values()) / len(scores)
        spread = (sum((score - mean) ** 2 for score in scores.values()) / max(1, len(scores) - 1)) ** 0.5
        for i in range(first, first + group):
            own = (scores[i] - mean) / (spread + 1e-6) if i in scores else 0.0
            expected_log_probs = torch.where(batch.response_mask[i], own, 0.0)
            torch.testing.assert_close(found[i], expected_log_probs, atol=1e-5, rtol=1e-4)
