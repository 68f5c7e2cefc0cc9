"""Every test starts from one seed, on one thread, offline; one marked ``gpu`` is skipped where there is no device."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"

import gc
import random
import signal
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest

from tests.support.command_line import command as command  # a fixture

# Timings on shared machines say nothing, hence no deadline. In CI the examples are the same on every run, and
# `make nightly` runs twice as many as every commit.
hypothesis.settings.register_profile("local", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True, max_examples=50)
hypothesis.settings.register_profile("nightly", hypothesis.settings.get_profile("ci"), max_examples=100)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

FIRST = ("test_tutorial.py", "test_start.py", "test_fsdp.py")
"""Files whose set-up takes longest: they come first, so that two processes end at the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in FIRST)


def pytest_collection_finish() -> None:
    import torch  # here, so that the process that hands out the tests starts without it

    torch.set_num_threads(1)
    gc.freeze()  # modules and tests outlive every collection


def pytest_runtest_setup(item: pytest.Item) -> None:
    import torch

    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch.cuda.is_available() is False here")
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny random Llama, for tests that do not care which model it is."""
    from tests.support.models import tiny_folder  # here, so that tests of the kernel alone start without transformers

    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A JSONL file of 12 prompts."""
    from tests.support.jobs import write_prompts

    return write_prompts(tmp_path_factory.mktemp("data") / "prompts.jsonl")


@pytest.fixture
def unhandled() -> Iterator[None]:
    """Termination signals end the program, as a shell leaves them; under nohup, SIGHUP would be ignored."""
    from flowrl.run.training.signals import SIGNALS

    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
