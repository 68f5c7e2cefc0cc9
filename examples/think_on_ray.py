"""The demo on Ray: the job of `think.py` with another placement, and its actor sharded over two ranks.

flowrl plan examples/think_on_ray.py:training    show which nodes run in parallel, and where
flowrl run examples/think_on_ray.py:training     train

The graph needs no change; results differ only by rounding. The actor's weights are sharded over two processes (FSDP2),
every other role has its own process, and all take turns on two slots: GPUs if there are any, else CPUs.
"""

from dataclasses import replace

from think import MODEL
from think import training as in_one_process

from flowrl import Colocate, Terminal, Training
from flowrl.backends import AdamW, TorchRollout, TorchTrainer


def training() -> Training:
    """The training of `think.py` on Ray."""
    local = in_one_process()
    job = local.job.edit(
        bind={
            "actor": TorchTrainer(MODEL, AdamW(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0), ranks=2),
            "rollout": TorchRollout(MODEL),  # its own copy of the model, since the actor's is sharded
        }
    )
    return replace(local, job=replace(job, place=Colocate(gpus=2)))


if __name__ == "__main__":
    training().run([Terminal()])
