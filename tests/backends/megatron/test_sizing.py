"""Tests of `sizing.py`: the predicted memory of a `MegatronTrainer` is that of a real update on CPUs, counted on every
process by `counted.py`: weights, gradients and states exactly, and passes and syncs up to 10 %."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowrl.backends import MegatronTrainer, Mesh, TorchTrainer
from flowrl.backends.megatron import sizing
from flowrl.protocols.footprint import Demand
from tests import ROOT
from tests.backends.megatron.counted import LIMIT
from tests.backends.megatron.test_trainer import installed
from tests.backends.torch.sizing.counting import PROMPT, RESPONSE, ROWS, folder_of

DEMAND = Demand(PROMPT, RESPONSE, ROWS, None, "cpu", 1 << 40, sent_in="bfloat16")
ROW = {"max_tokens": PROMPT + RESPONSE}


@pytest.mark.nightly
@installed
@pytest.mark.parametrize(
    ("axes", "settings", "changes"),
    [
        ({}, {}, {}),
        ({}, {"gradient_checkpointing": True}, {"tie_word_embeddings": True, "vocab_size": 4000}),
        ({}, {"dtype": "bfloat16"}, {}),
        ({"tensor": 2}, {}, {}),
        ({"pipeline": 2}, ROW, {}),
        ({"pipeline": 2}, {**ROW, "gradient_checkpointing": True}, {"tie_word_embeddings": True, "vocab_size": 4000}),
        ({"pipeline": 2}, {**ROW, "dtype": "bfloat16"}, {"vocab_size": 4000}),
        ({"tensor": 2, "pipeline": 2}, ROW, {}),
    ],
)
def test_the_process_that_takes_the_most_takes_what_is_predicted(
    axes: dict[str, int],
    settings: dict[str, Any],
    changes: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sizing, "BUCKET_BYTES", LIMIT)
    folder, mesh = folder_of(tmp_path / "model", "llama", **changes), Mesh(**axes)
    script = [sys.executable, "-m", "tests.backends.megatron.counted"]
    arguments = [str(tmp_path / "store"), folder, json.dumps(axes), json.dumps(settings)]
    ranks = [
        subprocess.Popen([*script, str(rank), *arguments], cwd=ROOT, stdout=subprocess.PIPE)
        for rank in range(mesh.ranks)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks)
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    found = max(results, key=lambda one: sum(one[part] for part in ("weights", "states", "gradients", "passes")))
    footprint = MegatronTrainer(folder, mesh=mesh, **settings).footprint(DEMAND)
    parts = footprint.calls["update"]
    assert (footprint.awake["weights"], footprint.awake["optimizer states"]) == (found["weights"], found["states"])
    assert (footprint.awake["activations"], parts["gradients"]) == (found["buffer"], found["gradients"])
    assert sum(parts.values()) - parts["gradients"] == pytest.approx(found["passes"], rel=0.1)
    assert sum(footprint.calls["score"].values()) == pytest.approx(max(one["score"] for one in results), rel=0.1)
    most = max(one["sent"] for one in results)
    assert sum(footprint.calls["send"].values()) == pytest.approx(most, rel=0.1)


def test_processes_together_have_the_weights_of_the_model(tmp_path: Path) -> None:
    """As `TorchTrainer` has them in float32; in bfloat16 with a copy to compute with."""
    folder = folder_of(tmp_path, "llama", vocab_size=20000)  # its embedding is as large as its head

    def taken(**settings: Any) -> Any:
        return MegatronTrainer(folder, **settings).footprint(DEMAND)

    one, whole = taken(), TorchTrainer(folder).footprint(DEMAND).awake
    assert one.awake["weights"] == one.calls["update"]["gradients"] == whole["weights"]
    fused = 4 * (2 + 1)  # of each layer queries with keys and values, and gates with others: a count of steps each
    assert one.awake["optimizer states"] == whole["optimizer states"] - 4 * fused
    assert one.asleep == one.awake  # it keeps its memory
    assert taken(dtype="bfloat16").awake["weights"] == 1.5 * whole["weights"]
    norm = 4 * 256
    assert abs(2 * taken(mesh=Mesh(pipeline=2)).awake["weights"] - whole["weights"]) == norm  # of the last layer
    assert 2 * taken(mesh=Mesh(tensor=2)).awake["weights"] - whole["weights"] == 9 * norm
    assert taken(mesh=Mesh(replicate=2)).awake == one.awake


def test_the_first_stage_has_a_micro_batch_for_each_stage(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "llama")
    few, many = (
        MegatronTrainer(folder, mesh=Mesh(pipeline=4), max_tokens=tokens).footprint(DEMAND).calls["update"]
        for tokens in (4 * 128, 128)
    )
    assert few["activations"] == pytest.approx(many["activations"], rel=0.25)  # four rows: in one, or in four in flight
