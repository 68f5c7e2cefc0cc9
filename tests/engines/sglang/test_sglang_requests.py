"""Single requests to the real SGLang, and episodes on it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from flowrl.backends import SGLang
from flowrl.backends.hosted.reaper import members
from flowrl.backends.sglang.engine import SGLangEngine
from flowrl.backends.torch.score.engine import TorchTrainerEngine
from flowrl.data.metrics import Metrics
from flowrl.episodes import Answer, Reply
from flowrl.operators import Interact
from flowrl.protocols.protocols import Request
from tests.engines.contract.answers import CONTEXT, KEY, assert_sampled_after
from tests.engines.contract.requests import FREE, Counts, RequestTests, alone, assert_response_of, finished, tokens
from tests.engines.contract.sources import Altered
from tests.engines.contract.swaps import SwapTests
from tests.operators.engines.test_interact import Flaky, prompts_of
from tests.support.errors import raises


@pytest.fixture(scope="module")
def running(folder: str) -> Iterator[SGLangEngine]:
    """Without overlap scheduling, with which SGLang cannot swap weights and reuse caches."""
    settings = {"disable_overlap_schedule": True}
    engine = SGLang(folder, dtype="float32", max_num_seqs=64, engine_args=settings).build(CONTEXT)
    yield engine
    engine.close()


@pytest.fixture
def engine(running: SGLangEngine, trainer: TorchTrainerEngine) -> SGLangEngine:
    """The engine of this file, with the weights of `trainer`."""
    running.sync(trainer)
    return running


def pid_of(engine: SGLangEngine) -> int:
    assert engine._process is not None
    return engine._process.pid


def schedulers(engine: SGLangEngine) -> list[int]:
    """The processes of the engine's process, which sample while it waits."""
    group = pid_of(engine)
    return [int(process.name) for process in members(group) if int(process.name) != group]


@pytest.mark.engines("sglang")
@pytest.mark.timeout(600)
def test_penalties_are_exact_without_overlap_scheduling(engine: SGLangEngine, trainer: TorchTrainerEngine) -> None:
    assert_sampled_after(engine, trainer, {"presence_penalty": 0.6, "frequency_penalty": 0.3, "min_p": 0.1})
    with raises("engine.unsupported-sampling"):
        assert_sampled_after(engine, trainer, {"repetition_penalty": 1.2})


@pytest.mark.engines("sglang")
@pytest.mark.timeout(600)
class TestSwaps(SwapTests):
    """On SGLang."""

    samples_by_key = False

    def hold(self, engine: Any, which: signal.Signals) -> None:
        for pid in schedulers(engine):
            os.kill(pid, which)

    @pytest.mark.nightly
    def test_a_swap_with_wrong_weights_is_detected_with_requests_in_flight(
        self, engine: Any, trainer: TorchTrainerEngine, other: TorchTrainerEngine
    ) -> None:
        super().test_a_swap_with_wrong_weights_is_detected_with_requests_in_flight(engine, trainer, other)


@pytest.mark.engines("sglang")
@pytest.mark.timeout(600)
class TestRequests(RequestTests):
    """On SGLang."""

    samples_by_key = False

    def test_dropped_requests_do_not_block_the_next_sync(self, engine: SGLangEngine, other: TorchTrainerEngine) -> None:
        """A running request, one that SGLang has not started, and some that wait for memory."""
        long = replace(FREE, max_new_tokens=200)
        for i in range(90):
            engine.submit(Request(str(i), tokens(4, i), replace(long, stop=("no such text",) * (i % 2)), KEY))
        assert engine.step() == []
        engine.submit(Request("late", tokens(4, 1), long, KEY))
        for name in [*map(str, range(90)), "late"]:
            engine.drop(name)
        engine.sync(Altered(other, version=5))
        request = Request("0", tokens(4, 1), FREE, KEY)
        assert_response_of(engine, other.model, request, alone(engine, request))

    def test_a_failing_environment_does_not_affect_other_episodes(
        self, engine: SGLangEngine, trainer: TorchTrainerEngine
    ) -> None:
        metrics = Metrics()
        interact = Interact(Flaky, max_turns=4, context=200, max_new_tokens=8, failed="leave", rollout=engine)
        batch = interact(prompts_of(engine.tokenizer, 9), key=KEY, metrics=metrics)
        assert metrics.compute()["episodes/failed"] == 3 and metrics.compute()["episodes/tried_again"] == 3
        assert batch.turns.tolist() == [0, 3, 3] * 3
        assert batch.response_mask.any(1).tolist() == [False, True, True] * 3
        assert (batch.rollout_log_probs - trainer.log_probs(batch)).abs().max() < 1e-4

    def test_a_long_response_does_not_block_other_episodes(self, engine: SGLangEngine) -> None:
        """Steps return while no request can end, since SGLang's scheduler is stopped, so episodes whose environment
        replies continue."""
        others = schedulers(engine)
        engine.submit(Request("long", tokens(4, 1), replace(FREE, max_new_tokens=240), KEY))
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        try:
            assert others and [engine.step() for _ in range(4)] == [[]] * 4
        finally:
            for pid in others:
                os.kill(pid, signal.SIGCONT)
        assert len(finished(engine, 1)["long"].ids) == 240

    @pytest.mark.nightly
    def test_a_process_killed_during_episodes_is_reported_and_restarted_by_the_next_sync(
        self, engine: SGLangEngine, trainer: TorchTrainerEngine
    ) -> None:
        group = pid_of(engine)

        class Kills(Counts):
            async def step(self, answer: Answer) -> Reply:
                if answer.turn == 1:
                    os.kill(group, signal.SIGKILL)
                return await super().step(answer)

        def batch_of(environment: Any) -> Any:
            interact = Interact(environment, max_turns=4, context=200, max_new_tokens=8, rollout=engine)
            return interact(prompts_of(engine.tokenizer, 12), key=KEY, metrics=Metrics())

        with raises("engine.process-died", how="was killed by SIGKILL"):
            batch_of(Kills)
        assert not members(group)
        with raises("engine.no-receipt"):
            batch_of(Counts)
        engine.sync(Altered(trainer, version=6))
        batch = batch_of(Counts)
        assert (batch.turns == 3).all() and (batch.policy_version == 6).all()
        assert (batch.rollout_log_probs - trainer.log_probs(batch)).abs().max() < 1e-4

    def test_externally_updated_weights_end_the_engine(self, engine: SGLangEngine) -> None:
        """SGLang itself does not update weights during requests; the next response has the new version. This is the
        last test of the file, since it ends the engine."""
        for name in "ab":
            engine.submit(Request(name, tokens(6, 3), FREE, KEY))
            if name == "a":
                assert set(finished(engine, 1)["a"].versions) == {0}
                engine._ask("begin")
                engine._ask("end", version="13")
        with raises("engine.version-mismatch", found=("13",)):
            finished(engine, 1)
        with raises("engine.no-receipt"):
            engine.step()
