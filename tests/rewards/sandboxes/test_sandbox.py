"""`UnsafeSubprocess` limits programs (`runner.py`), and `Docker` passes its command line what isolates them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.rewards import Docker, Execution, Sandbox, UnsafeSubprocess, code
from tests.rewards.sandboxes.servers import docker
from tests.support.errors import raises


@pytest.fixture(scope="module")
def box() -> UnsafeSubprocess:
    return UnsafeSubprocess(timeout=10.0, memory=256)


def test_a_program_gets_its_input_and_nothing_else(box: UnsafeSubprocess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    program = "import os; print(input(), os.environ.get('SECRET'), sorted(os.listdir()))"
    assert box.run(program, "ü\n") == Execution(0, "ü None ['err', 'main.py', 'out', 'stdin']\n", "")


def test_how_a_program_ends(box: UnsafeSubprocess) -> None:
    assert box.run("raise SystemExit(3)").exit_code == 3
    assert "ValueError: no" in box.run("raise ValueError('no')").stderr
    assert box.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").exit_code == -9
    assert box.run("import os, signal; os.kill(os.getppid(), signal.SIGKILL)") == Execution(None, "", "")


def test_time_memory_and_output_are_limited(box: UnsafeSubprocess) -> None:
    assert UnsafeSubprocess(timeout=0.5).run("print(1, flush=True)\nwhile True: pass") == Execution(None, "1\n", "")
    assert "MemoryError" in box.run("bytearray(1 << 30)").stderr
    done = box.run("while True: print('x' * 1000)")
    assert done.exit_code != 0 and len(done.stdout) == 1 << 20


def test_docker_isolates_the_container(tmp_path: Path) -> None:
    sandbox = Docker(command=str(docker(tmp_path)), timeout=10.0, memory=128, processes=8)
    assert sandbox.run("print(input())", "hi") == Execution(0, "hi\n", "")
    arguments = json.loads((tmp_path / "arguments.json").read_text())
    options = set(arguments[: arguments.index("python:3.11-slim")])
    assert {"--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--rm"} <= options
    assert {"--user=65534:65534", "--pids-limit=8", "--memory=256m", "--interactive"} <= options


def test_a_sandbox_that_fails_is_an_error_and_no_score(tmp_path: Path) -> None:
    sandbox = Docker(command=str(docker(tmp_path)))
    (tmp_path / "stopped").touch()
    for broken in (sandbox, Docker(command=str(tmp_path / "none"))):
        with raises("reward.sandbox-failed", sandbox="Docker"):
            code(broken)("apps", "```python\nprint(1)\n```", {"inputs": [""], "outputs": ["1"]})
    with pytest.raises(NotImplementedError):
        Sandbox().run("print(1)")
