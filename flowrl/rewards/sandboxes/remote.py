"""Sandboxes on servers: `SandboxFusion` and `E2B`."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from pydantic import Field

from flowrl.lazy import package
from flowrl.rewards.sandboxes import runner
from flowrl.rewards.sandboxes.sandbox import GRACE, Execution, Sandbox


class SandboxFusion(Sandbox):
    """Runs programs on a server of SandboxFusion, by its ``/run_code``.

    Args:
        url: of the server, such as ``"http://localhost:8080"``.
    """

    url: str = Field(kw_only=True, pattern=r"^https?://.+")

    def run(self, program: str, stdin: str = "") -> Execution:
        """Run a program on the server."""
        reply = self._reply(
            {
                "code": program,
                "stdin": stdin,
                "language": "python",
                "compile_timeout": self.timeout,
                "run_timeout": self.timeout,
                "memory_limit_MB": self.memory,
                "files": {},
                "fetch_files": [],
            }
        )
        run = reply.get("run_result")
        if reply.get("status") not in ("Success", "Failed") or not isinstance(run, dict):
            reason = f"{self.url} reported {reply.get('status')!r} ({reply.get('message')})."
            raise self._failed(reason, "See the log of the server.")
        exit_code = run.get("return_code") if run.get("status") == "Finished" else None
        return Execution(exit_code, run.get("stdout") or "", run.get("stderr") or "")

    def _reply(self, request: dict[str, Any]) -> dict[str, Any]:
        to = urllib.request.Request(
            f"{self.url.rstrip('/')}/run_code",
            json.dumps(request).encode(),
            {"Content-Type": "application/json", "Accept": "application/json"},
        )
        try:
            with urllib.request.urlopen(to, timeout=2 * self.timeout + GRACE) as response:
                reply: dict[str, Any] = json.load(response)
        except (OSError, ValueError) as error:  # URLError, a timeout, or no JSON
            advice = "Start the server, correct url=, or call fewer workers at once by Reward(workers=)."
            raise self._failed(f"{self.url}/run_code: {error}.", advice) from error
        return reply


class E2B(Sandbox):
    """Runs each program in a new sandbox of E2B; needs ``pip install flowrl[e2b]`` and ``E2B_API_KEY``.

    Args:
        template: name of the sandbox's template, which has the server of E2B's code interpreter; None is E2B's own.
    """

    template: str | None = None

    def run(self, program: str, stdin: str = "") -> Execution:
        """Run a program in a new sandbox."""
        e2b = package("e2b_code_interpreter", "e2b")
        source = Path(runner.__file__).read_text(encoding="utf-8").partition('\nif __name__ == "__main__":')[0]
        code = f"{source}\nmain({json.loads(self._request(program, stdin))!r})\n"
        try:
            with e2b.Sandbox.create(self.template, timeout=int(self.timeout + GRACE) + 1) as sandbox:
                done = sandbox.run_code(code, timeout=self.timeout + GRACE)
        except Exception as error:  # its own, and those of its HTTP client
            reason = f"{type(error).__name__}: {str(error).rstrip('.')}."
            raise self._failed(reason, "Check E2B_API_KEY and E2B's limits.") from error
        details = done.error.traceback if done.error else ""
        return self._of_output("".join(done.logs.stdout).splitlines(), details, "Use a template with Python 3.")
