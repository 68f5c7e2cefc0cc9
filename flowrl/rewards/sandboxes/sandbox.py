"""`Sandbox`: runs a program that a response contains; `UnsafeSubprocess` and `Docker` run it on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from pydantic import Field

from flowrl.errors import RewardError
from flowrl.rewards.sandboxes import runner
from flowrl.spec import Spec

GRACE = 30.0
"""Seconds beyond the limit of a program after which its sandbox has failed."""


class Execution(NamedTuple):
    """What a program did. `exit_code` is None if it was terminated, for example at its time limit."""

    exit_code: int | None
    stdout: str
    stderr: str


class Sandbox(Spec):
    """Runs untrusted Python programs. A subclass defines `run`.

    Args:
        timeout: seconds allowed for one program.
        memory: MiB allowed for one program.
    """

    schedulable: ClassVar[bool] = False

    timeout: float = Field(default=5.0, gt=0)
    memory: int = Field(default=512, ge=32)

    def run(self, program: str, stdin: str = "") -> Execution:
        """Run a program, whatever it does; raises `RewardError` if the sandbox itself fails."""
        raise NotImplementedError(f"{type(self).__name__} does not define run")

    def _request(self, program: str, stdin: str) -> str:
        """What `runner` reads."""
        return json.dumps({"program": program, "stdin": stdin, "timeout": self.timeout, "memory": self.memory})

    def _failed(self, reason: str, advice: str) -> RewardError:
        name = type(self).__name__
        return RewardError(
            f"The sandbox {name} failed, so a program was not run: {reason} {advice}",
            code="reward.sandbox-failed",
            sandbox=name,
        )

    def _of_output(self, lines: Sequence[str], details: str, advice: str) -> Execution:
        """The result in the lines that `runner` wrote; none after ``started`` if the program killed it."""
        if not lines or lines[0] != "started":
            raise self._failed(f"it did not start Python ({details.strip()[-500:] or 'no output'}).", advice)
        return Execution(**json.loads(lines[1])) if len(lines) > 1 else Execution(None, "", "")

    def _launched(self, command: Sequence[str], request: str, advice: str) -> Execution:
        """The result of a command that starts `runner`."""
        try:
            done = subprocess.run(
                command, input=request, capture_output=True, text=True, timeout=self.timeout + GRACE, check=False
            )
        except OSError as error:
            raise self._failed(f"{command[0]} cannot be started ({error}).", advice) from error
        except subprocess.TimeoutExpired:
            raise self._failed(f"{command[0]} did not end within {self.timeout + GRACE:g} s.", advice) from None
        return self._of_output(done.stdout.splitlines(), done.stderr, advice)


class UnsafeSubprocess(Sandbox):
    """Runs programs as subprocesses, which isolates nothing: for programs that you trust, and for tests.

    Time, CPU time, memory and the size of files are limited. A program can still read and delete your files, use the
    network, start processes, and send signals to other processes of the same user.
    """

    def run(self, program: str, stdin: str = "") -> Execution:
        """Run a program by the Python of this process."""
        command = [sys.executable, "-I", runner.__file__]
        return self._launched(command, self._request(program, stdin), "Check the limits on processes (ulimit -a).")


class Docker(Sandbox):
    """Runs each program in a new container: without network, capabilities, or a file system to write to but ``/tmp``.

    The container has as much isolation as Docker gives: it shares the kernel. It ends at the time limit, also if this
    process is killed. The image needs Python 3 as ``python3``; pull it first, since a pull takes longer than a call.

    Args:
        image: name of the image.
        processes: number of processes and threads that a program may have.
        command: the command line of Docker, or of a compatible program such as Podman.
    """

    image: str = "python:3.11-slim"
    processes: int = Field(default=64, ge=2)
    command: str = "docker"

    def run(self, program: str, stdin: str = "") -> Execution:
        """Run a program in a new container."""
        # the program's memory, and as much for the runner and the files in /tmp
        limits = [f"--memory={self.memory * 2}m", f"--pids-limit={self.processes}", "--cpus=1", "--tmpfs=/tmp:size=64m"]
        isolation = ["--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
        name = f"flowrl-{uuid.uuid4().hex}"
        container = ["--rm", "--interactive", "--init", "--user=65534:65534", "--pull=never", f"--name={name}"]
        python = ["python3", "-I", "-c", Path(runner.__file__).read_text(encoding="utf-8")]
        command = [self.command, "run", *container, *isolation, *limits, self.image, *python]
        advice = f"Start Docker, and pull the image: {self.command} pull {self.image}."
        return self._launched(command, self._request(program, stdin), advice)
