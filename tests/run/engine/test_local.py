"""Tests of `local.py` and `runner.py`: `LocalRunner` runs nodes on the caller's stack, and errors name the node.

Eager calls give the same bits.
"""

from __future__ import annotations

import pickle
import threading
import traceback
from typing import Any

import pytest
import torch

from flowrl import After, Metrics, Operator, PromptBatch, PromptData, algorithm
from flowrl import columns as c
from flowrl.core.graphs.plan import Plan
from flowrl.core.operators.session import current
from flowrl.data.proto.column_math import rows_of_groups
from flowrl.data.proto.dataproto import DataProto
from flowrl.errors import DataError, NodeError
from flowrl.graphs import grpo, ppo
from flowrl.operators import (
    Generate,
    GroupAdvantage,
    KLLoss,
    Mismatch,
    OldLogProb,
    PPOClip,
    RefLogProb,
    Repeat,
    Reward,
    Sync,
    UpdateActor,
)
from flowrl.operators.corrections import Mismatched
from flowrl.records import Receipt
from flowrl.run.engine.local import local_steps
from tests.nightly import nightly
from tests.support.errors import raises
from tests.support.jobs import PROMPTS, job_of, weights_of
from tests.support.rewards import digits
from tests.support.runs import walk


class Failing(Operator):
    """Raises an error with a code."""

    message: str = "nothing to see"

    def __call__(self, prompt_mask: c.PromptMask) -> c.PromptMask:
        raise DataError(self.message, code="data.made-up", row=2)


# ---- errors and debuggers


