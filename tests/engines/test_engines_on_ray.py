"""Real engines on Ray: several ranks, or one rank on several slots, taking turns with the actor."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file
from torch import Tensor

from flowrl import After, Colocate, PromptData, Split, Training
from flowrl.backends import SGD, TorchTrainer
from flowrl.backends.sglang.engine import SGLang
from flowrl.backends.torch.score.engine import TorchTrainerEngine
from flowrl.backends.vllm.engine import VLLM
from flowrl.core.graphs.plan import Plan
from flowrl.distributed.faults.faults import HostDiedError
from flowrl.episodes import Answer, Endpoint, Environment, Reply
from flowrl.errors import NodeError
from flowrl.operators import Interact, RolloutCorrection
from flowrl.protocols.protocols import Sampling
from flowrl.run.placement.place import Place
from flowrl.run.training.job import Job
from flowrl.sync.digest import weights_digest
from tests.engines.contract.answers import CONTEXT, by_torch
from tests.engines.contract.requests import speaks
from tests.engines.sglang.process_leaks import eventually, leaks_of_sglang
from tests.engines.vllm.vllm_slot import VLLMSlot
from tests.on_ray.process_leaks import ends, family, leaves_nothing, process_ids
from tests.support.jobs import job_of, prompt_batch, proto
from tests.support.models import tiny_folder
from tests.support.runs import lines

pytestmark = [pytest.mark.timeout(480), pytest.mark.usefixtures("cluster")]

PROMPTS = [[9, 20, 33, 41], [12], [7, 8, 9], [30, 31], [5, 6, 7, 8, 9, 10]]
TOKENS = 12
DEADLINE = 180


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One Ray for all tests; the value of an environment variable of all its processes."""
    mark = str(tmp_path_factory.mktemp("cluster"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOWRL_TEST", mark)
        ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20)
    yield mark
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("on-ray"), "qwen2")


def job_with(folder: str, rollout: Any, place: Colocate | None = None, ranks: int = 1) -> Job:
    job = job_of("grpo", folder, optimizer=SGD(lr=0.5), trainer={"ranks": ranks}, n=2, max_new_tokens=TOKENS)
    return replace(job, place=place).edit(bind={"rollout": rollout})


def all_processes(executor: Any) -> set[int]:
    """The processes of the job and the subprocesses of its engines."""
    return {process for host in process_ids(executor).values() for process in family(host)}


def assert_greedy_responses(executor: Any, folder: str, scratch: Path, ranks: int) -> Any:
    """Train a step, which is returned; then compare greedy responses with torch on the actor's weights."""
    batch = proto(prompt_batch(PROMPTS))
    executor.sync()
    step = executor.step(batch, 0, return_nodes=("generate",))
    assert {int(version) for version in step.columns["generate"]["policy_version"]} == {0}
    executor.save_pretrained("actor", str(scratch))
    receipt = step.values["sync"]["receipt"]
    saved = load_file(scratch / "model.safetensors")
    assert (receipt.version, receipt.digest) == (1, weights_digest(saved.items()))
    assert step.metrics["sync/by/object_store"].compute() == 1  # between processes that share slots
    assert step.metrics["sync/bytes"].compute() == sum(tensor.nbytes for tensor in saved.values())

    greedy = executor.plan.graph.subgraph("generate").edit(set={"generate.temperature": 0.0}, name="greedy")
    fork = executor.fork(Plan(greedy), 0)
    answers = fork.step(batch, 1, return_nodes=("generate",)).columns["generate"]
    assert torch.equal(answers["prompts"], batch["prompts"].repeat_interleave(2, 0))  # all rows, in their order
    assert {int(version) for version in answers["policy_version"]} == {1}
    mask = batch["prompt_mask"].repeat_interleave(2, 0)
    sampling = Sampling(temperature=0.0, top_k=0, top_p=1.0, max_new_tokens=TOKENS)
    expected = by_torch(TorchTrainer(str(scratch)).build(CONTEXT), folder, answers["prompts"], mask, sampling)
    pairs = zip(answers["responses"], answers["response_mask"], strict=True)
    assert [ids[counts].tolist() for ids, counts in pairs] == expected
    single = executor.fork(Plan(greedy.edit(set={"repeat.n": 1})), 0)  # fewer rows than ranks
    alone = single.step(proto(prompt_batch(PROMPTS[:1])), 1, return_nodes=("generate",)).columns["generate"]
    assert alone["responses"].tolist() == expected[:1]
    at_work = {span.place for span in executor.timeline.spans if span.name == "generate"}
    assert at_work == {f"rollout rank {rank}" for rank in range(ranks)}
    return step


