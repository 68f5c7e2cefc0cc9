"""The demo with rollouts on vLLM or SGLang: the job of `think.py` after one edit.

flowrl diff examples/think.py:training examples/think_by_engine.py:training    show the diff: one binding
flowrl run examples/think_by_engine.py:training                                train, with ENGINE=vllm (or sglang)

The engine must be installed: on a CPU, `make engines` installs both in `.venv-engines`; run `.venv-engines/bin/flowrl`.
"""

import os
from dataclasses import replace

from think import MODEL
from think import training as by_torch

from flowrl import Terminal, Training
from flowrl.backends import VLLM, SGLang

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # otherwise vLLM logs every sync, and layers without weights

LENGTH = 64  # tokens of a prompt and its answer, which the engine reserves per row
ENGINES = {
    "vllm": VLLM(MODEL, dtype="float32", max_model_len=LENGTH),
    "sglang": SGLang(MODEL, dtype="float32", max_model_len=LENGTH),
}


def training() -> Training:
    """The training of `think.py`, with the weights synced to the engine after every step."""
    before = by_torch()
    engine = ENGINES[os.environ.get("ENGINE", "vllm")]
    return replace(before, job=before.job.edit(bind={"rollout": engine}))


if __name__ == "__main__":
    training().run([Terminal()])
