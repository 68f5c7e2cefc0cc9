"""Tests of `training.py`, `sending.py`, `steps.py`, `trace.py`, `weights.py`, `logits.py` and `live_bytes.py`: the
predicted memory of a trainer is that of a real update on this CPU.

Weights, gradients and optimizer states are exact; activations and logits are within 10 %, which `counting.py` counts
another way: it asks all storages for their size after every operation, where the prediction runs without data.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from flowrl.backends import SGD, AdamW, LoRA, Mesh, Muon, TorchCritic, TorchScorer, TorchTrainer
from flowrl.backends.torch.score import blocks
from flowrl.backends.torch.sizing.sending import sending_bytes
from flowrl.backends.torch.sizing.steps import Steps
from flowrl.backends.torch.sizing.weights import Model, weights_of
from flowrl.protocols.footprint import Demand
from tests import ROOT
from tests.backends.torch.sizing.counting import (
    PROMPT,
    RESPONSE,
    ROWS,
    Allocations,
    Elsewhere,
    Measured,
    batch,
    folder_of,
    step,
    update,
)
from tests.backends.torch.sizing.two_ranks import LIMIT
from tests.nightly import nightly_except

RANK: Any = SimpleNamespace(seed=0, rank=0, world_size=1)
DEVICES: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")
DEMAND = Demand(PROMPT, RESPONSE, ROWS, None, "cpu", 1 << 40)


def measured(folder: str, **settings: Any) -> Measured:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "to_cpu", elsewhere := Elsewhere())
        return update(TorchTrainer(folder, device="cpu", **settings).build(RANK), elsewhere)


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("llama", {}, {}),
    "tied, a large vocabulary": ("llama", {"tie_word_embeddings": True, "vocab_size": 9000}, {}),
    "bfloat16": ("llama", {}, {"dtype": "bfloat16"}),
    "checkpointed": ("llama", {}, {"gradient_checkpointing": True}),
    "bfloat16, checkpointed, a large vocabulary": (
        "llama",
        {"vocab_size": 9000},
        {"dtype": "bfloat16", "gradient_checkpointing": True},
    ),
    "LoRA": ("llama", {}, {"lora": LoRA(r=8)}),
    "LoRA, bfloat16, checkpointed": (
        "llama",
        {},
        {"lora": LoRA(r=4, targets=("q_proj",)), "dtype": "bfloat16", "gradient_checkpointing": True},
    ),
    "experts": ("moe", {}, {}),
    "experts, balanced": ("moe", {}, {"router_aux_loss_coef": 0.01}),
    "padded": ("llama", {}, {"attention": "eager"}),
    "SGD": ("llama", {}, {"optimizer": SGD(lr=0.1)}),
    "Muon": ("llama", {}, {"optimizer": Muon(lr=0.1)}),
    "Muon, experts": ("moe", {}, {"optimizer": Muon(lr=0.1)}),
    "8 bits": ("llama", {}, {"optimizer": AdamW(lr=0.1, bits=8)}),
    "every second block": ("llama", {}, {"gradient_checkpointing": 2}),
    "every second of five blocks": ("llama", {"num_hidden_layers": 5}, {"gradient_checkpointing": 2}),
    "every third of seven blocks": ("llama", {"num_hidden_layers": 7}, {"gradient_checkpointing": 3}),
    "inputs of blocks on the CPU": ("llama", {"num_hidden_layers": 12}, {"gradient_checkpointing": "offload"}),
    "LoRA, every second block": ("llama", {}, {"lora": LoRA(r=8), "gradient_checkpointing": 2}),
}


TIED = {"tie_word_embeddings": True, "vocab_size": 4000}

EVERY_COMMIT = {"dense", "bfloat16", "checkpointed", "LoRA", "experts", "Muon", "8 bits", "every second block"} | {
    "inputs of blocks on the CPU"
}


@pytest.mark.parametrize("case", nightly_except(EVERY_COMMIT, CASES))
def test_an_update_takes_what_is_predicted(case: str, tmp_path: Path) -> None:
    kind, changes, settings = CASES[case]
    if case == "8 bits":
        pytest.importorskip("torchao")
    folder = folder_of(tmp_path, kind, **changes)
    found = measured(folder, **settings)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()  # so that a prediction cannot read weights
    footprint = TorchTrainer(folder, **settings).footprint(DEMAND)
    parts = footprint.calls["update"]
    assert footprint.awake == {"weights": found.weights, "optimizer states": found.states}
    assert parts["gradients"] == found.gradients
    assert parts["activations"] + parts["logits"] == pytest.approx(found.passes, rel=0.1)
    activations = found.peak["activations"] - found.gradients
    assert parts["activations"] == pytest.approx(activations, rel=0.1)
    assert parts["logits"] == pytest.approx(found.peak.get("logits", 0), rel=0.1, abs=0.02 * found.passes)


@pytest.mark.parametrize("optimizer", [Muon(lr=0.1), AdamW(lr=0.1, bits=8)], ids=["Muon", "8 bits"])
@pytest.mark.parametrize("kind", ["llama", "moe"])
def test_a_step_takes_what_is_predicted(kind: str, optimizer: Any, tmp_path: Path) -> None:
    if optimizer != Muon(lr=0.1):
        pytest.importorskip("torchao")
    folder = folder_of(tmp_path, kind)
    engine: Any = TorchTrainer(folder, optimizer, device="cpu").build(RANK)
    predicted = Steps(optimizer, weights_of(Model(folder)), Mesh(), "cpu", sharded=False)
    assert predicted.peak(False) == pytest.approx(step(engine), rel=0.1)


def test_a_scorer_takes_what_is_predicted(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "llama", vocab_size=9000)
    engine: Any = TorchScorer(folder, device="cpu").build(RANK)
    rows, counter = batch(), Allocations()
    engine.log_probs(rows)
    counter.ignore(*engine.model.parameters(), *engine.model.buffers(), *rows)
    with counter:
        engine.log_probs(rows)
    footprint = TorchScorer(folder).footprint(DEMAND)
    assert footprint.awake == {"weights": sum(p.nbytes for p in engine.model.parameters())}
    assert sum(footprint.calls["score"].values()) == pytest.approx(sum(counter.peak.values()), rel=0.1)


def test_a_critic_has_a_scalar_head(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "llama")
    engine: Any = TorchCritic(folder, device="cpu").build(RANK)
    trained = sum(p.nbytes for p in engine.learner.state_dict()["weights"].values())
    footprint = TorchCritic(folder).footprint(DEMAND)
    assert footprint.awake["weights"] == footprint.calls["update"]["gradients"] == trained
    assert footprint.calls["update"]["logits"] == 0


def test_a_longer_micro_batch_takes_more_activations_and_as_many_weights(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "llama")
    one, two = (
        TorchTrainer(folder, max_tokens=n * (PROMPT + RESPONSE)).footprint(DEMAND).calls["update"] for n in (1, 2)
    )
    assert two["activations"] == pytest.approx(2 * one["activations"], rel=0.1)
    assert one["gradients"] == two["gradients"]


def test_a_gpu_keeps_the_step_counts_on_the_cpu_and_steps_with_a_copy(tmp_path: Path) -> None:
    """torch's foreach optimizers, the default on a GPU, make a copy of a state of all parameters."""
    folder = folder_of(tmp_path, "llama", vocab_size=20000)
    cpu, gpu = (TorchTrainer(folder).footprint(replace(DEMAND, device=device)) for device in DEVICES)
    tensors = 4 * 9 + 3
    assert cpu.awake["optimizer states"] - gpu.awake["optimizer states"] == 4 * tensors
    assert gpu.asleep == {"CUDA": 1 << 29}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "dtype", "axes", "reshard"),
    [
        ("llama", "float32", {"fsdp": 2}, True),
        ("llama", "bfloat16", {"fsdp": 2}, True),
        ("llama", "float32", {"tensor": 2}, True),
        ("moe", "float32", {"fsdp": 2}, True),
        ("llama", "float32", {"fsdp": 2}, False),
        ("llama", "bfloat16", {"fsdp": 2}, False),
        ("moe", "float32", {"tensor": 2}, True),
        ("moe", "float32", {"fsdp": 2, "expert": 2}, True),
        ("moe", "bfloat16", {"fsdp": 2, "expert": 2}, True),
        ("moe", "float32", {"tensor": 2, "expert": 2}, True),
    ],
)
def test_two_ranks_take_what_is_predicted(
    kind: str, dtype: Any, axes: dict[str, int], reshard: bool, tmp_path: Path
) -> None:
    """Also in syncs to engines in float32 and in bfloat16, to which shards are rounded before they are gathered: the
    process that takes the most."""
    folder = folder_of(tmp_path / "model", kind, **({} if kind == "moe" else TIED))
    script = [sys.executable, "-m", "tests.backends.torch.sizing.two_ranks"]
    arguments = [str(tmp_path / "store"), folder, dtype, json.dumps(axes), "yes" if reshard else ""]
    ranks = [subprocess.Popen([*script, str(rank), *arguments], cwd=ROOT, stdout=subprocess.PIPE) for rank in range(2)]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    buckets, steps = ([result.pop(name) for result in results] for name in ("buckets", "step"))
    found = Measured(**results[0])
    mesh = Mesh(**axes)
    settings: dict[str, Any] = {"gradient_checkpointing": True, "reshard_after_forward": reshard}
    footprint = TorchTrainer(folder, mesh=mesh, dtype=dtype, **settings).footprint(DEMAND)
    parts = footprint.calls["update"]
    assert footprint.awake == {"weights": found.weights, "optimizer states": found.states}
    assert parts["gradients"] == found.gradients
    assert sum(parts.values()) - parts["gradients"] == pytest.approx(found.passes, rel=0.1)
    muon = Steps(Muon(lr=0.1), weights_of(Model(folder, tensor=mesh.tensor, expert=mesh.expert)), mesh, "cpu", True)
    assert muon.peak(False) == pytest.approx(max(steps), rel=0.25 if "expert" in axes else 0.1)
    for case in buckets[0]:
        dtype, transport = case.split(" ", 1)
        most = max(one[case] for one in buckets)
        assert sending_bytes(Model(folder), mesh, LIMIT, dtype, transport) == pytest.approx(most, rel=0.1), case


