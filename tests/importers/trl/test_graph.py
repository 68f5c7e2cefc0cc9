"""Advantages and gradients of imported configurations are those of TRL 1.16.0; tests graph.py and rewards.py.

`benchmarks/trl_numbers.py` recorded them in ``numbers.json``, with TRL's own trainers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowrl.importers.importing import Source, import_file
from flowrl.operators import RolloutCorrection
from tests.importers.scripts import refused
from tests.importers.trl.cases import CASES, command, inputs, numbers
from tests.operators.test_peer_numbers import GIVEN

TRL = json.loads((Path(__file__).parent / "numbers.json").read_text(encoding="utf-8"))["numbers"]


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_trl(name: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(command(name))
    found, _ = import_file("trl", Source(tmp_path / "run.sh"))
    assert not refused(found)
    own = numbers(found, inputs(name, GIVEN))
    mask = GIVEN["mask"]
    advantages = torch.tensor(TRL[name]["advantages"])[:, None].expand(mask.shape)
    if "correction" not in found.graph.insert:  # which is in flowrl's advantages, and in TRL's loss
        close(own["advantages"][mask], advantages[mask])
    close(own["gradient"], torch.tensor(TRL[name]["gradient"]))


def test_weights_that_are_truncated_at_both_bounds_are_clipped(tmp_path: Path) -> None:
    flags = "--vllm_importance_sampling_clip_min 0.9 --vllm_importance_sampling_clip_max 1.1"
    (tmp_path / "run.sh").write_text(command("token_truncate").replace("\n", f" {flags}\n"))
    found, _ = import_file("trl", Source(tmp_path / "run.sh"))
    assert not refused(found)
    correction = found.graph.edited().nodes["correction"].operator
    assert correction == RolloutCorrection("token", "clip", low=0.9, high=1.1)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=5e-5, atol=5e-6)


def test_every_configuration_has_its_own_numbers() -> None:
    gradients = {name: json.dumps(TRL[name]["gradient"]) for name in CASES}
    assert gradients.pop("bnpo") == gradients["dapo"]  # the means of TRL differ between passes
    assert len(set(gradients.values())) == len(gradients)
