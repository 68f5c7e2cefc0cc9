"""`Steps`: nodes run in the plan's order; columns are released; metrics and keys belong to one step."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import pytest
import torch

from flowrl import INJECTED, Key, Metrics, Operator, PromptBatch, algorithm
from flowrl import columns as c
from flowrl.core.graphs.plan import Plan
from flowrl.errors import GraphError
from flowrl.run.engine.local import local_steps
from tests.support.errors import raises
from tests.support.jobs import PROMPTS, job_of
from tests.support.runs import walk


class Masks(Operator):
    """Inverts the mask."""

    def __call__(self, prompt_mask: c.PromptMask, metrics: Metrics = INJECTED) -> c.PromptMask:
        metrics.mean("masks/share", prompt_mask.sum(), prompt_mask.numel())
        return ~prompt_mask


def test_each_node_runs_once_in_plan_order(tiny: str) -> None:
    executor = walk((job := job_of("ppo", tiny)).graph, **job.build())
    executor.sync()
    seen: list[str] = []
    result = executor.step(PROMPTS, 0, on_node=seen.append)
    assert seen == [node.name for node in executor.plan.order]
    assert sorted(seen) == sorted(name for name in job.graph.nodes if name != "batch")
    assert list(result.seconds) == seen
    place = seen.index
    for reader, writer in [("old_log_prob", "update_actor"), ("value", "update_critic"), ("update_actor", "sync")]:
        assert place(reader) < place(writer)


def test_a_column_is_released_after_its_last_reader() -> None:
    alive: dict[str, bool] = {}
    first: list[weakref.ref[torch.Tensor]] = []

    class CreatesTensor(Operator):
        """Returns a new tensor."""

        def __call__(self, prompt_mask: c.PromptMask) -> c.PromptMask:
            out = prompt_mask.clone()
            first.append(weakref.ref(out))
            return out

    class ReadsAlive(Operator):
        """Records whether that tensor is still alive."""

        def __call__(self, prompt_mask: c.PromptMask) -> c.PromptMask:
            alive[self.name] = first[0]() is not None
            return ~prompt_mask

    @algorithm
    def chain(batch: PromptBatch) -> Any:
        created = CreatesTensor()(batch.prompt_mask)
        once = ReadsAlive().named("reader")(created)
        return ReadsAlive().named("later")(once)

    walk(chain()).step(PROMPTS, 0)
    assert alive == {"reader": True, "later": False}
    first.clear()
    walk(chain()).step(PROMPTS, 0, return_nodes=("creates_tensor",))
    assert alive == {"reader": True, "later": True}


def test_a_result_has_only_sinks_and_returned_nodes() -> None:
    @algorithm
    def chain(batch: PromptBatch) -> Any:
        one = Masks().named("one")(batch.prompt_mask)
        two = Masks().named("two")(one)
        return Masks().named("three")(two)

    executor = walk(chain())
    assert set(executor.step(PROMPTS, 0).columns) == {"three"}
    columns = executor.step(PROMPTS, 0, return_nodes=("one", "batch")).columns
    assert set(columns) == {"three", "one", "batch"}
    assert torch.equal(columns["one"]["prompt_mask"], ~columns["batch"]["prompt_mask"])
    assert torch.equal(columns["three"]["prompt_mask"], ~PROMPTS["prompt_mask"])
    with pytest.raises(GraphError, match="no node 'four'"):
        executor.step(PROMPTS, 0, return_nodes=("four",))


def test_an_input_with_missing_columns_is_refused() -> None:
    @algorithm
    def chain(batch: PromptBatch) -> Any:
        return Masks()(batch.prompt_mask)

    with raises("step.missing-columns", graph="chain", node="batch", missing=("prompt_mask",)):
        walk(chain()).step(PROMPTS.drop("prompt_mask"), 0)


def test_a_metric_reported_by_two_nodes_is_prefixed_with_the_node() -> None:
    @algorithm
    def both(batch: PromptBatch) -> Any:
        one = Masks().named("one")(batch.prompt_mask)
        return Masks().named("two")(one)

    @algorithm
    def single(batch: PromptBatch) -> Any:
        return Masks().named("one")(batch.prompt_mask)

    share = 6 / 9
    assert walk(both()).step(PROMPTS, 0).metrics.compute() == pytest.approx(
        {"one/masks/share": share, "two/masks/share": 1 - share}
    )
    assert walk(single()).step(PROMPTS, 0).metrics.compute() == pytest.approx({"masks/share": share})


def test_metrics_do_not_leak_into_the_next_step() -> None:
    @algorithm
    def single(batch: PromptBatch) -> Any:
        return Masks()(batch.prompt_mask)

    executor = walk(single())
    first = executor.step(PROMPTS, 0).metrics
    assert executor.step(PROMPTS[:1], 1).metrics["masks/share"].weight == 3
    assert first["masks/share"].weight == 9


class Drawn(NamedTuple):
    """A random number."""

    number: int


class Draw(Operator):
    """Samples from the node's key."""

    def __call__(self, prompt_mask: c.PromptMask, key: Key = INJECTED) -> Drawn:
        return Drawn(int(torch.randint(2**31, (), generator=key.generator())))


def test_a_key_depends_only_on_seed_step_and_node() -> None:
    @algorithm
    def forwards(batch: PromptBatch) -> Any:
        a = Draw().named("a")(batch.prompt_mask)
        return a, Draw().named("b")(batch.prompt_mask)

    @algorithm
    def backwards(batch: PromptBatch) -> Any:
        b = Draw().named("b")(batch.prompt_mask)
        return Draw().named("a")(batch.prompt_mask), b

    def numbers(algorithm: Any, seed: int, step: int) -> dict[str, int]:
        executor = local_steps(Plan(algorithm()), {}, seed)
        values = executor.step(PROMPTS, step).values
        return {name: values[name]["drawn"].number for name in ("a", "b")}

    reference = numbers(forwards, 0, 0)
    assert numbers(backwards, 0, 0) == reference
    others = [numbers(forwards, 1, 0), numbers(forwards, 0, 1)]
    numbers_of_all = [n for found in (reference, *others) for n in found.values()]
    assert len(set(numbers_of_all)) == len(numbers_of_all)
    executor = local_steps(Plan(forwards()), {}, 0)  # independent of earlier steps
    executor.step(PROMPTS, 5)
    assert executor.step(PROMPTS, 0).values["a"]["drawn"].number == reference["a"]
