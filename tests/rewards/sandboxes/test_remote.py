"""`SandboxFusion` and `E2B`, whose own client is used, against local servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flowrl.rewards import E2B, Execution, SandboxFusion
from tests.rewards.sandboxes.servers import E2BServer, sandbox_fusion, serving
from tests.support.errors import raises


def test_sandbox_fusion() -> None:
    with serving(sandbox_fusion) as url:
        sandbox = SandboxFusion(url=url, timeout=10.0)
        assert sandbox.run("print(input())", "hi") == Execution(0, "hi\n", "")
        assert sandbox.run("raise SystemExit(3)").exit_code == 3
        assert SandboxFusion(url=f"{url}/", timeout=0.5).run("while True: pass").exit_code is None


@pytest.mark.parametrize(
    "reply", [(200, '{"status": "SandboxError", "message": "no space"}'), (200, "<html>"), (200, "{}"), (503, "{}")]
)
def test_a_server_that_fails_is_an_error(reply: tuple[int, str]) -> None:
    with serving(lambda *request: reply) as url, raises("reward.sandbox-failed", sandbox="SandboxFusion"):
        SandboxFusion(url=url).run("print(1)")


def test_a_server_that_is_not_there_is_an_error() -> None:
    with serving(sandbox_fusion) as url:
        pass
    with raises("reward.sandbox-failed"):
        SandboxFusion(url=url).run("print(1)")
    with raises("parameter.invalid"):
        SandboxFusion(url="localhost:8080")


@pytest.fixture
def e2b(monkeypatch: pytest.MonkeyPatch) -> Iterator[E2BServer]:
    server = E2BServer()
    with serving(server) as url:
        for name, value in {"API_URL": url, "SANDBOX_URL": url, "API_KEY": "e2b_0", "HTTP_VERSION": "1.1"}.items():
            monkeypatch.setenv(f"E2B_{name}", value)
        yield server


def test_e2b(e2b: E2BServer) -> None:
    pytest.importorskip("e2b_code_interpreter", reason="needs pip install 'flowrl[e2b]'")
    sandbox = E2B(timeout=10.0)
    assert sandbox.run("print(input())", "hi\n'\"\\") == Execution(0, "hi\n", "")
    assert sandbox.run("raise SystemExit(3)").exit_code == 3
    assert E2B(timeout=0.5).run("while True: pass").exit_code is None
    assert e2b.alive == set()


def test_e2b_without_a_server_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("e2b_code_interpreter", reason="needs pip install 'flowrl[e2b]'")
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with raises("reward.sandbox-failed", sandbox="E2B"):
        E2B().run("print(1)")