def assert_death_is_reported(executor: Any, rank: int) -> None:
    """Kill a rank before it generates; assert that the error names it within the deadline."""
    victim = executor.runner.hosts.ranks("rollout")[rank]
    [pid] = [pid for host, pid in process_ids(executor).items() if host == victim]

    def on_node(node: str) -> None:
        if node == "generate":
            os.kill(pid, signal.SIGKILL)
            assert ends(pid)

    started = time.monotonic()
    with pytest.raises(HostDiedError, match=f"generate in step 3.* lost rollout rank {rank}, whose process died"):
        executor.step(proto(prompt_batch(PROMPTS)), 2, on_node=on_node)
    assert time.monotonic() - started < DEADLINE


class SendsOtherWeights(TorchTrainer):
    """Where the file `fault_file` is, it sends weights other than those it scores with; their digest is correct."""

    fault_file: str = ""

    def build(self, context: Any) -> TorchTrainerEngine:
        engine, fault_file = super().build(context), Path(self.fault_file)
        honest = engine.weights

        def weights() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in honest():
                yield name, tensor * 1.5 if fault_file.exists() and "layers.0.mlp" in name else tensor

        engine.weights = weights  # type: ignore[method-assign]
        return engine


def assert_other_weights_are_refused(executor: Any, fault_file: Path) -> None:
    """Assert that each rank refuses weights other than those the trainer scores with."""
    fault_file.touch()
    with pytest.raises(NodeError, match=r"on rollout rank [01]: SyncError: .*score the same 64 tokens differently"):
        executor.sync()


def check_job(job: Job, folder: str, scratch: Path, ranks: int, dies: int, fault_file: Path | None = None) -> Any:
    """All of the above, `fault_file` being that of a `SendsOtherWeights` actor; what the first step left."""
    with leaves_nothing() as processes, job.open() as executor:
        processes += all_processes(executor)
        step = assert_greedy_responses(executor, folder, scratch, ranks)
        if fault_file is not None:
            assert_other_weights_are_refused(executor, fault_file)
        processes += all_processes(executor)
        assert_death_is_reported(executor, dies)
    return step


@pytest.mark.engines("vllm", "ray")
def test_two_vllm_ranks_match_one_and_report_faults(folder: str, tmp_path: Path, vllm_slot: VLLMSlot) -> None:
    """Rows have the samples of one engine in this process, on any rank; the same job tests both faults."""
    one, fault_file = VLLM(folder, dtype="float32", kv_cache_bytes=64 << 20), tmp_path / "fault_file"
    job = job_with(folder, replace(one, ranks=2), Colocate(gpus=2, deadline=DEADLINE))
    job = job.edit(bind={"actor": SendsOtherWeights(folder, SGD(lr=0.5), device="cpu", fault_file=str(fault_file))})
    there = check_job(job, folder, tmp_path / "actor", ranks=2, dies=1, fault_file=fault_file)
    vllm_slot.free()
    with job_with(folder, one).open() as executor:
        executor.sync()
        here = executor.step(proto(prompt_batch(PROMPTS)), 0, return_nodes=("generate",))
    for column in ("responses", "response_mask"):
        assert torch.equal(here.columns["generate"][column], there.columns["generate"][column])
    assert here.metrics["reward/mean"].compute() == there.metrics["reward/mean"].compute()
    expected = pytest.approx(here.metrics["actor/grad_norm"].compute(), rel=1e-3)
    assert there.metrics["actor/grad_norm"].compute() == expected


