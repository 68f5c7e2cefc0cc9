"""Memory handles of tensors: CUDA IPC, or shared memory on a CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from flowrl.sync.digest import weights_digest
from flowrl.sync.ipc import can_share, export_handles, open_handles
from tests.engines.contract.sources import shared_by_name

OTHER = """
import sys
from flowrl.sync.ipc import open_handles
from flowrl.sync.digest import weights_digest

tensors = open_handles(sys.stdin.buffer.read())
digest = weights_digest(tensors.items())
assert tensors["b"].fill_(7).tolist() == [7] * 5
print(digest)
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_handle_opened_in_another_process_shares_the_memory(device: str) -> None:
    base = torch.arange(24, dtype=torch.float32, device=device).view(4, 6)
    tensors = {"a": base[1:3, ::2], "b": torch.ones(5, dtype=torch.bfloat16, device=device)}
    assert can_share(tensors.values()) == (device == "cuda")
    digest = weights_digest(tensors.items())
    with shared_by_name():
        data = export_handles(tensors)
        done = subprocess.run([sys.executable, "-c", OTHER], input=data, capture_output=True)
    assert done.stdout.decode().strip() == digest, done.stderr.decode()
    assert tensors["b"].tolist() == [7] * 5
    assert len(data) < 2000


def test_a_handle_opened_in_the_same_process_shares_the_memory() -> None:
    tensor = torch.zeros(3)
    with shared_by_name():
        open_handles(export_handles({"a": tensor}))["a"].fill_(2)
    assert tensor.tolist() == [2] * 3
