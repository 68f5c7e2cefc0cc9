"""Local stand-ins for the servers of SandboxFusion and E2B, and for the command line of Docker."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Answer = Callable[[str, str, Any], tuple[int, str]]
"""The status and body of a reply to method, path and JSON body of a request."""


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """A server on the loopback interface; gives its address."""

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, text = answer(self.command, self.path, json.loads(body) if body else None)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = do_DELETE = _reply

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def sandbox_fusion(method: str, path: str, request: Any) -> tuple[int, str]:
    """A reply of SandboxFusion to ``/run_code``, in the form that the client of verl reads."""
    if (method, path) != ("POST", "/run_code") or request["language"] != "python":
        return 404, "{}"
    result: dict[str, Any] = {"status": "Finished", "execution_time": 0.1}
    try:
        done = subprocess.run(
            [sys.executable, "-c", request["code"]],
            input=request["stdin"],
            capture_output=True,
            text=True,
            timeout=request["run_timeout"],
        )
        result |= {"return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    except subprocess.TimeoutExpired:
        result["status"] = "TimeLimitExceeded"
    status = "Success" if result.get("return_code") == 0 else "Failed"
    return 200, json.dumps({"status": status, "message": "", "compile_result": None, "run_result": result})


class E2BServer:
    """Replies of E2B's API and of the code interpreter in a sandbox; `alive` has the sandboxes that were not killed."""

    def __init__(self) -> None:
        self.alive: set[str] = set()

    def __call__(self, method: str, path: str, request: Any) -> tuple[int, str]:
        if method == "POST" and path.endswith("/sandboxes"):
            self.alive.add(name := f"sandbox{len(self.alive)}")
            reply = {"sandboxID": name, "templateID": request["templateID"], "clientID": "0", "envdVersion": "0.4.0"}
            return 201, json.dumps(reply)
        if method == "DELETE":
            self.alive.remove(path.rpartition("/")[2])
            return 204, ""
        if path != "/execute":
            return 404, "{}"
        done = subprocess.run([sys.executable, "-c", request["code"]], capture_output=True, text=True)
        lines = [{"type": "stdout", "text": line, "timestamp": 0} for line in done.stdout.splitlines(keepends=True)]
        if done.returncode:
            lines.append({"type": "error", "name": "Error", "value": "", "traceback": done.stderr})
        return 200, "\n".join(map(json.dumps, lines))


def docker(folder: Path) -> Path:
    """A program that takes the arguments of ``docker run``, writes them to a file, and runs the command here."""
    path = folder / "docker"
    path.write_text(
        f"""#!{sys.executable}
import json, os, sys
arguments = sys.argv[1:]
open({str(folder / "arguments.json")!r}, "w").write(json.dumps(arguments))
image = arguments.index("python:3.11-slim")
if os.path.exists({str(folder / "stopped")!r}):
    sys.exit("docker: Cannot connect to the Docker daemon.")
os.execv(sys.executable, [sys.executable, *arguments[image + 2:]])
"""
    )
    path.chmod(0o755)
    return path
