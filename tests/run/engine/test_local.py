"""`LocalRunner`: nodes run on the caller's own stack, a failing one is named, and eager lines give the same bits."""

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
from tests.support.jobs import PROMPTS, job_of, weights_of
from tests.support.rewards import digits
from tests.support.runs import walk


class Failing(Operator):
    """Raises, after a look at what it was given."""

    message: str = "nothing to see"

    def __call__(self, prompt_mask: c.PromptMask) -> c.PromptMask:
        raise DataError(self.message)


# ---- errors and debuggers


def test_a_failing_node_is_named_with_its_step_and_what_it_was_given() -> None:
    @algorithm
    def broken(batch: PromptBatch) -> Any:
        return Failing("the mask is sad")(batch.prompt_mask)

    with pytest.raises(NodeError) as raised:
        walk(broken()).step(PROMPTS, 17)
    message = str(raised.value)
    assert "failing failed in step 18: DataError: the mask is sad" in message
    assert "Failing(message='the mask is sad')" in message
    assert "prompt_mask: bool[3, 3]" in message
    assert isinstance(raised.value.__cause__, DataError)
    again = pickle.loads(pickle.dumps(raised.value))
    assert type(again) is NodeError
    assert str(again) == message
    assert current() is None  # the session is left


def test_what_an_operator_raises_is_told_with_its_line() -> None:
    class Divides(Operator):
        """Fails in a helper of torch's, called from here."""

        def __call__(self, prompt_mask: c.PromptMask) -> c.PromptMask:
            return torch.stack([])

    @algorithm
    def broken(batch: PromptBatch) -> Any:
        return Divides()(batch.prompt_mask)

    line = Divides.__call__.__wrapped__.__code__.co_firstlineno + 1  # type: ignore[attr-defined]
    with pytest.raises(NodeError, match=rf"divides failed in step 1: RuntimeError: .*\n  at {__file__}:{line}\n"):
        walk(broken()).step(PROMPTS, 0)


class Forgetful(PPOClip):
    """A loss of the user's own; what it calls of torch's raises."""

    def __call__(self, log_probs: c.LogProbs) -> torch.Tensor:
        return torch.stack([])


class Unscored(PPOClip):
    """A loss of the user's own; what it calls of flowrl's calls what raises."""

    def __call__(self, log_probs: c.LogProbs) -> torch.Tensor:
        return torch.tensor(rows_of_groups([]))  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", [Forgetful, Unscored])
def test_what_a_loss_raises_is_told_with_its_line(tiny: str, loss: type[PPOClip]) -> None:
    """And not with the line of the operator that it was given to, nor of what it calls, which are flowrl's."""
    job = job_of("grpo", tiny).edit(set={"update_actor.loss": loss()})
    line = loss.__call__.__code__.co_firstlineno + 1
    executor = local_steps(Plan(job.graph), job.build(0), 0)
    executor.sync()
    with pytest.raises(NodeError, match=rf"update_actor failed in step 1: \w+Error: .*\n  at {__file__}:{line}\n"):
        executor.step(PROMPTS, 0)


class Spoils(Operator):
    """Divides by what may be nothing."""

    def __call__(self, advantages: c.Advantages) -> c.Advantages:
        spoilt = advantages.clone()
        spoilt[1, 0] = float("nan")
        return spoilt


def test_numbers_that_are_not_finite_are_told_with_who_wrote_them(tiny: str) -> None:
    """Though it is the update that fails by them."""
    job = job_of("grpo", tiny).edit(insert={"spoils": After("group_advantage", Spoils())})
    executor = local_steps(Plan(job.graph), job.build(0), 0)
    executor.sync()
    said = r"gradient norm is nan(.|\n)*\n  advantages is NaN or infinite in 1 places, first in row 1, token 0; spoils"
    with pytest.raises(NodeError, match=rf"update_actor failed in step 1: DataError: .*{said}\.advantages wrote it$"):
        executor.step(PROMPTS, 0)


def test_an_interrupt_is_not_dressed_up_as_a_failing_node() -> None:
    class Interrupted(Operator):
        """Ctrl-C."""

        def __call__(self, prompt_mask: c.PromptMask) -> c.PromptMask:
            raise KeyboardInterrupt

    @algorithm
    def stopped(batch: PromptBatch) -> Any:
        return Interrupted()(batch.prompt_mask)

    with pytest.raises(KeyboardInterrupt):
        walk(stopped()).step(PROMPTS, 0)
    assert current() is None


def test_an_operator_runs_on_the_stack_of_whoever_called_step() -> None:
    """So a breakpoint in it stops there, and the frames above are those of the caller."""
    seen: dict[str, Any] = {}

    class Stopped(Operator):
        """Looks at its own stack, as a debugger would."""

        def __call__(self, prompt_mask: c.PromptMask) -> c.PromptMask:
            seen["thread"] = threading.get_ident()
            seen["frames"] = [frame.name for frame in traceback.extract_stack()]
            seen["plain"] = type(prompt_mask)
            return prompt_mask

    @algorithm
    def chain(batch: PromptBatch) -> Any:
        return Stopped()(batch.prompt_mask)

    walk(chain()).step(PROMPTS, 0)
    here = test_an_operator_runs_on_the_stack_of_whoever_called_step.__name__
    assert seen["thread"] == threading.get_ident()
    assert seen["frames"].index(here) < seen["frames"].index("step") < len(seen["frames"])
    assert seen["frames"][-1] == "__call__"
    assert seen["plain"] is torch.Tensor


# ---- eager and executor are the same program


@algorithm
def grpo_by_hand(batch: PromptBatch, reward_fn: Any, n: int, mini_batch: int) -> tuple[Receipt, Mismatched]:
    """GRPO, written out."""
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
def test_the_same_lines_give_the_same_bits_eagerly_and_in_an_executor(tiny: str, prompts_file: str, name: str) -> None:
    seed, steps = 3, 3
    job = job_of(name, tiny, mini_batch=4)
    executor = local_steps(Plan(job.graph), job.build(seed), seed)
    engines = executor.runner.engines
    stream = PromptData(prompts_file).load(engines["rollout"].tokenizer, seed)
    drawn = [stream.next(4) for _ in range(steps)]
    executor.sync()
    walked = [executor.step(batch, step).metrics.compute() for step, batch in enumerate(drawn)]

    by_hand = []
    with job.eager(seed) as session:
        for batch in map(record_of, drawn):
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


def test_grpo_written_out_is_the_same_graph_as_grpo_by_edit() -> None:
    edited, written = grpo(digits, n=4, max_new_tokens=6, mini_batch=4), grpo_by_hand(digits, 4, 4)
    assert {n: dict(node.inputs) for n, node in written.nodes.items()} == {
        n: dict(node.inputs) for n, node in edited.nodes.items()
    }
