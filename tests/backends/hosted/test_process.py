"""Tests of `process.py` and `reaper.py`: a subprocess that is called over pipes.

They cover its replies, its death, and the removal of its resources.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrl.backends import TorchTrainer
from flowrl.backends.hosted.arrival import IncomingWeights, expected_weights
from flowrl.backends.hosted.process import EngineProcess
from flowrl.backends.hosted.reaper import members, shared_memory, start_reaper
from flowrl.backends.sglang import engine as sglang
from flowrl.backends.sglang.engine import SGLang
from flowrl.run.engine.build import EngineBuilder
from flowrl.sync.digest import weights_digest
from tests.support.errors import raises
from tests.support.models import tiny_folder


@pytest.fixture
def process() -> Iterator[EngineProcess]:
    folder = tempfile.TemporaryDirectory(prefix="flowrl-test-")
    process = EngineProcess("Toy", "tests.backends.hosted.toy_process:main", {"COLOR": "red"}, folder)
    yield process
    process.close()


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until `condition` is true; another process makes it true."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state(pid: int) -> str | None:
    """State letter of a process, as in ps; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return None


class TestProcess:
    def test_calls_return_results(self, process: EngineProcess) -> None:
        assert process.ask("echo", b"12345", n=1)["size"] == 5
        assert process.ask("echo", n=[1.5, "é"])["n"] == [1.5, "é"]

    def test_an_error_in_the_process_is_raised_by_the_call(self, process: EngineProcess) -> None:
        with raises("engine.call-failed", engine="Toy", call="fail", error="ValueError: no") as caught:
            process.ask("fail")
        assert caught.value.message.endswith("\n    last line of output")
        assert process.ask("echo", n=1)["n"] == 1

    @pytest.mark.parametrize(("call", "cause"), [("die", "exited with 3"), ("half", "was killed by SIGABRT")])
    def test_a_dead_process_is_reported_and_close_removes_its_resources(
        self, process: EngineProcess, call: str, cause: str
    ) -> None:
        reply = process.ask("echo")
        with raises("engine.process-died", engine="Toy", how=cause, when=f"during {call}") as caught:
            process.ask(call)
        assert "\n    last line of output" in caught.value.message
        with raises("engine.process-died", when="before echo"):
            process.ask("echo")
        assert str(reply["child"]) in {path.name for path in members(process.pid)}  # an orphan until `close`
        process.close()
        self.refuse_leftovers(process, reply)

    def test_shared_memory_of_a_call_that_kills_the_process_is_removed(self, process: EngineProcess) -> None:
        """As for an engine that dies during startup."""
        with raises("engine.process-died", how="exited with 3", when="during grow") as caught:
            process.ask("grow")
        name = caught.value.message.split()[-1]
        assert Path("/dev/shm", name).exists()
        process.close()
        assert not Path("/dev/shm", name).exists()

    def test_close_removes_processes_and_shared_memory(self, process: EngineProcess) -> None:
        reply = process.ask("echo")
        assert shared_memory(process.pid) == {Path("/dev/shm", reply["memory"])}
        process.close()
        process.close()
        self.refuse_leftovers(process, reply)

    def test_calls_work_with_more_than_1023_open_files(self, process: EngineProcess) -> None:
        """`select.select` supports file descriptors up to 1,023 only."""
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        number = 1500
        if limits[1] != resource.RLIM_INFINITY and limits[1] <= number:
            pytest.skip(f"needs file descriptors past 1,023, and {limits[1]} are allowed")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], number + 1), limits[1]))
        low = process._replies.fileno()
        try:
            with Connection(os.dup2(low, number), writable=False) as replies:
                process._replies = replies
                assert process.ask("echo", n=1)["n"] == 1
                with raises("engine.process-died", how="exited with 3", when="during die"):
                    process.ask("die")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    def test_the_process_ends_when_its_owner_is_collected(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="flowrl-test-")
        process = EngineProcess("Toy", "tests.backends.hosted.toy_process:main", {}, folder)
        group = process.pid
        del process
        gc.collect()
        assert not members(group)
        assert not Path(folder.name).exists()

    def test_the_reaper_removes_files_after_both_processes_are_killed(self) -> None:
        """Ray kills an actor and the processes that it has started this way."""
        code = (
            "import json, os, signal, tempfile; from flowrl.backends.hosted.process import EngineProcess;"
            "folder = tempfile.TemporaryDirectory(prefix='flowrl-test-');"
            "process = EngineProcess('Toy', 'tests.backends.hosted.toy_process:main', {}, folder);"
            "print(json.dumps([process.ask('echo'), folder.name]), flush=True);"
            "os.kill(process.pid, signal.SIGKILL); os.kill(os.getpid(), signal.SIGKILL)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        reply, folder = json.loads(done.stdout)
        eventually(lambda: not Path(folder).exists())
        assert not Path("/dev/shm", reply["memory"]).exists()
        eventually(lambda: state(reply["child"]) in (None, "Z"))

    def test_the_reaper_removes_shared_memory_after_a_process_and_its_children_are_killed(self) -> None:
        """Ray kills actors this way; no other process could remove it."""
        code = (
            "import os, signal; from pathlib import Path; from multiprocessing.shared_memory import SharedMemory;"
            "from flowrl.backends.hosted.reaper import start_reaper;"
            "memory = SharedMemory(create=True, size=64);"
            "life = start_reaper([Path('/dev/shm', memory.name)]);"
            "print(memory.name, flush=True);"
            "from multiprocessing.resource_tracker import _resource_tracker;"
            "os.kill(_resource_tracker._pid, signal.SIGKILL); os.kill(os.getpid(), signal.SIGKILL)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        eventually(lambda: not Path("/dev/shm", done.stdout.strip()).exists())

    def test_the_reaper_is_not_a_child_of_its_starter(self) -> None:
        """Killing a process with its children does not kill its reaper, which ends when its pipe closes."""
        descriptor, name = tempfile.mkstemp(dir="/dev/shm")
        os.close(descriptor)
        life = start_reaper([Path(name)])
        children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
        command_lines = [Path(f"/proc/{pid}/cmdline") for path in children for pid in path.read_text().split()]
        # Selected by folder: reapers of reward processes are children of this process.
        assert not [path for path in command_lines if b"flowrl-reaper-" in path.read_bytes()]
        assert Path(name).exists()
        os.close(life)
        eventually(lambda: not Path(name).exists())

    @staticmethod
    def refuse_leftovers(process: EngineProcess, reply: dict[str, object]) -> None:
        assert not members(process.pid)
        assert not Path("/dev/shm", str(reply["memory"])).exists()
        assert not process._log.parent.exists()

    def test_the_process_ignores_a_flowrl_package_in_the_working_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may be a checkout of another version."""
        (tmp_path / "flowrl").mkdir()
        (tmp_path / "flowrl" / "__init__.py").write_text("raise RuntimeError('not this one')")
        monkeypatch.chdir(tmp_path)
        folder = tempfile.TemporaryDirectory(prefix="flowrl-test-")
        process = EngineProcess("Toy", "tests.backends.hosted.toy_process:main", {}, folder)
        assert process.ask("echo", n=1)["n"] == 1
        process.close()

    def test_the_process_gets_the_environment_variables_of_its_owner(self, process: EngineProcess) -> None:
        process.ask("echo")  # now it runs; /proc may not have its environment before
        variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        assert b"COLOR=red" in variables
        assert os.environ.get("COLOR") is None


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "gemma2"])
def test_names_and_shapes_of_expected_weights_equal_those_a_trainer_sends(kind: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, kind)
    trainer = TorchTrainer(folder, device="cpu").build(EngineBuilder({}, seed=0))
    sent = {name: (tensor.shape, tensor.dtype) for name, tensor in trainer.weights()}
    due = expected_weights(folder)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in due.items()} == sent
    arrival = IncomingWeights(trainer, None, due, torch.float32, folder)
    assert [name for name, _ in arrival.weights()] == list(sent)
    assert arrival.digest == weights_digest(trainer.weights())
    assert arrival.nbytes == sum(tensor.nbytes for _, tensor in trainer.weights())


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        ([("a", (2, 3))], "b"),  # missing
        ([("a", (2, 3)), ("b", (3,))], "b"),  # another shape
        ([("a", (2, 3)), ("c", (3,))], "c"),  # unknown
    ],
)
def test_weights_with_other_names_or_shapes_are_refused(sent: list[tuple[str, tuple[int, ...]]], name: str) -> None:
    weights = [(name, torch.zeros(shape)) for name, shape in sent]
    with raises("engine.weights-mismatch", path="folder", version=4, names=(name,)):
        list(arrival_of(weights).weights())


def arrival_of(weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype = torch.float32) -> IncomingWeights:
    """Weights of version 4 for an engine with dtype `dtype`."""
    source: Any = SimpleNamespace(version=4, weights=lambda: weights)
    return IncomingWeights(source, None, {"a": torch.zeros(2, 3), "b": torch.zeros(4)}, dtype, "folder")


@pytest.mark.parametrize("way", [IncomingWeights.weights, IncomingWeights.to_send])
def test_a_duplicate_tensor_is_refused(way: Any) -> None:
    weights = [("a", torch.zeros(2, 3)), ("b", torch.zeros(4)), ("a", torch.ones(2, 3))]
    with raises("engine.weights-mismatch", name="a", version=4):
        list(way(arrival_of(weights)))


@pytest.mark.parametrize(
    ("sent", "engine"),
    [
        (torch.int64, torch.float32),
        (torch.bool, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_weights_sent_at_lower_precision_are_refused(sent: torch.dtype, engine: torch.dtype) -> None:
    weights = [("a", torch.zeros(2, 3, dtype=sent)), ("b", torch.zeros(4))]
    with raises("engine.weights-mismatch", path="folder", names=("a",)) as caught:
        list(arrival_of(weights, engine).weights())
    for dtype in (sent, engine):
        assert str(dtype).removeprefix("torch.") in caught.value.message


def test_matrices_for_a_bfloat16_engine_are_rounded_before_hashing() -> None:
    """Rounding halves the bytes sent. Vectors, which the engine may store in float32, are sent unrounded."""
    draw = torch.Generator().manual_seed(0)
    sent = {"a": torch.randn(2, 3, generator=draw), "b": torch.randn(4, generator=draw)}
    arrival = arrival_of(sent.items(), torch.bfloat16)
    received = dict(arrival.weights())
    assert torch.equal(received["a"], sent["a"].bfloat16()) and torch.equal(received["b"], sent["b"])
    assert arrival.nbytes == 6 * 2 + 4 * 4
    assert arrival.digest == weights_digest({"a": sent["a"].bfloat16(), "b": sent["b"]}.items())


def test_each_sglang_rank_has_its_own_seed(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU SGLang samples all rows from one generator; with one seed, two ranks would sample equal responses."""
    monkeypatch.setattr(sglang, "SGLangEngine", lambda spec, tokenizer, seed: seed)
    for spec, seeds in ((SGLang(tiny, ranks=3), [7, 8, 9]), (SGLang(tiny, ranks=3, seed=20), [20, 21, 22])):
        assert [spec.build(EngineBuilder({}, 7, rank, 3)) for rank in range(3)] == seeds
