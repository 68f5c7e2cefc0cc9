"""`LocalRunner` and `Job`: nodes run in the plan's order, on the caller's own stack, as the same lines do eagerly;
and what cannot run is refused before a model loads."""

from __future__ import annotations

import pickle
import re
import threading
import traceback
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, get_type_hints

import pytest
import torch

from flowrl import INJECTED, Colocate, Key, Metrics, Operator, PromptBatch, PromptData, Training, algorithm, backends
from flowrl import columns as c
from flowrl.backends import Backend, TorchRollout
from flowrl.backends.torch.engine import TorchScorerEngine, TorchTrainerEngine
from flowrl.backends.torch.rollout import TorchRolloutEngine
from flowrl.core import protocols
from flowrl.core.backend import members
from flowrl.core.plan import Plan
from flowrl.core.protocols import BuildContext
from flowrl.core.session import current
from flowrl.data.dataproto import DataProto
from flowrl.errors import BindError, DataError, FlowrlError, GraphError, NodeError
from flowrl.graph import Graph
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
from flowrl.operators.correction import Mismatched
from flowrl.records import Receipt
from flowrl.run.build import EngineBuilder
from flowrl.run.job import Job
from flowrl.run.local import local_steps
from flowrl.run.steps import Steps
from tests.jobs import job_of, prompt_batch, proto, weights_of
from tests.rewards import digits

PROMPTS = proto(prompt_batch([[10, 11], [12], [13, 14, 15]]))


class Masks(Operator):
    """Whether each token of a prompt is there."""

    def __call__(self, prompt_mask: c.PromptMask, metrics: Metrics = INJECTED) -> c.PromptMask:
        metrics.mean("masks/share", prompt_mask.sum(), prompt_mask.numel())
        return ~prompt_mask


class Failing(Operator):
    """Raises, after a look at what it was given."""

    message: str = "nothing to see"

    def __call__(self, prompt_mask: c.PromptMask) -> c.PromptMask:
        raise DataError(self.message)


def walk(graph: Graph, **engines: Any) -> Steps:
    return local_steps(Plan(graph), engines, 0)


# ---- the walk


def test_nodes_run_once_each_in_the_order_of_the_plan(tiny: str) -> None:
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


def test_a_column_is_let_go_after_its_last_reader() -> None:
    alive: dict[str, bool] = {}
    first: list[weakref.ref[torch.Tensor]] = []

    class Watched(Operator):
        """A new tensor, which is watched."""

        def __call__(self, prompt_mask: c.PromptMask) -> c.PromptMask:
            out = prompt_mask.clone()
            first.append(weakref.ref(out))
            return out

    class Looking(Operator):
        """Whether the watched tensor is still there."""

        def __call__(self, prompt_mask: c.PromptMask) -> c.PromptMask:
            alive[self.name] = first[0]() is not None
            return ~prompt_mask

    @algorithm
    def chain(batch: PromptBatch) -> Any:
        made = Watched()(batch.prompt_mask)
        once = Looking().named("reader")(made)
        return Looking().named("later")(once)

    walk(chain()).step(PROMPTS, 0)
    assert alive == {"reader": True, "later": False}
    first.clear()
    walk(chain()).step(PROMPTS, 0, keep=("watched",))
    assert alive == {"reader": True, "later": True}


def test_sinks_and_what_was_asked_for_are_kept_and_nothing_else() -> None:
    @algorithm
    def chain(batch: PromptBatch) -> Any:
        one = Masks().named("one")(batch.prompt_mask)
        two = Masks().named("two")(one)
        return Masks().named("three")(two)

    executor = walk(chain())
    assert set(executor.step(PROMPTS, 0).columns) == {"three"}
    kept = executor.step(PROMPTS, 0, keep=("one", "batch"))
    assert set(kept.columns) == {"three", "one", "batch"}
    assert torch.equal(kept.columns["one"]["prompt_mask"], ~kept.columns["batch"]["prompt_mask"])
    assert torch.equal(kept.columns["three"]["prompt_mask"], ~PROMPTS["prompt_mask"])
    with pytest.raises(GraphError, match="no node 'four'"):
        executor.step(PROMPTS, 0, keep=("four",))


def test_an_input_without_its_columns_is_refused() -> None:
    @algorithm
    def chain(batch: PromptBatch) -> Any:
        return Masks()(batch.prompt_mask)

    with pytest.raises(GraphError, match=r"'batch' of chain wants .*lacks prompt_mask"):
        walk(chain()).step(PROMPTS.drop("prompt_mask"), 0)


def test_a_metric_that_two_nodes_report_is_prefixed_by_the_node() -> None:
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
    """Where a node's random numbers start."""

    number: int


class Draw(Operator):
    """One random number, out of the node's key."""

    def __call__(self, prompt_mask: c.PromptMask, key: Key = INJECTED) -> Drawn:
        return Drawn(int(torch.randint(2**31, (), generator=key.generator())))