def test_shards_are_the_rows_of_the_first_rank_and_the_offloaded_ones_are_not_on_a_gpu(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "llama", num_hidden_layers=1, vocab_size=515)
    shapes = [p.shape for p in TorchScorer(folder, device="cpu").build(RANK).model.parameters()]
    for ranks in (2, 3, 8):
        rows = sum(4 * math.ceil(shape[0] / ranks) * math.prod(shape[1:]) for shape in shapes)
        assert TorchTrainer(folder, ranks=ranks).footprint(DEMAND).awake["weights"] == rows
    offloaded = TorchTrainer(folder, offload=True).footprint(replace(DEMAND, device="cuda"))
    assert (offloaded.awake["weights"], offloaded.awake["optimizer states"]) == (0, 0)
    assert offloaded.calls["update"]["gradients"] == 0 < offloaded.calls["update"]["gathered weights"]
    states = TorchTrainer(folder, offload="optimizer").footprint(replace(DEMAND, device="cuda"))
    assert states.awake["optimizer states"] == 0 < states.calls["update"]["gradients"] == states.awake["weights"]
    parameters = TorchTrainer(folder, offload="parameters").footprint(replace(DEMAND, device="cuda"))
    assert parameters.awake["weights"] == 0 < parameters.awake["optimizer states"]
    assert parameters.calls["update"]["gathered weights"] == offloaded.calls["update"]["gathered weights"]