def test_an_error_names_the_node_its_step_and_its_inputs() -> None:
    @algorithm
    def broken(batch: PromptBatch) -> Any:
        return Failing("the mask is sad")(batch.prompt_mask)

    with raises("data.made-up", node="failing", step=18, error="DataError", row=2) as caught:
        walk(broken()).step(PROMPTS, 17)
    assert type(caught.value) is NodeError
    assert caught.value.message == (
        "failing failed in step 18: DataError: the mask is sad\n"
        "  operator: Failing(message='the mask is sad')\n"
        "  inputs: prompt_mask: bool[3, 3]"
    )
    assert isinstance(caught.value.__cause__, DataError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is NodeError
    assert (str(again), again.code, again.facts) == (str(caught.value), caught.value.code, caught.value.facts)
    assert current() is None  # the session has ended


def test_an_error_names_the_line_of_the_operator() -> None:
    class Divides(Operator):
        """Fails in a function of torch."""

        def __call__(self, prompt_mask: c.PromptMask) -> c.PromptMask:
            return torch.stack([])

    @algorithm
    def broken(batch: PromptBatch) -> Any:
        return Divides()(batch.prompt_mask)

    line = Divides.__call__.__wrapped__.__code__.co_firstlineno + 1  # type: ignore[attr-defined]
    with raises("step.node-failed", node="divides", step=1, error="RuntimeError") as caught:
        walk(broken()).step(PROMPTS, 0)
    assert f"\n  at {__file__}:{line}\n" in caught.value.message


class FailsInTorch(PPOClip):
    """A user's loss that calls a function of torch that raises."""

    def __call__(self, log_probs: c.LogProbs) -> torch.Tensor:
        return torch.stack([])


class FailsInFlowrl(PPOClip):
    """A user's loss that calls a function of flowrl that raises."""

    def __call__(self, log_probs: c.LogProbs) -> torch.Tensor:
        return torch.tensor(rows_of_groups([]))  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", [FailsInTorch, FailsInFlowrl])
def test_an_error_names_the_line_of_the_loss(tiny: str, loss: type[PPOClip]) -> None:
    """The error names neither flowrl's operator that calls the loss nor flowrl's function that the loss calls."""
    job = job_of("grpo", tiny).edit(set={"update_actor.loss": loss()})
    line = loss.__call__.__code__.co_firstlineno + 1
    executor = local_steps(Plan(job.graph), job.build(0), 0)
    executor.sync()
    with raises("step.node-failed", node="update_actor", step=1) as caught:
        executor.step(PROMPTS, 0)
    assert f"\n  at {__file__}:{line}\n" in caught.value.message


class WritesNaN(Operator):
    """Writes a NaN."""

    def __call__(self, advantages: c.Advantages) -> c.Advantages:
        spoiled = advantages.clone()
        spoiled[1, 0] = float("nan")
        return spoiled


def test_an_error_names_the_node_that_wrote_nan(tiny: str) -> None:
    """The update fails because of a NaN that another operator wrote."""
    job = job_of("grpo", tiny).edit(insert={"spoils": After("group_advantage", WritesNaN())})
    executor = local_steps(Plan(job.graph), job.build(0), 0)
    executor.sync()
    with pytest.raises(NodeError, match=r"^spoils wrote nan in step 1: advantages at row 1, token 0 \(1 of ") as caught:
        executor.step(PROMPTS, 0)
    assert "Then update_actor failed in step 1: DataError: The actor's gradient norm is nan" in caught.value.message


def test_an_interrupt_is_not_a_node_error() -> None:
    class Interrupted(Operator):
        """Raises `KeyboardInterrupt`, as Ctrl-C does."""

        def __call__(self, prompt_mask: c.PromptMask) -> c.PromptMask:
            raise KeyboardInterrupt

    @algorithm
    def stopped(batch: PromptBatch) -> Any:
        return Interrupted()(batch.prompt_mask)

    with pytest.raises(KeyboardInterrupt):
        walk(stopped()).step(PROMPTS, 0)
    assert current() is None


def test_operators_run_on_the_callers_stack() -> None:
    """A breakpoint in an operator works, and its outer frames are those of the caller of `step`."""
    recorded: dict[str, Any] = {}

    class Stopped(Operator):
        """Records its own stack, as a debugger would."""

        def __call__(self, prompt_mask: c.PromptMask) -> c.PromptMask:
            recorded["thread"] = threading.get_ident()
            recorded["frames"] = [frame.name for frame in traceback.extract_stack()]
            recorded["plain"] = type(prompt_mask)
            return prompt_mask

    @algorithm
    def chain(batch: PromptBatch) -> Any:
        return Stopped()(batch.prompt_mask)

    walk(chain()).step(PROMPTS, 0)
    caller = test_operators_run_on_the_callers_stack.__name__
    assert recorded["thread"] == threading.get_ident()
    assert recorded["frames"].index(caller) < recorded["frames"].index("step") < len(recorded["frames"])
    assert recorded["frames"][-1] == "__call__"
    assert recorded["plain"] is torch.Tensor


# ---- eager calls and the executor


@algorithm
def grpo_by_hand(batch: PromptBatch, reward_fn: Any, n: int, mini_batch: int) -> tuple[Receipt, Mismatched]:
    """GRPO, written without an edit of PPO."""
    prompts = Repeat(n)(batch)
    rollout = Generate(max_new_tokens=6)(prompts)
    old = OldLogProb()(rollout)
    mismatch = Mismatch()(rollout.rollout_log_probs, old, rollout.response_mask)
    ref = RefLogProb()(rollout)
    scores = Reward(reward_fn)(rollout, prompts)
    advantages = GroupAdvantage()(scores, rollout.response_mask, prompts.uid)
    update = UpdateActor(PPOClip(0.2), mini_batch=mini_batch, kl=KLLoss("k3", 0.001))
    updated = update(rollout, old_log_probs=old, advantages=advantages, ref_log_prob=ref)
    return Sync()(updated), mismatch


def record_of(batch: DataProto) -> PromptBatch:
    return PromptBatch(**{name: batch[name] for name in PromptBatch._fields})


@pytest.mark.parametrize("name", ["ppo", nightly("grpo")])
def test_eager_calls_and_the_executor_give_the_same_bits(tiny: str, prompts_file: str, name: str) -> None:
    seed, steps = 3, 3
    job = job_of(name, tiny, mini_batch=4)
    executor = local_steps(Plan(job.graph), job.build(seed), seed)
    engines = executor.runner.engines
    stream = PromptData(prompts_file).load(engines["rollout"].tokenizer, seed)
    batches = [stream.next(4) for _ in range(steps)]
    executor.sync()
    walked = [executor.step(batch, step).metrics.compute() for step, batch in enumerate(batches)]

    by_hand = []
    with job.eager(seed) as session:
        for batch in map(record_of, batches):
            if name == "ppo":
                receipt, critic, _ = ppo.step(batch, digits, max_new_tokens=6, mini_batch=4)
                assert critic.version == receipt.version
            else:
                receipt, _ = grpo_by_hand.step(batch, digits, 4, 4)
            merged = Metrics()
            for metrics in session.metrics.values():
                merged.merge(metrics)
            by_hand.append(merged.compute())
        assert receipt.version == steps
        weights = weights_of(session.engines["actor"])
    assert [m.keys() for m in by_hand] == [m.keys() for m in walked]
    assert by_hand == walked
    assert all(torch.equal(weights[key], tensor) for key, tensor in engines["actor"].weights())
    assert walked[0] != walked[1]


def test_grpo_written_by_hand_equals_grpo_by_edit() -> None:
    edited, written = grpo(digits, n=4, max_new_tokens=6, mini_batch=4), grpo_by_hand(digits, 4, 4)
    assert {n: dict(node.inputs) for n, node in written.nodes.items()} == {
        n: dict(node.inputs) for n, node in edited.nodes.items()
    }
