"""`Interact` with the real engine, against `Generate` and a trainer's log-probs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flowrl
from flowrl import Key
from flowrl.backends import TorchRollout, TorchScorer
from flowrl.data.metrics import Metrics
from flowrl.data.segments import begins
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.episodes import Answer, Chat, Environment, Reply, Row
from flowrl.errors import DefinitionError, EpisodeError, ParameterError
from flowrl.graphs import grpo
from flowrl.operators import Generate, Interact
from flowrl.protocols.protocols import Rollout
from flowrl.records import EpisodeBatch, PromptBatch
from flowrl.run.engine.build import EngineBuilder
from tests.support.errors import raises
from tests.support.jobs import column, job_of, write_prompts
from tests.support.kernel import exact
from tests.support.runs import lines, train

CONTEXT = EngineBuilder({}, seed=0)
KEY = Key.of(5)


class Echo(Environment):
    """Three turns; replies with the length of the response, and rewards it."""

    async def step(self, answer: Answer) -> Reply:
        length = len(answer.ids)
        return Reply(f"{length} tokens", reward=length / 8, done=answer.turn == 2)


async def once(chat: Chat, row: Row) -> float:
    await chat.answer()
    return 1.0


class Flaky(Echo):
    """Fails for every third row."""

    async def reset(self, row: Row) -> Reply:
        self.fails = int(row.row_id) % 3 == 0
        return Reply(row.messages)

    async def step(self, answer: Answer) -> Reply:
        if self.fails and answer.turn == 1:
            raise OSError("planted")
        return await super().step(answer)


@pytest.fixture(scope="module")
def engine(tiny: str) -> Any:
    return TorchRollout(tiny, frozen=True, device="cpu").build(CONTEXT)


def prompts_of(tokenizer: ChatTokenizer, count: int = 6) -> PromptBatch:
    messages = [[{"role": "user", "content": "abc"[: 1 + i % 3] + str(i)}] for i in range(count)]
    prompts, mask = tokenizer.pad_left([tokenizer.prompt_ids(each) for each in messages])
    ids = column([str(i) for i in range(count)])
    uid = column([str(i // 2) for i in range(count)])
    blank = column([{}] * count)
    return PromptBatch(prompts, mask, uid, ids, column(["t"] * count), ids, blank, column(messages))


def episodes(engine: Any, environment: Any, count: int = 6, **settings: Any) -> tuple[EpisodeBatch, dict[str, float]]:
    metrics = Metrics()
    settings = {"max_turns": 4, "context": 200, "max_new_tokens": 8, **settings}
    operator = Interact(environment, rollout=engine, **settings)
    return operator(prompts_of(engine.tokenizer, count), key=KEY, metrics=metrics), metrics.compute()


def test_one_turn_equals_generate(engine: Any) -> None:
    batch, _ = episodes(engine, once)
    prompts = prompts_of(engine.tokenizer)
    plain = Generate(max_new_tokens=8, rollout=engine)(prompts, key=KEY, metrics=Metrics())
    for name in set(plain._fields) - {"rollout_log_probs", "response_text"}:
        assert torch.equal(getattr(batch, name), getattr(plain, name)), name
    assert batch.response_text.tolist() == plain.response_text.tolist()
    torch.testing.assert_close(batch.rollout_log_probs, plain.rollout_log_probs, atol=1e-5, rtol=0)
    last = plain.response_mask.sum(1) - 1
    assert torch.equal(batch.token_level_scores.argmax(1), last) and batch.token_level_scores.sum() == len(last)


def test_log_probs_equal_a_forward_pass_over_the_episode(engine: Any, tiny: str) -> None:
    batch, _ = episodes(engine, Echo)
    scorer = TorchScorer(tiny, device="cpu").build(CONTEXT)
    expected = scorer.log_probs(batch)
    assert (batch.rollout_log_probs - expected).abs().max() < 1e-4
    assert not batch.rollout_log_probs[~batch.response_mask].any()
    assert (batch.turns == 3).all() and batch.attention_mask.sum() > batch.response_mask.sum()


def test_turn_ids_cover_exactly_the_sampled_tokens(engine: Any) -> None:
    """A turn is a run of sampled tokens, since a reply precedes each further one."""
    batch, _ = episodes(engine, Echo)
    for row in range(len(batch.turns)):
        mask, turns = batch.response_mask[row].tolist(), batch.turn_ids[row].tolist()
        runs = [len(list(same)) for there, same in itertools.groupby(mask) if there]
        assert [turn for turn in turns if turn >= 0] == [k for k, length in enumerate(runs) for _ in range(length)]
        assert [turn >= 0 for turn in turns] == mask and len(runs) == 3


def test_rewards_are_on_the_last_token_of_their_turn(engine: Any) -> None:
    batch, metrics = episodes(engine, Echo)
    for mask, scores, conversation in zip(
        batch.response_mask, batch.token_level_scores, batch.conversation, strict=True
    ):
        starts = mask & ~torch.cat([torch.tensor([False]), mask[:-1]])
        ends = mask & ~torch.cat([mask[1:], torch.tensor([False])])
        turns = list(zip(starts.nonzero().flatten().tolist(), ends.nonzero().flatten().tolist(), strict=True))
        assert len(turns) == 3
        for start, end in turns:
            assert scores[end] == (end - start + 1) / 8
        assert scores.count_nonzero() == 3
        responses = [message["content"] for message in conversation if message["role"] == "assistant"]
        assert len(responses) == 3 and len(conversation) == 6
    assert metrics["episodes/turns"] == 3
    assert metrics["reward/mean"] == pytest.approx(float(batch.token_level_scores.sum(1).mean()))


class Solved(Echo):
    """There is nothing to do in every third row."""

    async def reset(self, row: Row) -> Reply:
        return Reply(row.messages, done=int(row.row_id) % 3 == 0)


async def aloof(chat: Chat, row: Row) -> float | None:
    if int(row.row_id) % 3 == 0:
        return None
    return await once(chat, row)


@pytest.mark.parametrize("environment", [Solved, aloof])
def test_episodes_without_a_response_are_counted_and_masked(engine: Any, environment: Any) -> None:
    batch, metrics = episodes(engine, environment)
    over = torch.tensor([i % 3 == 0 for i in range(6)])
    assert torch.equal(batch.response_mask.any(1), ~over) and torch.equal(batch.turns == 0, over)
    assert not batch.token_level_scores[over].any()
    assert (metrics["episodes/unanswered"], metrics["episodes/failed"]) == (2, 0)
    assert metrics["reward/mean"] == pytest.approx(float(batch.token_level_scores.sum(1)[~over].mean()))


def test_reused_context_tokens_are_reported(engine: Any) -> None:
    batch, metrics = episodes(engine, Echo, count=3, concurrency=1)
    before, new = 0, 0  # tokens before all answers; and of a further one, what was said since the one before it
    for mask, ids, prompt in zip(batch.response_mask, batch.attention_mask, batch.prompts, strict=True):
        start = int(ids[: len(prompt)].sum())
        begins = (mask & ~torch.cat([torch.tensor([False]), mask[:-1]])).nonzero().flatten().tolist()
        ends = (mask & ~torch.cat([mask[1:], torch.tensor([False])])).nonzero().flatten().tolist()
        before += sum(start + begin for begin in begins)
        new += start + sum(begin - end for begin, end in zip(begins[1:], ends, strict=False))
    assert metrics["throughput/context_tokens"] == before
    assert metrics["throughput/cached_share"] == pytest.approx(1 - new / before)


def test_a_row_does_not_depend_on_the_batch(engine: Any) -> None:
    whole, _ = episodes(engine, Echo, count=6)
    some, _ = episodes(engine, Echo, count=3, concurrency=1)
    width = some.responses.shape[1]
    assert torch.equal(whole.responses[:3, :width][some.response_mask], some.responses[some.response_mask])


def test_failed_episodes_are_masked_and_counted(engine: Any) -> None:
    batch, metrics = episodes(engine, Flaky, failed="leave")
    whole, _ = episodes(engine, Echo)
    failed = torch.tensor([i % 3 == 0 for i in range(6)])
    assert not batch.response_mask[failed].any() and not batch.token_level_scores[failed].any()
    assert metrics["episodes/failed"] == 2 and metrics["episodes/tried_again"] == 2
    width = batch.responses.shape[1]
    assert torch.equal(batch.responses[~failed], whole.responses[~failed][:, :width])
    with pytest.raises(EpisodeError, match=r"row '[03]' failed after 2 answers, .*planted \(at .*py:\d+\)"):
        episodes(engine, Flaky)


def test_a_prompt_that_fills_the_context_is_named(engine: Any) -> None:
    with raises("episode.long-prompt", row="0", expected=5, found=5):
        episodes(engine, Echo, context=5)


async def rewrites(chat: Chat, row: Row) -> float:
    """A first segment of two turns, a branch from its first one, and a compressed context of one or two."""
    await chat.answer()
    start = chat.messages[:2]
    await chat.answer("left")
    chat.rewrite(start)
    await chat.answer("right")
    chat.rewrite([{"role": "user", "content": "in short"}])
    last = await chat.answer()
    if int(row.messages[0]["content"][-1]) % 2:
        await chat.answer("more")
    return len(last.ids) + (last.ids[0] % 16) / 16


def test_segments_have_the_log_probs_of_the_contexts_that_the_policy_read(engine: Any, tiny: str) -> None:
    batch, metrics = episodes(engine, rewrites, rewrites="segment", max_turns=5)
    expected = TorchScorer(tiny, device="cpu").build(CONTEXT).log_probs(batch)
    assert (batch.rollout_log_probs - expected).abs().max() < 1e-4
    starts = begins(batch.attention_mask, batch.position_ids)
    assert starts.sum(1).tolist() == [2] * 6 and metrics["episodes/segments"] == metrics["episodes/segments_max"] == 3
    assert batch.turns.tolist() == [4, 5] * 3
    for turns, on in zip(batch.turn_ids, batch.response_mask, strict=True):
        assert turns[on].diff().min() >= 0 and int(turns.max()) + 1 == len(turns[on].unique())
    sampled, read = int(batch.response_mask.sum()), int(batch.attention_mask.sum())
    assert metrics["episodes/context_per_token"] == pytest.approx((read - sampled) / sampled)


def test_an_episode_without_rewrites_has_the_same_bits_with_segments(engine: Any) -> None:
    one, metrics = episodes(engine, Echo)
    other, more = episodes(engine, Echo, rewrites="segment")
    for name in set(one._fields) - {"conversation", "episode"}:
        found = getattr(one, name), getattr(other, name)
        assert torch.equal(*found) if isinstance(found[0], torch.Tensor) else all(found[0] == found[1]), name
    assert more.pop("episodes/segments") == more.pop("episodes/segments_max") == 1
    assert more.pop("episodes/out_of_segments") == 0 and more.pop("episodes/context_per_token") > 1
    assert more.keys() == metrics.keys()


def test_a_shared_prefix_is_computed_once(engine: Any) -> None:
    """Of a branch, the tokens from the first other one on are new."""
    batch, metrics = episodes(engine, rewrites, count=1, rewrites="segment", max_turns=3)
    ids, mask, turns = batch.input_ids[0], batch.attention_mask[0], batch.turn_ids[0]
    (start,) = begins(batch.attention_mask, batch.position_ids)[0].nonzero().flatten().tolist()
    prompt = len(ids) - len(turns)
    first, branch = ids[:start][mask[:start]].tolist(), ids[start:][mask[start:]].tolist()
    lengths = [int((turns == turn).sum()) for turn in range(3)]
    contexts = [int((turns == 0).nonzero()[0]) + int(mask[:prompt].sum()), len(first) - lengths[1]]
    shared = next(i for i, pair in enumerate(zip(first, branch, strict=False)) if pair[0] != pair[1])
    contexts.append(len(branch) - lengths[2])
    new = contexts[0] + (contexts[1] - contexts[0] - lengths[0] + 1) + contexts[2] - shared
    assert shared > contexts[0] + lengths[0] and metrics["throughput/context_tokens"] == sum(contexts)
    assert metrics["throughput/cached_share"] == pytest.approx(1 - new / sum(contexts))


@pytest.mark.parametrize(("rewriting", "number"), [("refuse", 4), ("segment", None)])
def test_a_limit_needs_segments(rewriting: Any, number: int | None) -> None:
    if number is None:
        assert Interact(rewrites, rewrites=rewriting, max_segments=4).max_segments == 4
        return
    with raises("episode.single-segment", given=4):
        Interact(rewrites, rewrites=rewriting, max_segments=number)


class TestSpecs:
    def test_an_environment_can_be_given_by_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "environment.py").write_text(
            "from flowrl.episodes import Environment\n"
            "class Environment(Environment):\n    async def step(self, answer): ...\n"
            "async def agent(chat, row): ...\n"
        )
        monkeypatch.chdir(tmp_path)
        graph = grpo(exact).edit(
            replace={"generate": Interact("environment.py:Environment", max_turns=2)}, drop=["reward"]
        )
        flowrl.save(graph, "graph.yaml")
        assert flowrl.load("graph.yaml", imports=True) == graph
        Interact("environment.py:agent")
        with raises("reference.undefined-name", name="Enviroment", known=("Environment", "agent")) as error:
            Interact("environment.py:Enviroment")
        assert error.value.message.endswith("did you mean 'Environment'?")

    @pytest.mark.parametrize("environment", [dict, lambda chat, row: None, exact])
    def test_invalid_environments_are_refused(self, environment: Any) -> None:
        with raises("episode.invalid-environment"):
            Interact(environment)

    def test_incomplete_environments_are_refused_at_construction(self) -> None:
        class Wants(Echo):
            def __init__(self, level: int) -> None: ...

        with raises("episode.invalid-environment", name="Environment"):
            Interact(Environment)
        with raises("episode.invalid-environment", name="Wants"):
            Interact(Wants)
        with raises("episode.invalid-environment", name="Echo"):
            Interact(Echo())

    @pytest.mark.parametrize(("method", "parameters"), [("reset", ("self", "row")), ("step", ("self", "answer"))])
    def test_methods_with_other_parameters_are_refused(self, method: str, parameters: tuple[str, ...]) -> None:
        environment = type("Environment", (Echo,), {method: lambda self: None})
        with raises("episode.invalid-environment", name=f"Environment.{method}", expected=parameters):
            Interact(environment)

    def test_an_agent_with_other_parameters_is_refused(self) -> None:
        async def agent(chat: Chat) -> None: ...

        with raises("episode.invalid-environment", name="agent", expected=("chat", "row")):
            Interact(agent)

    def test_invalid_tools_are_refused(self) -> None:
        def odd(chat: Chat) -> None: ...

        def add(a: int, b: int) -> int:
            return a + b

        with pytest.raises(DefinitionError, match=r"The tool odd\(chat: .*that JSON cannot represent .*list\[str\]"):
            Interact(tools=[odd])
        with pytest.raises(DefinitionError, match="The tool Echo is a class; expected a function"):
            Interact(tools=[Echo])
        with pytest.raises(ParameterError, match=r"expected a list of functions: tools=\[add\]"):
            Interact(tools=add)

    def test_interact_without_environment_and_tools_is_refused(self) -> None:
        with raises("episode.invalid-environment"):
            Interact()

    def test_an_engine_without_streaming_requests_is_refused(self, tiny: str) -> None:
        graph = job_of("grpo", tiny).graph.edit(replace={"generate": Interact(Echo)}, drop=["reward"])

        class ByBatch(TorchRollout):
            serves = (Rollout,)

        with pytest.raises(flowrl.FlowrlError, match="interact needs a InteractiveRollout there"):
            graph.bind(rollout=ByBatch(tiny))


def test_a_resumed_training_on_episodes_has_the_same_metrics(tiny: str, tmp_path: Path) -> None:
    data = write_prompts(tmp_path / "prompts.jsonl")
    operator = Interact(Echo, max_turns=3, context=120, max_new_tokens=6)
    job = job_of("grpo", tiny).edit(replace={"generate": operator}, drop=["reward"])
    train(job, data, tmp_path / "whole", steps=3)
    train(job, data, tmp_path / "parts", steps=2, checkpoint_every=1)
    train(job, data, tmp_path / "parts", steps=3, checkpoint_every=1, resume=True)
    whole, parts = ([line["reward/mean"] for line in lines(tmp_path / f / "metrics.jsonl")] for f in ("whole", "parts"))
    assert whole == parts and len(whole) == 3
    assert all(line["rollout/logp_diff_max"] < 1e-4 for line in lines(tmp_path / "whole" / "metrics.jsonl"))
    assert np.isfinite(whole).all()
