"""Tests of `endpoint.py`, `program.py` and `flowrl/workers/command.py`: programs and functions as agents."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import flowrl
from flowrl.episodes import Endpoint, Row
from flowrl.errors import DataError, DefinitionError, ParameterError
from flowrl.graphs import grpo
from flowrl.operators import Interact
from flowrl.protocols.protocols import Request
from tests.episodes import scripted
from tests.episodes.scripted import Scripted, played, row, say
from tests.support.errors import raises
from tests.support.templates import tokenizer_of

ASK = """
import json, os, sys, urllib.request

row = json.loads(os.environ["FLOWRL_ROW"])


def ask(messages, path="/chat/completions", **fields):
    body = json.dumps({"model": "m", "messages": messages, **fields} if messages else fields)
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, body.encode(), headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def answer(messages):
    return ask(messages)["choices"][0]["message"]


messages = row["messages"]
messages.append(answer(messages))
"""


def look(at: str) -> str:
    """Look."""
    return at


def program(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", ASK + code)


def test_a_program_plays_an_episode() -> None:
    code = """
messages += [{"role": "user", "content": "and?"}]
print(answer(messages)["content"])
print(json.dumps({"score": row["ground_truth"] + 0.5}))
"""
    episodes, engine = played(Endpoint(program(code)), say, count=3)
    assert [one.fault for one in episodes] == [None] * 3 and len(engine.requests) == 6
    assert [one.chat.rewards for one in episodes] == [[0.0, i + 0.5] for i in range(3)]


@pytest.mark.parametrize(("line", "score"), [("2", 2.0), ("-0.5\\n\\n", -0.5), ('{\\"score\\": 1e3}', 1000.0)])
def test_the_score_is_the_last_line(line: str, score: float) -> None:
    (one,), _ = played(Endpoint(program(f'print("x"); print("{line}")')), say)
    assert (one.fault, one.chat.rewards) == (None, [score])


@pytest.mark.parametrize("line", ["", "x", "true", '{\\"points\\": 1}', "null"])
def test_no_score_is_a_fault(line: str) -> None:
    (one,), _ = played(Endpoint(program(f'print("{line}")')), say)
    assert one.fault is not None and one.fault.code == "episode.no-score"


def test_a_score_without_an_answer_is_a_fault() -> None:
    """Such as of a program that speaks to another server."""
    (one,), _ = played(Endpoint([sys.executable, "-c", "print(1.0)"]), say)
    assert one.fault is not None and one.fault.code == "episode.reward-before-answer"
    assert "OPENAI_BASE_URL" in one.fault.message


def test_without_score_a_program_may_send_one() -> None:
    (one,), _ = played(Endpoint(program('ask(None, "/score", score=3.0)'), score=None), say)
    assert (one.fault, one.chat.rewards) == (None, [3.0])
    (one,), _ = played(Endpoint(program("pass"), score=None), say)
    assert (one.fault, one.chat.rewarded) == (None, False)


def test_an_exit_status_is_a_fault_with_the_last_output() -> None:
    (one,), engine = played(Endpoint(program('sys.exit("no luck")')), say, tries=2)
    assert one.fault is not None and (one.fault.code, one.fault.facts["status"]) == ("episode.agent-exit", 1)
    assert "no luck" in one.fault.message and len(engine.requests) == 2
    (one,), _ = played(Endpoint(("/no/such/program",)), say)
    assert one.fault is not None and one.fault.facts["status"] == 127
    assert "Cannot execute '/no/such/program'" in one.fault.message


def test_a_row_that_no_variable_holds_is_a_fault() -> None:
    (one,), _ = played(Endpoint(program("print(1.0)")), say, rows=[row(0, 140_000 * "x")])
    assert one.fault is not None and one.fault.code == "episode.large-row"


def test_a_refused_request_is_named() -> None:
    (one,), _ = played(Endpoint(program("ask([*messages[:1], messages[0]])")), say)
    assert one.fault is not None and one.fault.facts["refused"] == "episode.rewritten-context"


def test_a_program_that_fails_beyond_a_limit_ends_its_episode() -> None:
    code = 'messages.append({"role": "user", "content": "more"}); answer(messages)'
    (one,), _ = played(Endpoint(program(code)), say, turns=1)
    assert (one.ended, one.fault) == ("turns", None)


def test_a_first_request_beyond_the_context_is_a_fault_of_the_program() -> None:
    """The program wrote the prompt, not the row."""
    code = ASK.partition("messages = row")[0] + 'ask([{"role": "user", "content": 300 * "word "}])'
    (one,), engine = played(Endpoint([sys.executable, "-c", code]), say, context=100)
    assert one.fault is not None and one.fault.facts["refused"] == "context_length_exceeded"
    assert (one.ended, engine.requests) == ("failed", [])


def test_a_prompt_that_the_engine_refuses_is_an_error_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(Scripted):
        def submit(self, request: Request) -> None:
            if len(request.ids) > 100:
                raise DataError("The model has 100 positions.", code="engine.prompt-too-long")
            super().submit(request)

    monkeypatch.setattr(scripted, "Scripted", Refusing)
    code = """
