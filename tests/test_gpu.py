"""Engines on a CUDA device against the same engines on the CPU: results, freed memory, and turns.

Every test has two cases: ``cuda``, which is skipped without a GPU, and ``cpu``, which runs the same lines on any
machine.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.harness.turns import Turns, allocated
from flowrl import Key
from flowrl.backends import (
    SGD,
    AdamW,
    TorchCritic,
    TorchRollout,
    TorchScorer,
    TorchTrainer,
)
from flowrl.backends.torch.on_mesh import MeshBackend
from flowrl.backends.torch.train.sharded import Sharded
from flowrl.core.graphs.plan import Plan
from flowrl.distributed.cluster.host_server import start_fork_server
from flowrl.graphs import grpo, ppo
from flowrl.operators import KLLoss, PPOClip, ValueClip
from flowrl.operators.losses.objective import ROW, FirstPass, TokenObjective
from flowrl.operators.losses.policy_losses import Reinforce
from flowrl.operators.updates.mini_batches import record
from flowrl.protocols.mesh import Mesh
from flowrl.protocols.protocols import MiniBatch, Sampling
from flowrl.run.engine.local import local_steps
from flowrl.run.engine.steps import Steps
from flowrl.run.training.job import Job
from flowrl.sync.digest import algorithm_for, combine, tensor_digest
from tests.backends.torch.train.fsdp_cases import Ranks, weights
from tests.nightly import nightly_except
from tests.support.jobs import bind_tiny, prompt_batch, proto
from tests.support.models import VOCAB, ragged, tiny_folder
from tests.support.rewards import digits
from tests.workers import poison

# What other versions of torch warn of on a GPU is for the summary to show, and no reason to fail.
pytestmark = pytest.mark.filterwarnings("default")

ALONE: Any = Ranks(0, 1, Path())
KINDS = ["llama", "qwen2", "gpt2", "gemma2"]
PPO = TokenObjective(PPOClip(dual_clip=3.0), kl=KLLoss("k3", 0.05), entropy=0.01)
ROWS = 7
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, max_new_tokens=16)
PROMPTS = proto(prompt_batch([[10, 11], [12], [13, 14, 15]]))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device to compare with the CPU, with float32 products in float32 and not TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield request.param
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def of(kind: str) -> str:
        if kind not in made:
            made[kind] = tiny_folder(tmp_path_factory.mktemp("models"), kind)
        return made[kind]

    return of


def trainer(model: str, device: str, **settings: Any) -> Any:
    settings = {"optimizer": SGD(lr=1.0), "grad_clip": None, "max_tokens": 40} | settings
    return TorchTrainer(model, device=device, **settings).build(ALONE)


TOKENS = ("input_ids", "attention_mask", "position_ids", "response_mask")


def policy_batch() -> Any:
    """Rows with old and reference log-probs near those of a random model, so that some ratios are clipped."""
    rows = ragged(ROWS)
    draw = torch.Generator().manual_seed(1)
    old, ref = (-3 + torch.randn(rows.response_mask.shape, generator=draw) for _ in range(2))
    columns = {**rows._asdict(), "old_log_probs": old, "advantages": rows.pull, "ref_log_prob": ref}
    return record({n: columns[n] for n in (*TOKENS, "temperature", "old_log_probs", "advantages", "ref_log_prob")})


def value_batch() -> Any:
    rows = ragged(ROWS)
    columns = {**rows._asdict(), "values": 0.1 * rows.pull, "returns": rows.pull}
    return record({name: columns[name] for name in (*TOKENS, "values", "returns")})


def minis(batch: Any, loss: Any, *parts: list[int]) -> list[MiniBatch]:
    return [MiniBatch(torch.tensor(rows), loss.weights(batch.response_mask[torch.tensor(rows)])) for rows in parts]


ALL = list(range(ROWS))


def train(engine: Any, *parts: list[int]) -> dict[str, float]:
    batch = policy_batch()
    return engine.update(batch, minis(batch, PPO, *(parts or (ALL,))), PPO).compute()


def change(engine: Any, act: Callable[[], object]) -> Tensor:
    """By how much `act` changed the weights, all in one float64 vector on the CPU; for SGD at 1, the gradient."""
    before = weights(engine)
    act()
    return torch.cat([(tensor - before[name]).double().cpu().flatten() for name, tensor in engine.weights()])


def relative_error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


# ---- the same numbers


@pytest.mark.parametrize("kind", nightly_except(["llama"], KINDS))
def test_log_probs_match_the_cpu(device: str, folder: Any, kind: str) -> None:
    batch = ragged(ROWS)
    truth = TorchScorer(folder(kind), device="cpu").build(ALONE).log_probs(batch)
    for engine in (TorchScorer(folder(kind), device=device).build(ALONE), trainer(folder(kind), device)):
        found = engine.log_probs(batch)
        assert found.dtype == torch.float32 and found.device.type == "cpu"  # where the rows came from
        assert {parameter.device.type for parameter in engine.model.parameters()} == {device}
        torch.testing.assert_close(found, truth, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("kind", nightly_except(["llama"], KINDS))
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointed"])
def test_gradients_match_the_cpu(device: str, folder: Any, kind: str, checkpointing: bool) -> None:
    alone = trainer(folder(kind), "cpu")
    engine = trainer(folder(kind), device, gradient_checkpointing=checkpointing)
    logs: list[dict[str, float]] = []
    truth = change(alone, lambda: logs.append(train(alone)))
    found = change(engine, lambda: logs.append(train(engine)))
    assert truth.norm() > 0.1 and relative_error(found, truth) < 1e-4
    assert logs[1] == pytest.approx(logs[0], rel=1e-4, abs=1e-5)
    assert 0.05 < logs[0]["actor/pg_clipfrac"] < 0.95


def test_adamw_steps_over_mini_batches_match_the_cpu(device: str, folder: Any) -> None:
    settings = {"optimizer": AdamW(lr=0.002, eps=1e-5), "grad_clip": 1.0}
    engines = [trainer(folder("llama"), where, **settings) for where in ("cpu", device)]
    steps = ([4], [0, 1, 2, 3, 5, 6], [6, 2, 0], [5, 1, 3, 4])
    truth, found = (change(engine, lambda engine=engine: train(engine, *steps)) for engine in engines)
    assert relative_error(found, truth) < 1e-3


def test_values_and_gradients_of_the_critic_match_the_cpu(device: str, folder: Any) -> None:
    batch, loss = value_batch(), TokenObjective(ValueClip(0.2))
    found = []
    for where in ("cpu", device):
        engine = TorchCritic(folder("llama"), SGD(lr=0.005), grad_clip=None, device=where).build(ALONE)
        logs = [engine.update(batch, minis(batch, loss, ALL, ALL, ALL), loss).compute() for _ in range(2)]
        found.append((engine.values(batch), logs))
    (truth, expected), (values, logs) = found
    assert truth.std() > 0.01 and values.device.type == "cpu"
    torch.testing.assert_close(values, truth, atol=1e-4, rtol=1e-4)
    for log, wanted in zip(logs, expected, strict=True):
        assert log == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_bfloat16_matches_float32_up_to_rounding(device: str, folder: Any, kind: str) -> None:
    exact, engine = trainer(folder(kind), "cpu"), trainer(folder(kind), device, dtype="bfloat16")
    batch = ragged(ROWS)
    truth, found = exact.log_probs(batch), engine.log_probs(batch)
    assert found.dtype == torch.float32 and 0 < relative_error(found, truth) < 0.02
    scorer = TorchScorer(folder(kind), dtype="bfloat16", max_tokens=40, device=device).build(ALONE)
    torch.testing.assert_close(scorer.log_probs(batch), found, atol=1e-6, rtol=0)
    assert relative_error(change(engine, lambda: train(engine)), change(exact, lambda: train(exact))) < 0.1
    assert {tensor.dtype for _, tensor in engine.weights()} == {torch.float32}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", nightly_except(["llama"], KINDS))
def test_the_first_forward_of_an_update_is_bit_equal_to_scoring(
    device: str, folder: Any, kind: str, dtype: str
) -> None:
    """By which a plan takes the old log-probs from there; see `flowrl.core.graphs.fusing`."""
    engine = trainer(folder(kind), device, dtype=dtype, max_tokens=40)
    assert TorchTrainer(folder(kind)).why_not_fusable is None
    assert (engine._scorer.unpacked is None) == (kind != "gemma2")  # rows are packed where they are on a CPU
    batch = policy_batch()
    scored, log_probs = engine.log_probs(batch), torch.zeros(batch.response_mask.shape)
    objective = FirstPass(Reinforce(), old_log_probs=log_probs)
    rows = record({**batch._asdict(), ROW: torch.arange(ROWS)})
    engine.update(rows, minis(batch, objective, ALL), objective)
    assert torch.equal(log_probs, scored)


@pytest.mark.parametrize("kind", nightly_except(["llama"], KINDS))
def test_greedy_responses_match_the_cpu(device: str, folder: Any, kind: str) -> None:
    answers = []
    for where in ("cpu", device):
        actor = trainer(folder(kind), where)
        engine = TorchRollout(folder(kind), device=where).build(ALONE)
        receipt = engine.sync(actor)
        sent = {name: tensor_digest(name, tensor.cpu(), algorithm_for(tensor)) for name, tensor in actor.weights()}
        assert receipt.digest == combine(sent)  # as a CPU computes it
        draw = torch.Generator().manual_seed(0)
        rows = [torch.randint(6, VOCAB, (n,), generator=draw).tolist() for n in (1, 5, 9, 5, 70, 2)]
        prompts, mask = engine.tokenizer.pad_left(rows)
        answers.append(engine.generate(prompts, mask, list("abcdef"), GREEDY, Key.of(0)))
    truth, found = answers
    assert found.responses.device.type == "cpu" and torch.equal(found.responses, truth.responses)
    assert torch.equal(found.response_mask, truth.response_mask)
    torch.testing.assert_close(found.log_probs, truth.log_probs, atol=1e-4, rtol=1e-5)


# ---- sleep and wake


def state(engine: Any) -> dict[str, Tensor]:
    """A copy, on the CPU, of weights and optimizer state."""
    held = engine.state_dict()
    slots = {
        f"{index}.{slot}": value for index, slots in held["optimizer"]["state"].items() for slot, value in slots.items()
    }
    return {name: tensor.detach().cpu().clone() for name, tensor in {**held["weights"], **slots}.items()}


def trained(model: str, device: str) -> Any:
    """A trainer after one step, so that there is optimizer state."""
    engine = trainer(model, device, optimizer=AdamW(lr=0.01))
    train(engine)
    return engine


@pytest.fixture
def empty(device: str, folder: Any) -> int:
    """Bytes in use on the device before there is any engine: what libraries allocate once stays allocated."""
    trained(folder("llama"), device)
    gc.collect()
    return allocated(device)


def test_sleep_frees_device_memory_and_wake_restores_every_bit(device: str, folder: Any, empty: int) -> None:
    engine = trained(folder("llama"), device)
    before, log_probs = state(engine), engine.log_probs(ragged(ROWS))
    sizes = sum(tensor.nbytes for tensor in before.values())
    assert device == "cpu" or allocated(device) - empty > 0.99 * sizes
    for _ in range(2):
        engine.sleep()
        gc.collect()
        assert allocated(device) - empty < 0.01 * sizes
        assert {tensor.device.type for _, tensor in engine.weights()} == {"cpu"}
        engine.wake()
        assert {tensor.device.type for _, tensor in engine.weights()} == {device}
        after = state(engine)
        assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
        torch.testing.assert_close(engine.log_probs(ragged(ROWS)), log_probs, atol=1e-6, rtol=0)
    twin = trained(folder("llama"), device)
    found, truth = (change(one, lambda one=one: train(one)) for one in (engine, twin))
    assert relative_error(found, truth) < 1e-5  # the optimizer goes on from its own state


@pytest.mark.parametrize("backend", [TorchScorer, TorchRollout, TorchCritic])
def test_sleep_frees_device_memory_of_other_engines(device: str, folder: Any, backend: Any, empty: int) -> None:
    engine = backend(folder("qwen2"), device=device).build(ALONE)
    gc.collect()
    held = allocated(device) - empty
    assert (held > 0) == (device == "cuda")
    engine.sleep()
    assert allocated(device) - empty <= 0.01 * held
    engine.wake()
    assert allocated(device) - empty == pytest.approx(held, rel=0.01)


# ---- FSDP2 with one rank, over NCCL


@pytest.fixture
def group(device: str) -> Iterator[DeviceMesh]:
    """A group of one rank, with its mesh."""
    kind = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh.from_group(dist.group.WORLD, device)
    dist.destroy_process_group()


@pytest.fixture
def sharding(group: DeviceMesh, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Specs of one rank shard their weights too, with or without offloading."""

    def join(spec: Any, context: Any) -> Sharded:
        return Sharded(Mesh(), group.get_group(), torch.device(device), spec.dtype == "bfloat16", spec.offload)

    monkeypatch.setattr(MeshBackend, "join", join)


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
def test_a_sharded_trainer_with_one_rank_matches_an_unsharded_one(
    device: str, folder: Any, sharding: None, offload: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"optimizer": SGD(lr=0.1, momentum=0.9), "grad_clip": 1.0}
    engine = trainer(folder("qwen2"), device, offload=offload, **settings)
    monkeypatch.undo()
    alone = trainer(folder("qwen2"), "cpu", **settings)
    batch = ragged(ROWS)
    torch.testing.assert_close(engine.log_probs(batch), alone.log_probs(batch), atol=1e-4, rtol=1e-5)
    found, truth = (change(one, lambda one=one: train(one, ALL, [1, 2, 3])) for one in (engine, alone))
    assert relative_error(found, truth) < 1e-4
    engine.sleep()
    engine.wake()
    engine.save_checkpoint(str(tmp_path / "saved"))
    alone.load_checkpoint(str(tmp_path / "saved"))
    assert all(torch.equal(tensor.cpu(), weights(alone)[name]) for name, tensor in engine.weights())
    found, truth = (change(one, lambda one=one: train(one)) for one in (engine, alone))
    assert relative_error(found, truth) < 1e-4