def test_a_key_depends_on_seed_step_and_node_and_not_on_the_order_of_the_walk() -> None:
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
    drawn = [n for found in (reference, *others) for n in found.values()]
    assert len(set(drawn)) == len(drawn)
    executor = local_steps(Plan(forwards()), {}, 0)  # nor on the steps before
    executor.step(PROMPTS, 5)
    assert executor.step(PROMPTS, 0).values["a"]["drawn"].number == reference["a"]


# ---- errors and debuggers


def test_a_failing_node_is_named_with_its_step_and_what_it_was_given() -> None:
    @algorithm
    def broken(batch: PromptBatch) -> Any:
        return Failing("the mask is sad")(batch.prompt_mask)

    with pytest.raises(NodeError) as raised:
        walk(broken()).step(PROMPTS, 17)
    message = str(raised.value)
    assert "failing failed in step 17: DataError: the mask is sad" in message
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
    with pytest.raises(NodeError, match=rf"divides failed in step 0: RuntimeError: .*\n  at {__file__}:{line}\n"):
        walk(broken()).step(PROMPTS, 0)


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
    loss = PPOClip(0.2, kl=KLLoss("k3", 0.001))
    updated = UpdateActor(loss, mini_batch=mini_batch)(rollout, old, advantages, ref)
    return Sync()(updated), mismatch


def record_of(batch: DataProto) -> PromptBatch:
    return PromptBatch(**{name: batch[name] for name in PromptBatch._fields})


@pytest.mark.parametrize("name", ["ppo", "grpo"])
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


# ---- refused before a model loads


class Untouched:
    """Backends whose build must never be reached."""

    class Trainer(Backend):
        serves = (protocols.Trainer,)

        def build(self, context: BuildContext) -> TorchTrainerEngine:
            raise AssertionError("the trainer was built")

    class Scorer(Backend):
        serves = (protocols.Scorer,)

        def build(self, context: BuildContext) -> TorchScorerEngine:
            raise AssertionError("the scorer was built")

    class Rollout(Backend):
        serves = (protocols.Rollout,)

        def build(self, context: BuildContext) -> TorchRolloutEngine:
            raise AssertionError("the rollout was built")


def untouched(graph: Graph) -> Job:
    return graph.bind(actor=Untouched.Trainer(), ref=Untouched.Scorer(), rollout=Untouched.Rollout())


def refuse(job: Job, prompts_file: str, **settings: Any) -> str:
    """What a training of the job is refused with; nothing is written for it."""
    with pytest.raises(FlowrlError) as raised:
        Training(job, PromptData(prompts_file), steps=1, prompts=4, folder="nowhere", **settings).run()
    assert not Path("nowhere").exists()
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_job_that_is_ready_would_have_been_built(prompts_file: str, tmp_path: Path) -> None:
    job = untouched(grpo(digits))
    with pytest.raises(AssertionError, match="was built"):
        Training(job, PromptData(prompts_file), steps=1, prompts=4, folder=str(tmp_path)).run()


def test_an_unbound_role_is_refused(prompts_file: str) -> None:
    job = grpo(digits).bind(actor=Untouched.Trainer(), rollout=Untouched.Rollout())
    expected = r"BindError: grpo leaves 'ref' unbound \(ref_log_prob needs a Scorer as 'ref'\).*job.edit\(bind="
    assert re.match(expected, refuse(job, prompts_file))
    with pytest.raises(BindError, match="leaves 'ref' unbound"), job.eager():
        pass


def test_a_lag_is_refused_until_an_executor_can_run_it(prompts_file: str) -> None:
    job = untouched(grpo(digits).edit(lag=2))
    assert re.match(r"\w*Error: (?s:.*)lag=0", refuse(job, prompts_file))


def test_a_broken_rule_is_refused(prompts_file: str) -> None:
    found = refuse(untouched(grpo(digits, n=1)), prompts_file)
    assert found.startswith("RuleError") and "FR003" in found
    found = refuse(untouched(grpo(digits, n=2, mini_batch=5)), prompts_file)
    assert found.startswith("RuleError") and "mini_batch=5 does not divide the 8 rows" in found


def test_a_backend_that_cannot_serve_is_refused_where_it_is_bound() -> None:
    with pytest.raises(BindError, match=r"'actor' is bound to Scorer, but .* needs a Trainer.* declares no .*update"):
        grpo(digits).bind(actor=Untouched.Scorer())
    with pytest.raises(BindError, match=r"'actor' is bound to 'gpt2', which is no backend.* flowrl\.backends\.Backend"):
        grpo(digits).bind(actor="gpt2")
    with pytest.raises(BindError, match=r"'actor' is bound to Backend, but .* Backend serves no Protocol, which"):
        grpo(digits).bind(actor=Backend())
    with pytest.raises(BindError, match="no role 'critic' to bind"):
        grpo(digits).bind(critic=Untouched.Scorer())


def test_a_trainer_that_cannot_be_saved_is_refused_where_checkpoints_are_asked_for(prompts_file: str) -> None:
    job = untouched(grpo(digits))
    found = refuse(job, prompts_file, checkpoint_every=2)
    assert found.startswith("BindError: checkpoint_every=2 saves and restores the role 'actor', but Trainer does not")
    assert "declares no load_checkpoint, save_checkpoint; give its engine both" in found
    assert found.endswith("or leave checkpoint_every out.")
    with pytest.raises(
        BindError, match=r"restart='role', gpus=3\) saves and restores the role 'actor'.* or drop restart="
    ):
        replace(job, place=Colocate(3, restart="role")).refuse_unready()
    replace(job, place=Colocate(3)).refuse_unready()