try:
    ask([{"role": "user", "content": 60 * "word "}])
except urllib.error.HTTPError as error:
    assert (error.code, json.load(error)["error"]["code"]) == (400, "engine.prompt-too-long")
print(1.0)
"""
    episodes, _ = played(Endpoint(program(code)), say, count=2, rewrites="segment")
    for one in episodes:
        assert (one.ended, one.fault, one.chat.counts["refused"]) == ("done", None, 1)


def test_a_program_that_hangs_is_killed_with_all_that_it_has_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
import time
time.sleep(600)
"""
    (one,), _ = played(Endpoint(program(code)), say, seconds=3.0)
    assert one.fault is not None and one.fault.code == "episode.timeout"
    assert one.chat.program is not None and one.chat.program["status"] is None
    for pid in map(int, pids.read_text().split()):
        assert not _runs(pid)


def test_what_a_program_leaves_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open({str(pids)!r}, "w").write(str(child.pid))
print(1)
"""
    (one,), _ = played(Endpoint(program(code)), say)
    assert one.fault is None and not _runs(int(pids.read_text()))


def _runs(pid: int) -> bool:
    """Whether a process runs, after the system had time to end it."""
    for _ in range(200):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except FileNotFoundError:
            return False
        if stat.rpartition(")")[2].split()[0] == "Z":
            return False
        time.sleep(0.01)
    return True


def test_logs_are_kept(tmp_path: Path) -> None:
    code = 'print("warned", file=sys.stderr); print(1)'
    played(Endpoint(program(code), logs=str(tmp_path / "logs")), say, count=2)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        *("row-0-0.err", "row-0-0.out", "row-1-0.err", "row-1-0.out")
    ]
    assert (tmp_path / "logs" / "row-1-0.err").read_text() == "warned\n"


def plain(url: str, key: str, row: Row) -> float:
    os.environ["FLOWRL_ROW"] = '{"messages": [{"role": "user", "content": "go"}]}'
    os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"] = url, key
    scope: dict[str, Any] = {}
    exec(ASK, scope)
    return float(len(scope["messages"][-1]["content"]))


@pytest.mark.parametrize("agent", [plain, f"{__name__}:plain"])
def test_a_plain_function_plays_in_a_thread(agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLOWRL_ROW", "OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "")
    (one,), _ = played(Endpoint(agent), say)
    assert (one.fault, one.chat.rewards) == (None, [12.0])


@pytest.mark.parametrize("agent", [[], lambda url: 1.0, 3])
def test_invalid_agents_are_refused(agent: Any) -> None:
    with pytest.raises(ParameterError):
        Endpoint(agent)


def test_a_file_with_a_command_is_loaded_only_with_imports(tmp_path: Path) -> None:
    endpoint, file = Endpoint(["python", "agent.py"]), tmp_path / "graph.yaml"
    graph = grpo(None, n=2).edit(replace={"generate": Interact(endpoint, max_new_tokens=4)}, drop=["reward"])
    flowrl.save(graph, file)
    with raises("file.not-imported", references=("the command 'python agent.py'",)):
        flowrl.load(file)
    assert flowrl.load(file, imports=True)["interact"].operator.environment == endpoint


def test_interact_accepts_an_endpoint() -> None:
    endpoint = Endpoint(["python", "agent.py"])
    assert endpoint.agent == ("python", "agent.py")
    assert Interact(endpoint).environment == endpoint
    with raises("episode.invalid-environment", name="Endpoint"):
        Interact(endpoint, tools=[len])
    with raises("episode.invalid-environment", name="Endpoint"):
        Interact(endpoint, parser="kimi")
    assert Interact(Endpoint(["python", "agent.py"], parser="kimi")).parser == "hermes"


referred = Endpoint(["python", "agent.py"])
misspelled = Endpoint(["python", "agent.py"], parser="vllm:typo")


@pytest.mark.parametrize("wrong", [{"tools": [look]}, {"parser": "kimi"}])
def test_a_reference_to_an_endpoint_is_refused_as_the_endpoint_is(wrong: Any) -> None:
    interact = Interact(f"{__name__}:referred", **wrong)
    with raises("episode.invalid-environment", name="Endpoint"):
        interact.rehearse(lambda role: tokenizer_of("qwen2.5"))
    Interact(f"{__name__}:referred").rehearse(lambda role: tokenizer_of("qwen2.5"))


@pytest.mark.parametrize("endpoint", [misspelled, f"{__name__}:misspelled"])
def test_a_missing_parser_of_vllm_is_refused_before_the_run(endpoint: Any) -> None:
    """Without vLLM for that, with it for the name."""
    with pytest.raises(DefinitionError) as caught:
        Interact(endpoint).rehearse(lambda role: tokenizer_of("qwen2.5"))
    assert caught.value.code in ("package.not-installed", "tool.unknown-parser")
