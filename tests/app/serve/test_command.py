"""``flowrl serve``: a model or a job at the endpoint of programs. Covers also `flowrl/app/serve/serving.py`."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from flowrl.app.serve.serving import of_job
from flowrl.episodes import Endpoint
from tests import ROOT
from tests.support.command_line import Command, is_paragraph, write
from tests.support.errors import raises

pytestmark = pytest.mark.runs

JOB = """
from flowrl import Role
from flowrl.backends import TorchRollout, TorchScorer, TorchTrainer
from flowrl.episodes import Endpoint
from flowrl.graphs import grpo
from flowrl.operators import Interact

interact = Interact(
    Endpoint(["true"], parser="glm"), temperature=0.5, max_new_tokens=3, others={{"judge": Role("judge")}}
)
job = grpo(None, n=2).edit(replace={{"generate": interact}}, drop=["reward"]).bind(
    actor=TorchTrainer({model!r}), ref=TorchScorer({model!r}), rollout=TorchRollout()
)
plain = grpo(None, n=2)
"""


def test_a_model_is_served_until_it_is_interrupted(tiny: str, tmp_path: Path) -> None:
    """Libraries that load the model print nothing."""
    # Background jobs of a shell ignore SIGINT, and so would their children.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code += "; from flowrl.app.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", tiny, "--max-new-tokens", "4", "--parser", "hermes"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, cwd=tmp_path, env=environment, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        words = shlex.split(process.stdout.readline())
        found = dict(word.split("=", 1) for word in words[1:])
        url, headers = found["OPENAI_BASE_URL"], {"authorization": f"Bearer {found['OPENAI_API_KEY']}"}
        body = {"model": "m", "messages": [{"role": "user", "content": "1"}]}
        answers = [httpx.post(f"{url}/chat/completions", json=body, headers=headers) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert all(answer.json()["usage"]["completion_tokens"] <= 4 for answer in answers)
        refused = httpx.post(f"{url}/chat/completions", json={**body, "n": 2}, headers=headers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        process.send_signal(signal.SIGINT)
        assert (process.stdout.read(), process.stderr.read()) == ("The endpoint is closed.\n", "")
        assert process.wait() == 0


def test_of_a_job_its_sampling_and_parser_count(command: Command, tiny: str) -> None:
    write(Path("job.py"), JOB.format(model=tiny))
    backend, interact = of_job("job.py:job", imports=False)
    assert (backend.model, backend.frozen) == (tiny, True)  # type: ignore[attr-defined]
    assert (interact.temperature, interact.max_new_tokens, interact.others) == (0.5, 3, {})
    endpoint = interact.resolved()
    assert isinstance(endpoint, Endpoint) and endpoint.parser == "glm"
    with raises("cli.wrong-target", found="grpo"):
        of_job("job.py:plain", imports=False)


@pytest.mark.parametrize(
    "options", [("--parser", "xml"), ("--parser", "vllm:typo"), ("--engine", "xml"), ("--checkpoint", "best")]
)
def test_wrong_options_are_refused(options: tuple[str, str], command: Command, tiny: str) -> None:
    result = command("serve", tiny, *options)
    assert result.code == 2 and is_paragraph(result)


def test_a_job_has_its_own_engine(command: Command, tiny: str) -> None:
    write(Path("job.py"), JOB.format(model=tiny))
    result = command("serve", "job.py:job", "--engine", "vllm")
    assert result.code == 2 and is_paragraph(result)
