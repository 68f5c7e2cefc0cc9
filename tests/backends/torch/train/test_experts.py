"""Tests of `shards.py` and `saving.py` with mixtures of experts: two real ranks over gloo against one process.

The ranks run once, through all of `expert_cases`.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flowrl.backends import AdamW, TorchScorer
from tests import ROOT
from tests.backends.torch.meshes.shares import assert_shared
from tests.backends.torch.train.expert_cases import BUCKET, KINDS, cases
from tests.backends.torch.train.fsdp_cases import PPO, STEPS, Ranks, minis, policy_batch, sequences, weights
from tests.backends.torch.train.test_fsdp import merged, relative_error
from tests.support.architectures import architecture
from tests.support.models import VOCAB

pytestmark = [pytest.mark.runs, pytest.mark.timeout(900)]  # the first test waits until the ranks end

TRAINED = KINDS[:3]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    """The folder, the results of one process, and those of two ranks."""
    folder, draw = tmp_path_factory.mktemp("experts"), torch.Generator().manual_seed(1)
    for kind in KINDS:
        os.rename(architecture(folder, kind), folder / f"{kind}-0")
        log_probs = Ranks(0, 1, folder).build(TorchScorer, kind).log_probs(sequences())
        noise = (torch.randn(log_probs.shape, generator=draw) for _ in range(3))
        columns = zip(("old_log_probs", "ref_log_prob", "advantages"), noise, (log_probs, log_probs, 1.0), strict=True)
        torch.save({name: 0.2 * change + base for name, change, base in columns}, folder / f"{kind}.pt")
    os.rename(architecture(folder, "qwen3_moe", num_hidden_layers=8), folder / "deep-0")
    alone = cases(Ranks(0, 1, folder))
    logs = [(folder / f"log-{rank}.txt") for rank in (0, 1)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            command = [sys.executable, "-m", "tests.backends.torch.train.expert_cases", str(rank), "2", str(folder)]
            processes.append(subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    return folder, alone, [pickle.loads((folder / f"found-{rank}.pickle").read_bytes()) for rank in (0, 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_send_the_tensors_of_one_process(found: Any, kind: str) -> None:
    """The same names in the same order, and the same bits, rounded before they are gathered or not at all."""
    folder, alone, ranks = found
    truth = alone[f"syncing {kind}"]
    assert list(truth["float32"]) == sorted(load_file(folder / f"{kind}-0" / "model.safetensors"))
    for here in (rank[f"syncing {kind}"] for rank in ranks):
        for dtype in ("float32", "bfloat16"):
            assert list(here[dtype]) == list(truth[dtype]) and here[dtype] == truth[dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_rounded_shards_halve_the_gathered_bytes(found: Any, kind: str) -> None:
    for exact, rounded in (rank[f"syncing {kind}"]["gathered"] for rank in found[2]):
        assert rounded < 0.52 * exact  # vectors and routers stay in float32


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_gathers_and_sends_its_share(found: Any, kind: str) -> None:
    matrices = 24  # of the experts of a layer
    assert_shared([rank[f"syncing {kind}"]["shares"] for rank in found[2]], matrices)


def test_a_sync_needs_memory_for_a_layer(found: Any) -> None:
    for here in (rank["memory"] for rank in found[2]):
        assert here["rounds"] > 3 and here["dealing"] <= 3 * (BUCKET + here["layer"])
        assert 0.5 * here["layer"] < here["gathering"] <= 3 * (BUCKET + here["layer"]) < here["all"]
        assert here["digest"] == found[1]["memory"]


def test_the_embedding_and_the_head_are_gathered_only_while_they_compute(found: Any) -> None:
    for here in (rank["memory"] for rank in found[2]):
        assert here["ends"] == [False, False]  # while a block computes


def test_a_rank_reads_its_shard_only(found: Any) -> None:
    for here in (rank["memory"] for rank in found[2]):
        assert here["shard"] <= 0.51 * here["all"]
        assert here["shard"] <= here["kept"] <= here["loading"] <= 1.2 * here["shard"]


@pytest.mark.parametrize("kind", TRAINED)
def test_two_ranks_train_experts_like_one_process(found: Any, kind: str) -> None:
    _, alone, ranks = found
    truth = alone[f"training {kind}"]
    for here in (rank[f"training {kind}"] for rank in ranks):
        torch.testing.assert_close(here["scores"], truth["scores"], atol=1e-5, rtol=1e-5)
        assert here["probe"] == pytest.approx(truth["probe"], abs=1e-5)
        assert relative_error(here["gradient"], truth["gradient"]) < 2e-6
        assert relative_error(here["after"], truth["after"]) < 2e-5
    log = merged([rank[f"training {kind}"]["metrics"] for rank in ranks])
    assert log == pytest.approx(truth["metrics"].compute(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("kind", TRAINED)
def test_experts_resume_on_another_number_of_ranks(found: Any, kind: str) -> None:
    folder, alone, ranks = found
    truth = alone[f"training {kind}"]
    for here in (rank[f"training {kind}"] for rank in ranks):  # from the checkpoint of one process
        assert relative_error(here["loaded"], truth["saved"]) == 0
        assert relative_error(here["resumed"], truth["after"]) < 2e-5
    context = Ranks(0, 1, folder)
    aux = {"router_aux_loss_coef": 0.01}
    engine = context.trainer(kind, max_tokens=40, optimizer=AdamW(lr=0.002, eps=1e-5), **aux)
    engine.load_checkpoint(str(folder / f"{kind}-checkpoint-2"))
    here = ranks[0][f"training {kind}"]
    assert relative_error(weights(engine), here["saved"]) == 0
    batch = policy_batch(context, kind)
    engine.update(batch, minis(batch, PPO, *STEPS), PPO)
    assert relative_error(weights(engine), here["after"]) < 2e-5


@pytest.mark.parametrize("kind", TRAINED)
def test_transformers_loads_a_folder_that_ranks_have_saved(found: Any, kind: str) -> None:
    folder, _, ranks = found
    models: list[Any] = [AutoModelForCausalLM.from_pretrained(folder / f"{kind}-{name}") for name in ("saved-2", "0")]
    saved = ranks[0][f"training {kind}"]["saved"]
    assert relative_error(load_file(folder / f"{kind}-saved-2" / "model.safetensors"), saved) == 0
    assert models[0].config.to_diff_dict() == models[1].config.to_diff_dict()
    ids = torch.arange(5, 25)[None] % VOCAB
    assert not torch.equal(*(model(ids).logits for model in models))


def test_all_ranks_write_a_folder(found: Any) -> None:
    """Each writes some of the files, with memory for a layer; transformers loads the folder."""
    folder, _, ranks = found
    one, two = (rank["memory"] for rank in ranks)
    assert len(one["opened"]) > 2 and len(two["opened"]) > 2 and not {*one["opened"]} & {*two["opened"]}
    for here in (one, two):
        assert here["saving"] <= 3 * (BUCKET + here["layer"]) < here["all"]
    index = json.loads((folder / "deep-saved" / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in (folder / "deep-saved").glob("*.safetensors")}
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    truth = load_file(folder / "deep-0" / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in truth.values())
    assert relative_error({name: x for tensors in files.values() for name, x in tensors.items()}, truth) == 0
    models: list[Any] = [AutoModelForCausalLM.from_pretrained(folder / name) for name in ("deep-saved", "deep-0")]
    ids = torch.arange(5, 25)[None] % VOCAB
    assert torch.equal(*(model(ids).logits for model in models))


def test_two_ranks_train_an_adapter_beside_experts_like_one_process(found: Any) -> None:
    _, alone, ranks = found
    truth = alone["lora"]
    for here in (rank["lora"] for rank in ranks):
        assert here["over"] == truth["over"] and here["fresh"] == truth["fresh"]
        assert relative_error(here["adapter"], truth["adapter"]) < 1e-5
        assert relative_error(here["after"], truth["after"]) < 1e-6