def test_an_engine_that_lacks_what_its_backend_says_is_refused() -> None:
    class Hollow(Backend):
        serves = (protocols.Scorer, protocols.Closable)

        def build(self, context: BuildContext) -> Any:
            return object()

    with pytest.raises(BindError, match=r"Hollow, bound to the role 'ref', .* serves Scorer, .* has no log_probs"):
        EngineBuilder({"ref": Hollow()}, seed=0).all()


@pytest.mark.parametrize("name", ["TorchTrainer", "TorchScorer", "TorchCritic", "TorchRollout", "VLLM", "SGLang"])
def test_the_engines_have_what_their_backends_say(name: str) -> None:
    backend = getattr(backends, name)
    engine = get_type_hints(backend.build)["return"]
    for protocol in backend.serves:
        assert members(protocol) <= set(dir(engine))


# ---- engines


def test_engines_are_built_once_and_what_they_share_first(tiny: str) -> None:
    order: list[str] = []

    class Noting(Backend):
        name: str
        wants: tuple[str, ...] = ()

        def build(self, context: BuildContext) -> Any:
            others = [context.engine(role) for role in self.wants]
            order.append(self.name)
            return (self.name, context.seed, *others)

    engines = EngineBuilder({"a": Noting("a", ("c",)), "b": Noting("b"), "c": Noting("c")}, seed=4)
    assert engines.all() == {"a": ("a", 4, ("c", 4)), "b": ("b", 4), "c": ("c", 4)}
    assert order == ["c", "a", "b"]
    with pytest.raises(BindError, match=r"a circle: a -> b -> a"):
        EngineBuilder({"a": Noting("a", ("b",)), "b": Noting("b", ("a",))}, seed=0).all()
    with pytest.raises(BindError, match=r"'a' shares the weights of 'x', which is not bound; bind x="):
        EngineBuilder({"a": Noting("a", ("x",))}, seed=0).all()


def test_a_job_is_edited_as_its_graph_and_keeps_its_engines(tiny: str) -> None:
    job = job_of("grpo", tiny)
    other = job.edit(bind={"rollout": TorchRollout(tiny)})
    assert other.graph.bindings["actor"] == job.graph.bindings["actor"]
    assert other.graph.bindings["rollout"] == TorchRollout(tiny)
    assert job.graph.bindings["rollout"] == TorchRollout()
    assert set(job.build()) == {"actor", "ref", "rollout"}


class Closing:
    """A live engine that has something to end."""

    def __init__(self, name: str, closed: list[str]) -> None:
        self.name, self.closed = name, closed

    def close(self) -> None:
        self.closed.append(self.name)
        if self.name == "c":
            raise OSError("c does not end")


@pytest.mark.parametrize("fault", [None, "in the block", "while they are built", "while they are closed"])
def test_engines_are_closed(fault: str | None) -> None:
    """At the end of the block, the last one first; also where it ends by an error, or does not begin."""
    closed: list[str] = []

    class Named(Backend):
        name: str

        def build(self, context: BuildContext) -> Any:
            if self.name == "d":
                raise ValueError("d does not start")
            return object() if self.name == "plain" else Closing(self.name, closed)

    names = ["a", "plain", "b", *{"while they are built": "d", "while they are closed": "c"}.get(fault or "", "")]
    engines = EngineBuilder({name: Named(name) for name in names}, seed=0)
    try:
        with engines.live() as live:
            assert list(live) == names and not closed
            if fault == "in the block":
                raise ValueError("raised in the block")
    except (OSError, ValueError) as error:
        said = str(error)
    else:
        said = "nothing"
    assert (
        said
        == {
            None: "nothing",
            "in the block": "raised in the block",
            "while they are built": "d does not start",
            "while they are closed": "c does not end",
        }[fault]
    )
    assert closed == [name for name in reversed(names) if name in "abc"]


class ClosingRolloutEngine(TorchRolloutEngine):
    closed: ClassVar[list[str]] = []

    def close(self) -> None:
        self.closed.append(self.tokenizer.folder)


class ClosingRollout(TorchRollout):
    def build(self, context: BuildContext) -> ClosingRolloutEngine:
        engine = super().build(context)
        engine.__class__ = ClosingRolloutEngine
        return engine  # type: ignore[return-value]


def test_a_job_closes_its_engines(tiny: str) -> None:
    """Whichever way it is opened."""
    closed = ClosingRolloutEngine.closed
    job = job_of("grpo", tiny).edit(bind={"rollout": ClosingRollout(tiny, device="cpu")})
    with job.open(), pytest.raises(NodeError), job.open() as executor:
        executor.step(PROMPTS, 0)  # which holds no receipt yet
    assert closed == [tiny, tiny]
    with job.eager():
        assert len(closed) == 2
    assert closed == [tiny] * 3
