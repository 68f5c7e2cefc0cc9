"""The server of the page: read-only, on this machine only, for holders of the printed address."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path
from typing import Any

from flowrl.errors import FlowrlError, ParameterError
from flowrl.look.page.api import Api
from flowrl.look.page.plain import dumps

STATIC = Path(__file__).parent / "static"
HOST = "127.0.0.1"
COOKIE = "flowrl-look"
CSP = "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'"
HEADERS = {
    "Content-Security-Policy": f"{CSP}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


def files() -> dict[str, Path]:
    """The files of the page, by their path in an address."""
    return {one.relative_to(STATIC).as_posix(): one for one in STATIC.rglob("*") if one.suffix in TYPES}


def application(api: Api, token: str, port: int) -> Any:
    """The ASGI application.

    A request needs the cookie, which the address with the token sets, and this host; every other one is refused.
    """
    try:
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import RedirectResponse, Response
        from starlette.routing import Route
    except ImportError as error:
        raise _not_installed() from error
    hosts, served = {f"{HOST}:{port}", f"localhost:{port}"}, files()
    cookie = f"{COOKIE}-{port}"

    def refused(request: Request) -> Response | None:
        if request.headers.get("host") not in hosts:
            return Response("This server answers only by the address that flowrl look printed.", 421, HEADERS)
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return Response("Another page cannot read this one.", 403, HEADERS)
        if not secrets.compare_digest(request.cookies.get(cookie, "").encode(), token.encode()):
            return Response("Open the address that flowrl look printed, with its token.", 403, HEADERS)
        return None

    async def enter(request: Request) -> Response:
        given = request.query_params.get("token", "")
        if request.headers.get("host") in hosts and given and secrets.compare_digest(given.encode(), token.encode()):
            answer = RedirectResponse("/", 303, HEADERS)
            answer.set_cookie(cookie, token, httponly=True, samesite="strict", path="/")
            return answer
        return refused(request) or _file(Response, served["index.html"])

    async def static(request: Request) -> Response:
        path = request.path_params["path"]
        if path not in served:
            return refused(request) or Response("There is no such file.", 404, HEADERS)
        return refused(request) or _file(Response, served[path])

    async def view(request: Request) -> Response:
        if (refusal := refused(request)) is not None:
            return refusal
        try:
            found, status = api.answer(request.path_params["view"], dict(request.query_params)), 200
        except FlowrlError as error:
            found, status = {"error": str(error)}, 200  # an answer that says why there is none
        except (LookupError, ValueError) as error:
            found, status = {"error": f"There is no such view: {error}"}, 404
        return Response(dumps(found), status, HEADERS, "application/json")

    return Starlette(
        routes=[
            Route("/", enter, methods=["GET"]),
            Route("/api/{view}", view, methods=["GET"]),
            Route("/{path:path}", static, methods=["GET"]),
        ]
    )


def _file(response: Any, path: Path) -> Any:
    return response(path.read_bytes(), 200, HEADERS, TYPES[path.suffix])


def _not_installed() -> ParameterError:
    return ParameterError(
        "The page needs Starlette and uvicorn, which are not installed. Run: pip install 'flowrl[look]'; or pass "
        "--text or --to FILE.html, which need neither.",
        code="package.not-installed",
        package="starlette",
    )


def bound(port: int) -> socket.socket:
    """A socket on this machine's loopback; port 0 is any free one."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((HOST, port))
        found.listen()  # who opens the printed address at once waits for the first answer
    except OSError as error:
        found.close()
        raise ParameterError(
            f"Port {port} of {HOST} is taken ({error.strerror}). Pass another one, or --port 0 for any.",
            code="cli.bad-option",
            option="--port",
            found=port,
        ) from error
    return found


class Server:
    """A server on loopback; `address` opens the page."""

    def __init__(self, api: Api, port: int = 0) -> None:
        try:
            import uvicorn
        except ImportError as error:
            raise _not_installed() from error
        self.socket = bound(port)
        self.port: int = self.socket.getsockname()[1]
        token = secrets.token_urlsafe(24)
        self.address = f"http://{HOST}:{self.port}/?token={token}"
        config = uvicorn.Config(
            application(api, token, self.port), log_level="warning", access_log=False, lifespan="off"
        )
        self._server = uvicorn.Server(config)

    def serve(self) -> None:
        """Serve until Ctrl-C or `stop`."""
        self._server.run(sockets=[self.socket])

    def stop(self) -> None:
        """End `serve`, from another thread."""
        self._server.should_exit = True