def test_a_process_of_the_tensor_axis_has_its_share_of_heads_widths_and_vocabulary(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "llama", num_hidden_layers=3)
    named = dict(TorchScorer(folder, device="cpu").build(RANK).model.named_parameters())
    share = sum(p.nbytes // (1 if "norm" in name else 2) for name, p in named.items())
    one, two = (TorchTrainer(folder, mesh=Mesh(tensor=t)).footprint(DEMAND) for t in (1, 2))
    assert two.awake["weights"] == two.calls["update"]["gradients"] == share
    assert (
        one.calls["update"]["activations"] / 2 < two.calls["update"]["activations"] < one.calls["update"]["activations"]
    )
    copied = TorchTrainer(folder, mesh=Mesh(replicate=2, fsdp=2)).footprint(DEMAND)
    assert copied.awake == TorchTrainer(folder, ranks=2).footprint(DEMAND).awake


def test_a_process_of_the_expert_axis_has_its_experts_and_sends_their_tokens(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "moe", num_hidden_layers=3)
    named = dict(TorchScorer(folder, device="cpu").build(RANK).model.named_parameters())
    experts = sum(p.nbytes for name, p in named.items() if ".experts." in name)
    rest = sum(4 * math.ceil(p.shape[0] / 2) * math.prod(p.shape[1:]) for n, p in named.items() if ".experts." not in n)
    apart = TorchTrainer(folder, mesh=Mesh(fsdp=2, expert=2)).footprint(DEMAND)
    assert apart.awake["weights"] == apart.calls["update"]["gradients"] == experts // 2 + rest
    split = TorchTrainer(folder, mesh=Mesh(tensor=2, expert=2)).footprint(DEMAND)
    whole = sum(p.nbytes for name, p in named.items() if "norm" in name or name.endswith("mlp.gate.weight"))
    others = sum(p.nbytes for p in named.values()) - experts - whole
    assert split.awake["weights"] == experts // 2 + others // 2 + whole  # layers of experts are not split by tensor
    sharded = TorchTrainer(folder, ranks=2).footprint(DEMAND).calls["update"]
    assert apart.calls["update"]["gathered weights"] < sharded["gathered weights"]