def test_a_sharded_bfloat16_trainer_and_critic_score_and_train(device: str, folder: Any, sharding: None) -> None:
    engine = trainer(folder("llama"), device, dtype="bfloat16", gradient_checkpointing=True)
    truth = TorchScorer(folder("llama"), device=device).build(ALONE).log_probs(ragged(ROWS))
    assert 0 < relative_error(engine.log_probs(ragged(ROWS)), truth) < 0.02
    assert torch.isfinite(change(engine, lambda: train(engine))).all()
    critic, batch, loss = (
        TorchCritic(folder("llama"), device=device).build(ALONE),
        value_batch(),
        TokenObjective(ValueClip(0.2)),
    )
    critic.update(batch, minis(batch, loss, ALL), loss)
    assert critic.values(batch).abs().max() > 0


# ---- whole steps


def job_of(algorithm: str, model: str, device: str, rollout: TorchRollout) -> Job:
    graph = {"ppo": ppo(digits, max_new_tokens=6), "grpo": grpo(digits, n=4, max_new_tokens=6)}[algorithm]
    return bind_tiny(graph, model, device=device, rollout=rollout)


def walk(job: Job) -> Steps:
    return local_steps(Plan(job.graph), job.build(), 0)


def flat(executor: Steps) -> Tensor:
    return torch.cat([w.detach().cpu().flatten() for _, w in executor.runner.engines["actor"].weights()])


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_steps_of_algorithms_match_the_cpu(device: str, folder: Any, algorithm: str) -> None:
    found = []
    for where in ("cpu", device):
        executor = walk(job_of(algorithm, folder("llama"), where, TorchRollout()))
        executor.sync()
        start = flat(executor)
        result = executor.step(PROMPTS, 0, return_nodes=("generate",))
        found.append((result.columns["generate"]["responses"], result.metrics.compute(), flat(executor) - start))
    (tokens, expected, moved), (sampled, metrics, shift) = found
    assert torch.equal(sampled, tokens)
    assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert moved.norm() > 0 and relative_error(shift, moved) < 1e-3


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_engines_that_take_turns_match_engines_always_awake(device: str, folder: Any, algorithm: str) -> None:
    """Colocated actor, reference, critic and rollout, of which only those that a node uses are on the device."""
    found = []
    for turns in (False, True):
        rollout = TorchRollout(folder("llama"), device=device)
        executor = walk(job_of(algorithm, folder("llama"), device, rollout))
        executor.sync()
        taken = Turns(executor, device) if turns else None
        logs = [
            executor.step(PROMPTS, step, **({"on_node": taken} if taken else {})).metrics.compute() for step in range(2)
        ]
        found.append((logs, flat(executor)))
        if taken:
            slept = [turn for turn in taken.log if turn.what == "sleep"]
            assert {turn.role for turn in slept} == set(executor.runner.engines)
            assert device == "cpu" or all(turn.grown < 0 for turn in slept)
    (expected, truth), (logs, after) = found
    for log, wanted in zip(logs, expected, strict=True):
        assert log == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert relative_error(after, truth) < 1e-6


def test_forks_of_the_host_server_compute_on_the_device(device: str) -> None:
    """Two at a time, which they could not if it had initialized CUDA: its imports must not."""
    server = start_fork_server({"actor": TorchTrainer("any"), "critic": TorchCritic("any")})
    assert server is not None
    with closing(server):
        assert server.wait_until_ready() == 1, "threads, which forks would be without"
        pipes = [os.pipe() for _ in range(2)]
        for _, theirs in pipes:
            server.fork(f"{poison.__name__}:{poison.compute.__name__}", device, [theirs])
            os.close(theirs)
        for ours, _ in pipes:
            with open(ours) as pipe:
                assert json.load(pipe) == [False, 30.0]
