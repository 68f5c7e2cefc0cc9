"""Tests of `sharded.py`, `shards.py` and `backends/torch/meshes/group.py`: FSDP2, two real ranks against one process.

The ranks run once, through all of `fsdp_cases`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, MixtralConfig

from flowrl.backends import SGD, AdamW, TorchCritic, TorchRewardModel, TorchRollout, TorchScorer, TorchTrainer
from flowrl.data.metrics import Metrics
from flowrl.errors import ParameterError
from flowrl.schedules import Cosine
from tests import ROOT
from tests.backends.torch.train.fsdp_cases import (
    ALL,
    COVARIANCE,
    PAIRS,
    PPO,
    STEPS,
    TIMEOUT,
    Ranks,
    Shared,
    cases,
    last_gradient,
    minis,
    over_rows,
    policy_batch,
    sequences,
    weights,
)
from tests.nightly import nightly, nightly_except
from tests.support.errors import raises
from tests.support.models import VOCAB, char_tokenizer, tiny_folder

pytestmark = [pytest.mark.runs, pytest.mark.timeout(900)]  # the first test waits until the ranks end

KINDS = ["llama", "qwen2", "gpt2", "gemma2"]


def make_inputs(folder: Path) -> None:
    """Models, and rollouts with log-probs close to the model's, so that PPO clips some tokens but not all."""
    alone, draw = Ranks(0, 1, folder), torch.Generator().manual_seed(1)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(sequences().response_mask.shape, generator=draw)

    for kind in KINDS:
        tiny_folder(folder, kind)
        # Smaller weights: with the original ones, splitting a batch changes gradients by 1.4e-6 in one process, too.
        file = folder / f"{kind}-0" / "model.safetensors"
        smaller = {name: tensor * (0.5 if tensor.ndim > 1 else 1.0) for name, tensor in load_file(file).items()}
        save_file(smaller, file, metadata={"format": "pt"})
        log_probs = alone.build(TorchScorer, kind).log_probs(sequences())
        columns = {"old_log_probs": log_probs + noise(0.2), "ref_log_prob": log_probs + noise(0.2)}
        torch.save(
            columns | {"advantages": 1 + noise(0.5), "values": noise(0.2), "returns": noise(1.0)}, folder / f"{kind}.pt"
        )
    critic = alone.build(TorchCritic, "llama")
    critic.state_dict()["weights"]["value_head.weight"].copy_(0.1 * torch.randn(1, 64, generator=draw))
    critic.save_pretrained(alone.model("critic"))
    AutoModelForCausalLM.from_pretrained(alone.model("gpt2")).base_model.save_pretrained(alone.model("body"))
    AutoModelForCausalLM.from_pretrained(alone.model("llama")).config.save_pretrained(alone.model("pickled"))
    torch.save(load_file(folder / "llama-0" / "model.safetensors"), folder / "pickled-0" / "pytorch_model.bin")
    for name in ("body", "pickled"):
        char_tokenizer().save_pretrained(alone.model(name))


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    """The folder, the results of one process, and those of two ranks. One process runs first, so that the ranks load
    its checkpoint; afterwards it loads theirs."""
    folder = tmp_path_factory.mktemp("fsdp")
    make_inputs(folder)
    every = any(item.path == request.path and item.get_closest_marker("nightly") for item in request.session.items)
    alone = {name: case(Ranks(0, 1, folder)) for name, case in cases(every).items()}
    logs = [(folder / f"log-{rank}.txt") for rank in (0, 1)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            command = [sys.executable, "-m", "tests.backends.torch.train.fsdp_cases", str(rank), "2", str(folder)]
            command += ["nightly"] if every else []
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=dict(os.environ))
            processes.append(process)
    try:
        codes = [process.wait(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    return folder, alone, [pickle.loads((folder / f"found-{rank}.pickle").read_bytes()) for rank in (0, 1)]


def flat(named: dict[str, Tensor]) -> Tensor:
    return torch.cat([named[name].double().flatten() for name in sorted(named)])


def relative_error(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return float((flat(a) - flat(b)).norm() / flat(b).norm())


def merged(parts: list[Metrics]) -> dict[str, float]:
    whole = Metrics()
    for part in parts:
        whole.merge(part)
    return whole.compute()


@pytest.mark.parametrize("kind", ["llama", nightly("gpt2")])
def test_each_rank_scores_its_own_rows(found: Any, kind: str) -> None:
    _, alone, ranks = found
    truth = alone[f"log_probs {kind}"]["all"]
    for rank in ranks:
        here = rank[f"log_probs {kind}"]
        torch.testing.assert_close(here["all"], truth, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(here["own"], truth[here["rows"]], atol=1e-5, rtol=1e-5)
    assert [len(rank[f"log_probs {kind}"]["none"]) for rank in ranks] == [1, 0]
    torch.testing.assert_close(ranks[0][f"log_probs {kind}"]["none"][0], truth[3], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "case",
    nightly_except(
        ["gradient llama", "gradient qwen2", "gradient checkpointed", "gradient offloaded"],
        [*(f"gradient {kind}" for kind in KINDS), "gradient checkpointed", "gradient offloaded"],
    ),
)
def test_gradient_and_loss_equal_those_of_one_process(found: Any, case: str) -> None:
    _, alone, ranks = found
    truth = alone[case]
    assert 0.05 < truth["metrics"].compute()["actor/pg_clipfrac"] < 0.95
    for rank in ranks:
        assert list(rank[case]["before"]) == list(truth["before"])
        assert all(torch.equal(tensor, truth["before"][name]) for name, tensor in rank[case]["before"].items())
        assert relative_error(rank[case]["gradient"], truth["gradient"]) < 1e-6
        assert relative_error(rank[case]["after"], truth["after"]) < 1e-6
    log = merged([rank[case]["metrics"] for rank in ranks])
    assert log == pytest.approx(truth["metrics"].compute(), rel=1e-6, abs=5e-7)
    # global metrics are reported once, sums as the part of each rank
    assert [("actor/grad_norm" in rank[case]["metrics"]) for rank in ranks] == [True, False]
    tokens = [part["metrics"]["actor/pg_clipfrac"].weight for part in (*(rank[case] for rank in ranks), truth)]
    assert tokens[0] + tokens[1] == tokens[2] and min(tokens) > 0


@pytest.mark.parametrize(("case", "objective"), [("pairs", PAIRS), ("covariance", COVARIANCE)])
def test_a_loss_across_rows_gets_all_rows_of_its_mini_batch(found: Any, case: str, objective: Any) -> None:
    """One micro-batch, several, and two ranks give the same gradient, weights and metrics."""
    folder, alone, ranks = found
    truth = over_rows(Ranks(0, 1, folder), objective, max_tokens=10**6)
    for other in (alone[case], *(rank[case] for rank in ranks)):
        assert relative_error(other["gradient"], truth["gradient"]) < 2e-6
        assert relative_error(other["after"], truth["after"]) < 2e-5
    for step in (0, 1):
        expected = truth["metrics"][step].compute()
        assert alone[case]["metrics"][step].compute() == pytest.approx(expected, rel=1e-5, abs=2e-6)
        assert merged([rank[case]["metrics"][step] for rank in ranks]) == pytest.approx(expected, rel=1e-5, abs=2e-6)


def test_ranks_compute_distributions_in_different_numbers_of_chunks(found: Any) -> None:
    _, alone, ranks = found
    truth, each = alone["distribution"], [rank["distribution"] for rank in ranks]
    for number, expected in enumerate(truth["metrics"]):
        log = merged([one["metrics"][number] for one in each])
        assert log == pytest.approx(expected.compute(), rel=1e-5, abs=5e-7)
        assert len({one["chunks"][number] for one in each}) == 2
    assert all(relative_error(one["gradient"], truth["gradient"]) < 1e-6 for one in each)


@pytest.mark.parametrize("kind", ["llama", nightly("gpt2")])
def test_bfloat16_gradients_equal_those_of_one_process_up_to_rounding(found: Any, kind: str) -> None:
    _, alone, ranks = found
    truth, here = alone[f"bfloat16 {kind}"], ranks[0][f"bfloat16 {kind}"]
    assert {tensor.dtype for tensor in here["after"].values()} == {torch.float32}
    assert relative_error(here["gradient"], truth["gradient"]) < 0.03


@pytest.mark.parametrize("case", [nightly("training sgd"), "training adamw"])
def test_several_epochs_end_in_the_weights_of_one_process(found: Any, case: str) -> None:
    _, alone, ranks = found
    truth = alone[case]
    for rank in ranks:
        assert rank[case]["version"] == truth["version"] == 2
        assert relative_error(rank[case]["after"], truth["after"]) < 1e-6
        torch.testing.assert_close(rank[case]["log_probs"], truth["log_probs"], atol=1e-4, rtol=1e-4)
    for step, expected in enumerate(truth["metrics"]):
        log = merged([rank[case]["metrics"][step] for rank in ranks])
        assert log == pytest.approx(expected.compute(), rel=1e-5, abs=1e-6)
    assert all(torch.equal(tensor, ranks[1][case]["after"][name]) for name, tensor in ranks[0][case]["after"].items())


@pytest.mark.parametrize("case", [nightly("critic"), "critic checkpointed"])
def test_a_sharded_critic_equals_that_of_one_process(found: Any, case: str) -> None:
    _, alone, ranks = found
    truth = alone[case]
    assert truth["own"].std() > 0.05
    for rank in ranks:
        torch.testing.assert_close(rank[case]["own"], truth["own"][rank[case]["rows"]], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(rank[case]["all"], truth["all"], atol=1e-5, rtol=1e-5)
        assert relative_error(rank[case]["gradient"], truth["gradient"]) < 1e-6
        assert relative_error(rank[case]["after"], truth["after"]) < 1e-6
    for step, expected in enumerate(truth["metrics"]):
        log = merged([rank[case]["metrics"][step] for rank in ranks])
        assert log == pytest.approx(expected.compute(), rel=1e-5, abs=1e-6)


def test_a_critic_saved_by_two_ranks_loads_in_one_process(found: Any) -> None:
    folder, _, ranks = found
    critic = TorchCritic(str(folder / "saved-critic-2"), device="cpu").build(Ranks(0, 1, folder))
    torch.testing.assert_close(critic.values(sequences()), ranks[0]["critic checkpointed"]["all"], atol=1e-6, rtol=1e-6)


def test_a_sharded_reward_model_equals_that_of_one_process(found: Any) -> None:
    folder, alone, ranks = found
    truth = alone["reward model"]
    assert truth["after"].std() > 0.01 and not torch.allclose(truth["after"][truth["rows"]], truth["before"], atol=0.01)
    for rank in (one["reward model"] for one in ranks):
        torch.testing.assert_close(rank["before"], truth["before"][rank["rows"]], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(rank["after"], truth["after"], atol=1e-5, rtol=1e-5)
    log = merged([rank["reward model"]["metrics"] for rank in ranks])
    assert log == pytest.approx(truth["metrics"].compute(), rel=1e-5, abs=1e-6)
    saved = TorchRewardModel(ranks[0]["reward model"]["folder"], device="cpu").build(Ranks(0, 1, folder))
    torch.testing.assert_close(saved.rewards(sequences()), truth["after"], atol=1e-5, rtol=1e-5)


def test_resuming_is_bit_equal_on_as_many_ranks_and_close_on_another_number(found: Any) -> None:
    _, alone, ranks = found
    for run in (alone["resuming"], *(rank["resuming"] for rank in ranks)):
        for way in ("state", "back"):
            assert run[way]["metrics"] == run["straight"]["metrics"] and run[way]["version"] == 2
            assert all(
                torch.equal(tensor, run["straight"]["after"][name]) for name, tensor in run[way]["after"].items()
            )
        assert run["fresh"]["version"] == 1
    after = alone["resuming"]["straight"]["after"]
    for rank in ranks:  # from the checkpoint of one process
        assert rank["resuming"]["other"]["version"] == 2
        assert relative_error(rank["resuming"]["other"]["after"], after) < 1e-6


def test_one_process_resumes_from_a_checkpoint_of_two_ranks(found: Any) -> None:
    folder, _, ranks = found
    alone = Ranks(0, 1, folder)
    engine = alone.trainer(
        "qwen2", optimizer=AdamW(lr=0.003, eps=1e-5), grad_clip=1.0, schedule=Cosine(1.0, 0.0, steps=20)
    )
    engine.load_checkpoint(str(folder / "checkpoint-2"))
    batch = policy_batch(alone, "qwen2")
    engine.update(batch, minis(batch, PPO, *STEPS), PPO)
    assert engine.version == 2 and relative_error(weights(engine), ranks[0]["resuming"]["straight"]["after"]) < 1e-6


def test_mismatched_checkpoints_are_refused(found: Any) -> None:
    _, alone, ranks = found
    for run in (alone["resuming"], *(rank["resuming"] for rank in ranks)):
        assert run["no checkpoint"].endswith("[checkpoint.missing]")
        for name in ("another model", "another optimizer"):
            assert run[name].endswith("[checkpoint.mismatch]")
        assert run["twice"].endswith("[checkpoint.exists]")


def test_a_non_finite_gradient_is_refused_by_all_ranks(found: Any) -> None:
    _, alone, ranks = found
    for rank in ranks:
        here = rank["not finite"]
        assert here["error"] == alone["not finite"]["error"]
        assert "DataError: The actor's gradient norm is nan in mini-batch 1 of 2; the step was skipped" in here["error"]
        assert here["version"] == 1 and relative_error(here["after"], alone["not finite"]["after"]) < 1e-6


def test_rows_that_one_rank_refuses_stop_all_ranks(found: Any) -> None:
    _, alone, ranks = found
    assert "RankError: log_probs failed on rank 1 of 2, so rank 0 stopped too" in ranks[0]["bad rows"]["error"]
    assert "DataError: temperature is" in ranks[1]["bad rows"]["error"]
    for rank in ranks:
        torch.testing.assert_close(rank["bad rows"]["all"], alone["bad rows"]["all"], atol=1e-6, rtol=1e-6)


def test_ranks_wait_for_a_failed_rank_only_until_the_timeout(found: Any) -> None:
    _, _, ranks = found
    assert ranks[1]["failed_rank"]["error"] == "ArithmeticError: planted"
    assert "Error" in ranks[0]["failed_rank"]["error"] and f"{TIMEOUT}000ms" in ranks[0]["failed_rank"]["error"]


def test_gathering_weights_needs_memory_for_about_two_buckets(found: Any) -> None:
    _, _, ranks = found
    for rank in ranks:
        here = rank["gathering"]
        largest, total = max(here["sizes"].values()), sum(here["sizes"].values())
        assert here["allocated"] <= 0.51 * total
        for bucket, peak in here["peaks"].items():
            assert largest <= peak <= 2 * max(bucket, largest) + 1024 < total / 2


def test_ranks_save_a_standard_transformers_folder(found: Any) -> None:
    folder, _, _ = found
    two, one = (load_file(folder / f"saved-{n}" / "model.safetensors") for n in (2, 1))
    assert two.keys() == one.keys() and all(torch.equal(tensor, one[name]) for name, tensor in two.items())
    for file in ("config.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / "saved-2" / file).read_text() == (folder / "saved-1" / file).read_text()


@pytest.mark.parametrize("kind", ["llama", nightly("gpt2"), nightly("gemma2")])
def test_buffers_of_a_sharded_load_equal_those_of_a_full_load(found: Any, kind: str) -> None:
    _, alone, ranks = found
    truth = alone[f"buffers {kind}"]
    assert truth or kind == "gpt2"
    for rank in ranks:
        here = rank[f"buffers {kind}"]
        assert here.keys() == truth.keys() and all(torch.equal(tensor, truth[name]) for name, tensor in here.items())


@pytest.mark.parametrize("kind", ["body", "pickled"])
def test_a_folder_without_sharded_loading_is_loaded_fully_and_then_sharded(found: Any, kind: str) -> None:
    _, alone, ranks = found
    truth = alone["other folders"][kind]
    for rank in ranks:
        here = rank["other folders"][kind]
        assert list(here) == list(truth) and all(torch.equal(tensor, truth[name]) for name, tensor in here.items())


def test_a_sleeping_engine_refuses_calls(found: Any) -> None:
    _, alone, ranks = found
    for run in (alone, *ranks):
        log_probs, update = run["turns"]["errors"]
        assert "AsleepError: log_probs was called while the engine sleeps" in log_probs and "engine.wake()" in log_probs
        assert "AsleepError: update was called" in update and run["turns"]["same"]


def test_a_wrong_number_of_processes_is_refused(found: Any, tmp_path: Path) -> None:
    folder, alone, ranks = found
    assert "BindError: A backend with ranks=3 needs 3 processes" in alone["wrong group"]["error"]
    assert "bind(..., place=Colocate(gpus=3))" in alone["wrong group"]["error"]
    for number, rank in enumerate(ranks):
        assert f"is built as rank {number} of 2" in rank["wrong group"]["error"]
    for backend in (TorchTrainer, TorchScorer, TorchCritic):
        with raises("trainer.ranks", ranks=2):
            backend(str(folder / "llama-0"), ranks=2).build(Ranks(0, 1, folder))
        with pytest.raises(ParameterError):
            backend("m", ranks=0)


def test_offload_with_one_rank_equals_one_process(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With offload, one rank uses `fully_shard` without a process group of the caller; ordinary folders load directly
    into shards, without a full model in memory."""
    folder, alone, _ = found
    context = Ranks(0, 1, folder)
    monkeypatch.delattr("flowrl.backends.torch.train.shards.load_causal_lm")
    assert not dist.is_initialized()
    try:
        engine = context.trainer("qwen2", optimizer=SGD(lr=0.1, momentum=0.9), offload=True, max_tokens=40)
        assert all(isinstance(parameter, DTensor) for parameter in engine.model.parameters())
        assert engine._scorer.unpacked is None
        truth = alone["gradient qwen2"]
        batch = policy_batch(context, "qwen2")
        log = engine.update(batch, minis(batch, PPO, ALL), PPO).compute()
        assert log == pytest.approx(truth["metrics"].compute(), rel=1e-6, abs=5e-7)
        assert relative_error(last_gradient(engine), truth["gradient"]) < 1e-6
        assert relative_error(weights(engine), truth["after"]) < 1e-6

        with raises("engine.cannot-share-weights"):
            TorchRollout().build(Shared(engine))
        for critic in ("critic-0", "saved-critic-2", "llama-0"):
            TorchCritic(str(folder / critic), offload=True, device="cpu").build(context)
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [False, True])
def test_sleep_frees_the_device_and_wake_restores_the_engine(found: Any, offload: bool) -> None:
    folder, _, _ = found
    context = Ranks(0, 1, folder)
    settings: dict[str, Any] = {"device": "cuda", "offload": offload, "optimizer": AdamW(lr=0.01)}
    batch, steps = policy_batch(context, "qwen2"), [minis(policy_batch(context, "qwen2"), PPO, ALL)] * 2
    try:
        engine, steady = (context.trainer("qwen2", **settings) for _ in range(2))
        for turn in steps:
            engine.sleep()
            assert {parameter.device.type for parameter in engine.model.parameters()} == {"cpu"}
            engine.wake()
            logs = [each.update(batch, turn, PPO).compute() for each in (engine, steady)]
            assert logs[0] == pytest.approx(logs[1], rel=1e-4, abs=1e-6)
        assert relative_error(weights(engine), weights(steady)) < 1e-5
        torch.testing.assert_close(engine.log_probs(sequences()).cpu(), steady.log_probs(sequences()).cpu())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("kind", [nightly("llama"), "gpt2"])
def test_two_ranks_train_an_adapter_like_one_process(found: Any, kind: str) -> None:
    folder, alone, ranks = found
    truth, (one, two) = alone[f"lora {kind}"], (rank[f"lora {kind}"] for rank in ranks)
    assert truth["over"] == one["over"] == two["over"]
    assert (
        relative_error(one["fresh"], truth["fresh"]) == 0
    )  # the initial adapter does not depend on the number of ranks
    for here in (one, two):
        assert relative_error(here["adapter"], truth["adapter"]) < 1e-5
        assert relative_error(here["after"], truth["after"]) < 1e-6
        assert relative_error(here["other"], truth["adapter"]) < 1e-5
        assert here["started"].keys() == here["adapter"].keys()
        assert relative_error(here["started"], here["adapter"]) == 0
        torch.testing.assert_close(here["log_probs"], truth["log_probs"], atol=1e-5, rtol=1e-5)
        assert torch.equal(*here["reference"])
        torch.testing.assert_close(here["reference"][0], truth["reference"][0], atol=1e-5, rtol=1e-5)
    for parts in zip(truth["metrics"], one["metrics"], two["metrics"], strict=False):
        assert merged([*parts[1:]]) == pytest.approx(parts[0].compute(), rel=1e-5, abs=5e-7)
    saved = load_file(folder / f"{kind}-lora-saved-2" / "model.safetensors")
    assert relative_error(saved, one["after"]) == 0


def test_a_bfloat16_adapter_is_close_to_that_of_one_process(found: Any) -> None:
    _, alone, ranks = found
    assert relative_error(ranks[0]["lora qwen2"]["adapter"], alone["lora qwen2"]["adapter"]) < 0.1
    assert torch.equal(*ranks[0]["lora qwen2"]["reference"])


def test_fused_experts_are_sharded_and_gathered_unfused(tmp_path: Path) -> None:
    """Transformers fuses experts in memory and stores them unfused."""
    sizes: Any = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(vocab_size=VOCAB, num_key_value_heads=1, num_local_experts=2, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "experts-0")
    char_tokenizer().save_pretrained(tmp_path / "experts-0")
    context = Ranks(0, 1, tmp_path)
    try:
        sharded, whole = (context.trainer("experts", offload=offload) for offload in (True, False))
        here, there = weights(sharded), weights(whole)
        assert list(here) == list(there) and all(torch.equal(here[name], there[name]) for name in there)
        torch.testing.assert_close(sharded.log_probs(sequences()), whole.log_probs(sequences()))
        sharded.save_pretrained(str(tmp_path / "saved"))
        assert load_file(tmp_path / "saved" / "model.safetensors").keys() == there.keys()
    finally:
        dist.destroy_process_group()