@pytest.mark.engines("vllm", "ray")
@pytest.mark.nightly
def test_tensor_parallel_vllm_over_two_slots(folder: str, tmp_path: Path) -> None:
    """The two ranks of the actor use the same slots."""
    rollout = VLLM(folder, tensor_parallel=2, dtype="float32", kv_cache_bytes=64 << 20)
    job = job_with(folder, rollout, Colocate(gpus=2, deadline=DEADLINE), ranks=2)
    check_job(job, folder, tmp_path / "actor", ranks=1, dies=0)


@pytest.mark.engines("sglang", "ray")
@pytest.mark.nightly
def test_two_sglang_ranks_match_one(folder: str, tmp_path: Path) -> None:
    rollout = SGLang(folder, ranks=2, dtype="float32", max_model_len=64, max_num_seqs=8, cache_tokens=4096)
    job = job_with(folder, rollout, Colocate(gpus=2, deadline=DEADLINE))
    check_job(job, folder, tmp_path / "actor", ranks=2, dies=1)


ROLLOUTS = {
    "vllm": lambda folder: VLLM(folder, dtype="float32", kv_cache_bytes=64 << 20),
    "sglang": lambda folder: SGLang(folder, dtype="float32", max_model_len=200, max_num_seqs=8, cache_tokens=4096),
}


class Counts(Environment):
    """Two turns, each rewarded by its length."""

    async def step(self, answer: Answer) -> Reply:
        return Reply(f"{len(answer.ids)} tokens", reward=len(answer.ids) / 8, done=answer.turn == 1)


@pytest.mark.parametrize(
    ("kind", "place", "lag", "environment"),
    [
        pytest.param(
            "vllm",
            Split(1, 1, deadline=DEADLINE),
            1,
            Endpoint(speaks),
            marks=[pytest.mark.engines("vllm", "ray"), pytest.mark.nightly],
        ),
        pytest.param(
            "sglang",
            Colocate(gpus=1, deadline=DEADLINE),
            0,
            Counts,
            marks=[pytest.mark.engines("sglang", "ray"), pytest.mark.nightly],
        ),
        pytest.param(
            "sglang",
            Colocate(gpus=1, deadline=DEADLINE),
            0,
            Endpoint(speaks),
            marks=pytest.mark.engines("sglang", "ray"),
        ),
    ],
)
def test_episodes_run_while_sharing_slots_with_the_actor_and_with_lag(
    kind: str, place: Place, lag: int, environment: Any, folder: str, prompts_file: str, tmp_path: Path, cluster: str
) -> None:
    episodes = Interact(environment, max_turns=2, context=150, max_new_tokens=8)
    inserted = {"correction": After("group_advantage", RolloutCorrection("token", "truncate", high=2.0))}
    job = job_with(folder, ROLLOUTS[kind](folder)).edit(replace={"generate": episodes}, drop=["reward"])
    job = replace(job.edit(lag=lag, insert=inserted if lag else {}), place=place)
    settings: dict[str, Any] = {"steps": 3, "prompts": 3, "rollouts_every": 1, "save_model": False}
    before = leaks_of_sglang(cluster)
    with leaves_nothing():
        run = Training(job, PromptData(prompts_file), folder=str(tmp_path), **settings).run()
    eventually(lambda: not leaks_of_sglang(cluster) - before)
    assert [metrics["sync/version"] for metrics in run.metrics] == [1, 2, 3]
    for step, metrics in enumerate(run.metrics):
        assert metrics["episodes/turns"] == 2
        assert metrics.get("queue/age_max", 0) == min(step, lag)
        # log-probs of the same tokens by the sampling weights and by the training weights
        assert metrics["rollout/logp_diff_max"] < 1e-4 or (lag and step)
    versions = {
        (row["step"], message["sampled"]["version"])
        for row in lines(tmp_path / "rollouts.jsonl")
        for message in row["episode"]["messages"]
        if "sampled" in message
    }
    assert versions == {(step + 1, max(0, step - lag)) for step in range(3)}
