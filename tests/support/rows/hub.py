"""A stand-in for the Hugging Face Hub: the part of its HTTP interface that `huggingface_hub` reads data sets by."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub:
    """Data sets by name, each a list of commits, which are files by path.

    Args:
        gated: names of data sets that need an access token.
    """

    def __init__(self, datasets: dict[str, list[dict[str, bytes]]], gated: tuple[str, ...] = ()) -> None:
        self.datasets, self.gated = datasets, gated
        self.requests: list[str] = []
        self.url = ""

    @staticmethod
    def commit(number: int) -> str:
        """The name of a commit, counted from 0."""
        return hashlib.sha1(str(number).encode()).hexdigest()

    @property
    def downloads(self) -> list[str]:
        """The files that were downloaded."""
        return [path.rpartition("/resolve/")[2].partition("/")[2] for verb, path in self._seen() if verb == "GET"]

    def _seen(self) -> Iterator[tuple[str, str]]:
        for request in self.requests:
            verb, _, path = request.partition(" ")
            if "/resolve/" in path:
                yield verb, path

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a path."""
        api = path.startswith("/api/datasets/")
        repo, _, rest = path.removeprefix("/api").removeprefix("/datasets/").partition("/")
        owner, (name, _, rest) = repo, rest.partition("/")
        repo = f"{owner}/{name}"
        if repo not in self.datasets:
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if repo in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        commits = self.datasets[repo]
        names = {self.commit(i): files for i, files in enumerate(commits)}
        verb, _, rest = rest.partition("/")
        revision, _, file = rest.partition("/") if verb else ("main", "", "")
        head = self.commit(len(commits) - 1)
        commit = head if revision == "main" else revision
        if commit not in names:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files = names[commit]
        if api and verb == "tree":
            return 200, {}, json.dumps([self._entry(path, body) for path, body in files.items()]).encode()
        if api:
            info: dict[str, Any] = {"id": repo, "sha": commit, "siblings": [{"rfilename": one} for one in files]}
            return 200, {}, json.dumps(info).encode()
        if file not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        etag = hashlib.sha1(files[file]).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, files[file]

    @staticmethod
    def _entry(path: str, body: bytes) -> dict[str, Any]:
        return {"type": "file", "path": path, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}

    @contextmanager
    def serving(self) -> Iterator[Hub]:
        """Serve at `url` until the end of the block."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = unquote(urlsplit(self.path).path)
                hub.requests.append(f"{self.command} {path}")
                status, headers, body = hub.answer(path)
                self.send_response(status)
                for key, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                """Stay silent."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
