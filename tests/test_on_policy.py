"""On-policy training is enforced: rows sampled by other weights than those in training are refused.

The planted faults: stale rows, mixed versions, an engine that was never synced, a receipt with a wrong version, and a
load that keeps the old weights.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from flowrl import Key, Metrics, Now, PromptData
from flowrl.backends import SGD, TorchRollout, TorchTrainer
from flowrl.backends.torch.generate.rollout import TorchRolloutEngine
from flowrl.core.graphs.plan import Plan
from flowrl.data.proto.dataproto import DataProto
from flowrl.errors import NodeError, SyncError
from flowrl.operators import Generate, Sync, UpdateActor
from flowrl.protocols.protocols import BuildContext, Trainer
from flowrl.records import Receipt, Updated
from flowrl.run.engine.local import local_steps
from flowrl.run.engine.steps import Steps
from flowrl.run.training.job import Job
from flowrl.sync.digest import weights_digest
from tests.support.errors import raises
from tests.support.jobs import job_of, prompt_batch, proto, rollout_batch, weights_of

CONTEXT: Any = SimpleNamespace(seed=0)
KEY = Key.of(0)
PROMPTS = prompt_batch([[10, 11], [12], [13, 14, 15], [16]])


def trainer(folder: str) -> Any:
    return TorchTrainer(folder, optimizer=SGD(lr=0.1), device="cpu").build(CONTEXT)


def engine(folder: str) -> TorchRolloutEngine:
    return TorchRollout(folder, device="cpu").build(CONTEXT)


def trained(folder: str, updates: int) -> Any:
    """An actor after so many updates, each on rows of the version that it was at."""
    actor = trainer(folder)
    for version in range(updates):
        update(actor, version)
    return actor


def update(actor: Any, version: Any, ahead: int = 0, metrics: Metrics | None = None) -> Any:
    """One update on rows of `version`, with a lag of `ahead`."""
    rollout = rollout_batch(PROMPTS, [[40, 41], [42, 43], [44], [45, 46]])
    rollout = rollout._replace(policy_version=torch.as_tensor(version).expand(4).contiguous())
    zeros = torch.zeros(rollout.response_mask.shape)
    return UpdateActor(actor=actor)(rollout, zeros, zeros + 1, key=KEY, now=Now(0, lag=ahead), metrics=metrics)


def update_of_tokens(actor: Any, versions: list[list[int]], ahead: int, metrics: Metrics | None = None) -> Any:
    """One update on rows whose tokens have these `versions`."""
    rollout = rollout_batch(PROMPTS, [[40, 41], [42, 43], [44], [45, 46]])
    zeros, found = torch.zeros(rollout.response_mask.shape), torch.tensor(versions)
    rollout = rollout._replace(policy_version=found.amin(1), token_version=found)
    operator = UpdateActor(actor=actor)
    return operator(rollout, zeros, zeros + 1, token_version=found, key=KEY, now=Now(0, lag=ahead), metrics=metrics)


def assert_untouched(actor: Any, before: dict[str, torch.Tensor], version: int) -> None:
    assert actor.version == version
    assert all(torch.equal(before[name], tensor) for name, tensor in actor.weights())


def ages(metrics: Metrics) -> tuple[float, float]:
    """The mean and the largest age that updates have reported."""
    reported = metrics.compute()
    return reported["queue/age_mean"], reported["queue/age_max"]


def executor_of(job: Job) -> Steps:
    return local_steps(Plan(job.graph), job.build(), 0)


def batches(prompts_file: str, engines: Any, rows: int = 4) -> DataProto:
    return PromptData(prompts_file).load(engines["rollout"].tokenizer, 0).next(rows)


# ---- rows


def test_rows_of_an_older_version_are_refused_and_no_weight_changes(tiny: str) -> None:
    actor = trained(tiny, 1)
    before = weights_of(actor)
    with raises("update.stale-rows", node="update_actor", row=0, expected=1, found=0):
        update(actor, 0)
    assert_untouched(actor, before, version=1)


def test_rows_of_mixed_versions_are_refused_naming_the_first_stale_row(tiny: str) -> None:
    actor = trained(tiny, 1)
    before = weights_of(actor)
    with raises("update.stale-rows", row=1, expected=1, found=0):
        update(actor, [1, 0, 1, 0])
    assert_untouched(actor, before, version=1)


def test_rows_of_a_newer_version_are_refused(tiny: str) -> None:
    with raises("update.stale-rows", expected=0, found=7):
        update(trainer(tiny), 7)


def test_with_a_lag_rows_may_be_at_most_that_many_versions_old(tiny: str) -> None:
    actor, metrics = trained(tiny, 2), Metrics()
    before = weights_of(actor)
    with raises("update.stale-rows", row=2, expected=2, found=0) as error:
        update(actor, [2, 1, 0, 2], ahead=1)
    assert "1 of 4 rows" in error.value.message and "versions 1 to 2" in error.value.message
    assert_untouched(actor, before, version=2)
    update(actor, [2, 1, 0, 2], ahead=2, metrics=metrics)
    assert ages(metrics) == (0.75, 2)
    with raises("update.stale-rows", row=3, expected=3, found=4):
        update(actor, [3, 3, 3, 4], ahead=2)


def test_with_spans_the_age_limit_applies_to_each_token(tiny: str) -> None:
    actor, metrics = trained(tiny, 3), Metrics()
    before = weights_of(actor)
    with raises("update.stale-rows", row=1, expected=3, found=4):
        update_of_tokens(actor, [[2, 3], [3, 4], [2, 7], [1, 2]], ahead=1)
    with raises("update.stale-rows", row=3, expected=3, found=0):
        update_of_tokens(actor, [[1, 3], [3, 3], [2, 9], [0, 1]], ahead=2)  # what is off the mask is nothing
    assert_untouched(actor, before, version=3)
    update_of_tokens(actor, [[1, 3], [3, 3], [2, 9], [1, 1]], ahead=2, metrics=metrics)
    assert ages(metrics) == (pytest.approx(7 / 7), 2)


def test_mini_batches_and_epochs_of_a_step_count_as_one_version(tiny: str) -> None:
    actor = trainer(tiny)
    rollout = rollout_batch(PROMPTS, [[40, 41], [42, 43], [44], [45, 46]])
    zeros = torch.zeros(rollout.response_mask.shape)
    updated = UpdateActor(ppo_epochs=3, mini_batch=2, actor=actor)(rollout, zeros, zeros + 1, key=KEY)
    assert updated.version == 1  # counts updates, not the six optimizer steps


# ---- receipts


def test_a_sync_copies_the_weights_and_reports_bytes_and_transport(tiny: str) -> None:
    actor, rollout = trainer(tiny), engine(tiny)
    updated = update(actor, 0)
    receipt = Sync(actor=actor, rollout=rollout)(updated)
    assert receipt == rollout.receipt
    assert receipt.version == 1
    assert receipt.transport == "copy"
    assert receipt.bytes == sum(tensor.nbytes for _, tensor in actor.weights())
    assert receipt.digest == weights_digest(actor.weights())
    held = dict(rollout.model.state_dict())
    assert all(torch.equal(held[name], tensor) for name, tensor in actor.weights())


def test_a_copying_engine_that_missed_a_sync_is_refused_at_the_update(tiny: str) -> None:
    actor, rollout = trainer(tiny), engine(tiny)
    rollout.sync(actor)
    update(actor, 0)
    before = weights_of(actor)
    out = Generate(max_new_tokens=2, rollout=rollout)(PROMPTS, key=KEY)  # it answers as what it is: version 0
    zeros = torch.zeros(out.response_mask.shape)
    with raises("update.stale-rows", expected=1, found=0):
        UpdateActor(actor=actor)(out, zeros, zeros + 1, key=KEY)
    assert_untouched(actor, before, version=1)
    Sync(actor=actor, rollout=rollout)(Updated(1))
    out = Generate(max_new_tokens=2, rollout=rollout)(PROMPTS, key=KEY)
    assert UpdateActor(actor=actor)(out, out.rollout_log_probs, zeros + 1, key=KEY).version == 2


def test_an_engine_with_shared_weights_refuses_to_generate_without_a_sync(tiny: str) -> None:
    job = job_of("grpo", tiny)
    engines = job.build()
    engines["rollout"].sync(engines["actor"])
    update(engines["actor"], 0)
    with pytest.raises(SyncError, match=r"at version 1, but its receipt is of version 0.*Sync\(\)\(actor\)"):
        Generate(max_new_tokens=2, rollout=engines["rollout"])(PROMPTS, key=KEY)


def test_a_sync_of_shared_weights_moves_no_bytes(tiny: str) -> None:
    engines = job_of("grpo", tiny).build()
    receipt = Sync(actor=engines["actor"], rollout=engines["rollout"])(Updated(0))
    assert (receipt.bytes, receipt.transport) == (0, "alias")
    assert engines["rollout"].model is engines["actor"].model


def test_sync_refuses_an_outdated_update(tiny: str) -> None:
    actor, rollout = trainer(tiny), engine(tiny)
    stale = Updated(0)
    update(actor, 0)
    with raises("engine.version-mismatch", expected=0):
        Sync(actor=actor, rollout=rollout)(stale)


def test_sync_refuses_an_engine_that_returns_no_receipt(tiny: str) -> None:
    """A custom backend may omit the return value, which was an AttributeError of None."""

    class Forgetful(TorchRolloutEngine):
        def sync(self, trainer: Any) -> Any:
            super().sync(trainer)

    actor, honest = trainer(tiny), engine(tiny)
    rollout = Forgetful(honest.model, honest.tokenizer, max_rows=8)
    with raises("call.return", node="sync", expected="Receipt", found="a NoneType") as error:
        Sync(actor=actor, rollout=rollout)(update(actor, 0))
    assert "Forgetful returned a NoneType" in error.value.message


@pytest.mark.parametrize("lying_side", ["receipt", "engine"])
def test_a_receipt_with_a_wrong_version_is_refused(tiny: str, lying_side: str) -> None:
    class Liar(TorchRolloutEngine):
        def sync(self, source: Trainer) -> Receipt:
            receipt = super().sync(source)
            if lying_side == "engine":
                self._receipt = receipt._replace(version=receipt.version - 1)
                return receipt
            return receipt._replace(version=receipt.version + 1)

    actor, honest = trainer(tiny), engine(tiny)
    updated = update(actor, 0)
    liar = Liar(honest.model, honest.tokenizer, max_rows=8)
    with raises("engine.version-mismatch", expected=1):
        Sync(actor=actor, rollout=liar)(updated)


def test_rows_with_a_wrong_version_are_refused_by_the_update(tiny: str) -> None:
    class Liar(TorchRolloutEngine):
        def _require_receipt(self) -> Receipt:
            return super()._require_receipt()._replace(version=5)

    actor, honest = trainer(tiny), engine(tiny)
    liar = Liar(honest.model, honest.tokenizer, max_rows=8)
    liar.sync(actor)
    out = Generate(max_new_tokens=2, rollout=liar)(PROMPTS, key=KEY)
    with raises("update.stale-rows", expected=0, found=5):
        UpdateActor(actor=actor)(out, out.rollout_log_probs, out.rollout_log_probs, key=KEY)


def test_an_engine_that_ignores_synced_weights_is_detected_by_their_digest(tiny: str) -> None:
    class Idle(TorchRolloutEngine):
        def _load(self, received: dict[str, torch.Tensor]) -> None:
            """Takes the weights, and does nothing with them."""

    actor, honest = trainer(tiny), engine(tiny)
    idle = Idle(honest.model, honest.tokenizer, max_rows=8)
    assert idle.sync(actor).version == 0  # what it holds is what it was sent, as yet
    updated = update(actor, 0)
    with raises("sync.damaged", version=1):
        Sync(actor=actor, rollout=idle)(updated)
    assert idle.receipt is None
    with raises("engine.no-receipt", node="generate"):
        Generate(max_new_tokens=2, rollout=idle)(PROMPTS, key=KEY)


# ---- in a graph


def test_a_step_on_a_never_synced_engine_is_refused(tiny: str, prompts_file: str) -> None:
    executor = executor_of(job_of("grpo", tiny))
    batch = batches(prompts_file, executor.runner.engines)
    with pytest.raises(NodeError, match=r"generate failed in step 1: SyncError: .*no receipt.*Sync") as raised:
        executor.step(batch, 0)
    assert isinstance(raised.value.__cause__, SyncError)


@pytest.mark.parametrize("own_weights", [False, True])
def test_after_an_initial_sync_steps_run_in_sequence(tiny: str, prompts_file: str, own_weights: bool) -> None:
    job = job_of("grpo", tiny)
    if own_weights:
        job = job.edit(bind={"rollout": TorchRollout(tiny, device="cpu")})
    executor = executor_of(job)
    executor.sync()
    batch = batches(prompts_file, executor.runner.engines)
    for step in range(3):
        result = executor.step(batch, step, return_nodes=("generate",))
        assert set(result.columns["generate"]["policy_version"].tolist()) == {step}
        assert result.values["sync"]["receipt"].version == step + 1
        moved = result.metrics.compute()["sync/bytes"]
        assert (moved > 0) == own_weights


def test_stale_rows_behind_a_new_receipt_stop_a_step_before_training(tiny: str, prompts_file: str) -> None:
    """The engine keeps its old weights but returns a new receipt; its digest and the versions of its rows reveal it."""

    class Forgetful(TorchRolloutEngine):
        def sync(self, source: Trainer) -> Receipt:
            if self._receipt is None:
                super().sync(source)
            return self._receipt._replace(version=source.version)  # type: ignore[union-attr]

    executor = executor_of(job_of("grpo", tiny).edit(bind={"rollout": TorchRollout(tiny, device="cpu")}))
    honest = executor.runner.engines["rollout"]
    executor.runner.engines["rollout"] = Forgetful(honest.model, honest.tokenizer, max_rows=64)
    executor.sync()
    batch = batches(prompts_file, executor.runner.engines)
    with pytest.raises(NodeError, match=r"sync failed in step 1: SyncError: .*the engine 0, expected one version"):
        executor.step(batch, 0)
    actor = executor.runner.engines["actor"]
    before = weights_of(actor)
    with pytest.raises(NodeError, match=r"update_actor failed in step 2: StalePolicyError: .*row 0 has policy_ver"):
        executor.step(batch, 1)
    assert_untouched(actor, before, version=1)


class Recording(TorchRollout):
    """A backend whose engine records the order of its syncs and calls."""

    def build(self, context: BuildContext) -> RecordingEngine:
        built = super().build(context)
        return RecordingEngine(built.model, built.tokenizer, 64)


class RecordingEngine(TorchRolloutEngine):
    log: ClassVar[list[str]] = []

    def sync(self, source: Trainer) -> Receipt:
        self.log.append("sync")
        return super().sync(source)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.log.append("generate")
        return super().generate(*args, **kwargs)


def test_engines_of_eager_code_are_synced_first(tiny: str) -> None:
    backend = Recording(tiny, device="cpu")
    job = job_of("grpo", tiny).edit(bind={"rollout": backend})
    with job.eager():
        Generate(max_new_tokens=2)(PROMPTS)
    assert RecordingEngine.log == ["sync", "generate"]


def test_step_accepts_a_batch_built_by_hand(tiny: str) -> None:
    executor = executor_of(job_of("grpo", tiny, max_new_tokens=2))
    executor.sync()
    result = executor.step(proto(PROMPTS), 0)
    assert result.values["sync"]["receipt"].version == 1
