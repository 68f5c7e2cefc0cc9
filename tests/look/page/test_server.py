"""The server of the page: who may read it, and what it says to a browser."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import ParameterError
from flowrl.look.page.server import CSP, HOST, Server, bound
from tests.look.page.pages import api_of, serving, written


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(written(tmp_path_factory.mktemp("runs") / "run", steps=3)) as found:
        yield found


def get(server: Server, path: str, headers: Mapping[str, str] = {}, method: str = "GET") -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection(HOST, server.port, timeout=30)
    connection.request(method, path, headers={"Host": f"{HOST}:{server.port}", **headers})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


@pytest.fixture(scope="module")
def cookie(server: Server) -> dict[str, str]:
    """The header of a browser that has opened the printed address."""
    response, _ = get(server, "/?" + server.address.partition("?")[2])
    assert (response.status, response.headers["location"]) == (303, "/")
    given = response.headers["set-cookie"]
    assert "HttpOnly" in given and "SameSite=strict" in given
    return {"Cookie": given.partition(";")[0]}


def test_the_printed_address_opens_the_page(server: Server, cookie: dict[str, str]) -> None:
    assert server.address.startswith(f"http://{HOST}:")
    response, body = get(server, "/", cookie)
    assert response.status == 200 and b"<!doctype html>" in body
    assert CSP in response.headers["content-security-policy"]
    response, body = get(server, "/api/runs", cookie)
    assert (response.status, [run["name"] for run in json.loads(body)]) == (200, ["run"])


PATHS = ("/", "/app.js", "/style.css", "/api/runs", "/api/metrics?run=run", "/nothing")


@pytest.mark.parametrize("path", PATHS)
def test_a_request_without_the_token_is_refused(server: Server, path: str) -> None:
    for headers in ({}, {"Cookie": f"flowrl-look-{server.port}=guess"}):
        response, body = get(server, path, headers)
        assert response.status == 403 and b"token" in body


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1:1", ""])
def test_a_foreign_host_is_refused_with_the_right_token_too(
    server: Server, cookie: dict[str, str], path: str, host: str
) -> None:
    response, _ = get(server, path, cookie | {"Host": host})
    assert response.status in (400, 421)
    response, _ = get(server, "/?" + server.address.partition("?")[2], {"Host": host})
    assert response.status in (400, 421) and "set-cookie" not in response.headers


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_page_is_refused(server: Server, cookie: dict[str, str], site: str) -> None:
    """A page of another port is of the same site, and its requests carry the cookie."""
    response, _ = get(server, "/api/runs", cookie | {"Sec-Fetch-Site": site})
    assert response.status == 403
    response, _ = get(server, "/api/runs", cookie)
    assert response.headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/api/runs", "/app.js"])
def test_only_get_is_allowed(server: Server, cookie: dict[str, str], method: str, path: str) -> None:
    assert get(server, path, cookie, method)[0].status == 405


@pytest.mark.parametrize(
    "path",
    ["/../server.py", "/%2e%2e/server.py", "/..%2fserver.py", "/vendor/../../api.py", "//etc/passwd", "/static/app.js"],
)
def test_a_path_that_leaves_the_page_is_not_found(server: Server, cookie: dict[str, str], path: str) -> None:
    response, body = get(server, path, cookie)
    assert response.status == 404 and b"import" not in body


@pytest.mark.parametrize(
    "path",
    [
        "/api/nothing?run=run",
        "/api/rows?run=nothing&step=1",
        "/api/rows?run=run&step=one",
        "/api/row?run=run&step=1&row=../../run.json",
        "/api/rows",
    ],
)
def test_an_unknown_view_is_an_answer_and_not_an_error(server: Server, cookie: dict[str, str], path: str) -> None:
    response, body = get(server, path, cookie)
    assert response.status == 404 and json.loads(body)["error"]


def test_what_was_not_recorded_is_named_with_the_setting(server: Server, cookie: dict[str, str]) -> None:
    response, body = get(server, "/api/rows?run=run&step=99", cookie)
    assert response.status == 200 and "step 99" in json.loads(body)["error"]


@pytest.mark.parametrize("link", ["metrics.jsonl", "rows/step-000001.parquet", "columns/batch@batch", "run.json"])
def test_a_link_that_leaves_the_folder_is_refused(tmp_path: Path, link: str) -> None:
    run, outside = written(tmp_path / "run", steps=1), tmp_path / "outside"
    outside.mkdir()
    (run / link).unlink(missing_ok=True)
    (run / link).parent.mkdir(exist_ok=True)
    (run / link).symlink_to(outside / "secret")
    if link == "run.json":
        (outside / "secret").write_text("{}")
    with pytest.raises(ParameterError) as refused:
        api_of(run)
    assert (refused.value.code, refused.value.facts["path"]) == ("run.link", str(run / link))


def test_links_within_the_folder_and_to_the_folder_are_followed(tmp_path: Path) -> None:
    run = written(tmp_path / "run", steps=1)
    (run / "copy.json").symlink_to("run.json")
    (tmp_path / "link").symlink_to(run)
    assert api_of(tmp_path / "link").answer("runs", {})[0]["status"] == "finished"


def test_a_port_that_is_taken_is_refused() -> None:
    taken: Any = bound(0)
    with pytest.raises(ParameterError) as refused:
        bound(taken.getsockname()[1])
    taken.close()
    assert (refused.value.code, refused.value.facts["option"]) == ("cli.bad-option", "--port")
