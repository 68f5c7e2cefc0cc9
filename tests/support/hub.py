"""A stand-in of the Hugging Face Hub on the loopback: its HTTP interface, as far as `huggingface_hub` uses it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

Files = Mapping[str, bytes]


@dataclass
class Repository:
    """A repository: the files of each commit, and the commit of each branch."""

    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    visibility: str | None = None

    def push(self, files: Files, branch: str = "main") -> str:
        """Add a commit; returns its hash."""
        content = json.dumps([[name, hashlib.sha1(data).hexdigest()] for name, data in sorted(files.items())])
        commit = hashlib.sha1(f"{content}{len(self.commits)}".encode()).hexdigest()
        self.commits[commit], self.branches[branch] = dict(files), commit
        return commit

    @property
    def files(self) -> Files:
        """Those of the newest commit of ``main``."""
        return self.commits[self.branches["main"]]


class Hub:
    """The repositories of a stand-in, by ``models/org/name`` or ``datasets/org/name``, and the requests that it got.

    Args:
        readers: tokens of accounts with access to gated repositories.
        writers: tokens that may write.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.readers, self.writers = {"hf_reader"}, {"hf_writer"}
        self.requests: list[str] = []
        self.uploaded: dict[str, bytes] = {}
        self.address = ""

    def add(self, name: str, source: str | Path | Files, kind: str = "model", gated: bool = False) -> str:
        """Push a folder, or files; returns the commit."""
        if not isinstance(source, Mapping):
            paths = (path for path in Path(source).rglob("*") if path.is_file())
            source = {path.relative_to(source).as_posix(): path.read_bytes() for path in paths}
        repository = self.repositories.setdefault(f"{kind}s/{name}", Repository(gated=gated))
        return repository.push(source)

    def downloads(self) -> list[str]:
        """The files whose content was requested, by name."""
        return [url.rpartition("/")[2] for url in self.requests if url.startswith("GET") and "/resolve/" in url]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._handle()

    do_HEAD = do_POST = do_PUT = do_GET

    def _handle(self) -> None:
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(self._chunks())
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if self.command in ("POST", "PUT") and path != "/api/validate-yaml":
            return self._write(path, body, token)
        if self.command == "POST":
            return self._json({"errors": [], "warnings": []})
        if found := re.fullmatch(r"/api/(models|datasets)/(.+?)(?:/(revision|tree)/(.+))?", path):
            kind, name, what, revision = found.groups()
            return self._read(f"{kind}/{name}", revision or "main", token, tree=what == "tree")
        if found := re.fullmatch(r"/(datasets/)?(.+?)/resolve/([^/]+)/(.+)", path):
            dataset, name, revision, file = found.groups()
            return self._read(f"{dataset or 'models/'}{name}", revision, token, file=file)
        return self._error(404, "RepoNotFound")

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _read(self, key: str, revision: str, token: str, tree: bool = False, file: str | None = None) -> None:
        repository = self.server.hub.repositories.get(key)
        if repository is None:
            return self._error(404 if token else 401, "RepoNotFound")
        if repository.gated and (tree or file) and token not in self.server.hub.readers:
            return self._error(403 if token else 401, "GatedRepo")
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            return self._error(404, "RevisionNotFound")
        files = repository.commits[commit]
        if file is not None and file not in files:
            return self._error(404, "EntryNotFound")
        if file is not None:
            etag = f'"{hashlib.sha1(files[file]).hexdigest()}"'
            return self._reply(200, files[file], {"ETag": etag, "X-Repo-Commit": commit})
        listed = [{"type": "file", "path": name, "size": len(data), "oid": _oid(data)} for name, data in files.items()]
        siblings = [{"rfilename": name} for name in files]
        return self._json(listed if tree else {"id": key.partition("/")[2], "sha": commit, "siblings": siblings})

    def _write(self, path: str, body: bytes, token: str) -> None:
        hub = self.server.hub
        if path.startswith("/upload/"):  # a signed address, as that of the storage
            hub.uploaded[path.rpartition("/")[2]] = body
            return self._reply(200, b"", {})
        if token not in hub.writers:
            return self._error(403 if token else 401, "")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization'] or 'me'}/{asked['name']}"
            if f"models/{name}" in hub.repositories:
                return self._json({"url": f"{hub.address}/{name}", "error": "exists"}, 409)
            hub.repositories[f"models/{name}"] = Repository(visibility=asked.get("visibility"))
            hub.repositories[f"models/{name}"].push({})
            return self._json({"url": f"{hub.address}/{name}", "id": name})
        if path.endswith("/preupload/main"):
            modes = [
                {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular"}
                for file in json.loads(body)["files"]
            ]
            return self._json({"files": [{**mode, "shouldIgnore": False, "oid": None} for mode in modes]})
        if path.endswith("/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{hub.address}/upload/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self._json({"transfer": "basic", "objects": objects})
        name = path.removeprefix("/api/models/").removesuffix("/commit/main")
        repository = hub.repositories[f"models/{name}"]
        files = dict(repository.files)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.uploaded[value["oid"]]
        commit = repository.push(files)
        return self._json({"commitOid": commit, "commitUrl": f"{hub.address}/{name}/commit/{commit}", "success": True})

    def _error(self, status: int, code: str) -> None:
        self._reply(status, b"{}", {"X-Error-Code": code, "X-Error-Message": f"the stand-in says {status}"})

    def _json(self, value: Any, status: int = 200) -> None:
        self._reply(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _reply(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: Hub


@contextmanager
def serving() -> Iterator[Hub]:
    """A stand-in without repositories, until the end of the block."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        hub = server.hub = Hub()
        hub.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A stand-in that `huggingface_hub` uses for the Hub, with an empty cache and without a token."""
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    with serving() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{found.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        close_session()
        yield found
        close_session()
