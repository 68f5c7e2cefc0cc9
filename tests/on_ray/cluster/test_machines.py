"""exploration"""
from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any
import pytest

from flowrl import PromptData, Training
from flowrl.backends import AdamW, Mesh, TorchRollout
from flowrl.distributed.place import Colocate
from tests.on_ray.parity.test_context import close
from tests.on_ray.parity.test_parity import numbers, relative, saved
from tests.on_ray.process_leaks import leaves_nothing, process_ids
from tests.support.jobs import job_of, proto, prompt_batch
from tests.support.models import tiny_folder

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.mark.usefixtures("two_nodes")
def test_a(prompts_file: str, tmp_path: Path) -> None:
    model = tiny_folder(tmp_path, "llama", num_key_value_heads=2)
    job = job_of("grpo", model, n=3, mini_batch=6, optimizer=AdamW(lr=1e-3, eps=1e-5))
    job = job.edit(bind={"rollout": TorchRollout(model, device="cpu", ranks=4)})
    split = {name: replace(one, mesh=Mesh(fsdp=2, tensor=2)) for name, one in job.graph.bindings.items() if name != "rollout"}
    local = job.edit(bind={"rollout": TorchRollout(model, device="cpu")})
    training = Training(local, PromptData(prompts_file), steps=3, prompts=4, folder=str(tmp_path / "local"))
    local = training.run()
    there = replace(training, job=replace(job.edit(bind=split), place=Colocate(4, per_machine=2)), folder=str(tmp_path / "ray"))
    t = time.time()
    with leaves_nothing():
        remote = there.run()
    print("time", time.time() - t)
    close(numbers(remote.metrics), numbers(local.metrics))
    one, two = (saved(tmp_path / name / "actor") for name in ("local", "ray"))
    assert all(relative(one[name], two[name]) < 1e-5 for name in one)


def test_kill(two_nodes: Any, tiny, tmp_path: Path) -> None:
    job = job_of("grpo", tiny, n=3, mini_batch=6, optimizer=AdamW(lr=1e-3, eps=1e-5), trainer={"ranks": 2})
    job = job.edit(bind={"rollout": TorchRollout(tiny, device="cpu", ranks=2)})
    job = replace(job, place=Colocate(2, per_machine=1))
    with job.open() as ex:
        ex.sync()
        batch = proto(prompt_batch([[11, 12], [13]]))
        r = ex.step(batch, 0)
        print(r.values["sync"]["receipt"])
        print([s.node for s in ex.runner.hosts.locations.values()])
        t = time.time()
        def on_node(n):
            if n == "update_actor":
                two_nodes.kill()
        try:
            ex.step(batch, 1, on_node=on_node)
        except Exception as e:
            print("ERR", time.time() - t, type(e), e, getattr(e, "code", None), getattr(e, "facts", None))
            print("CAUSE", type(e.__cause__), e.__cause__)
    print("closed", time.time() - t)
