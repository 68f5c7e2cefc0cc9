"""Firefox without a window, driven by Marionette, the protocol that it has built in."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
PREFERENCES = {
    "marionette.port": 0,
    "app.update.enabled": False,
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "toolkit.telemetry.reportingpolicy.firstRun": False,
}
SECONDS = 60
LAST = "the last message of the test"


class Firefox:
    """A session: one page at a time.

    Protocol: messages ``LENGTH:[0, id, command, parameters]``, answered by ``LENGTH:[1, id, error, result]``.
    """

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
        self._file, self._sent = self._socket.makefile("rb"), 0
        self._receive()  # the greeting
        self.command("WebDriver:NewSession", capabilities={})

    def command(self, name: str, **parameters: Any) -> Any:
        """The result of a command."""
        self._sent += 1
        text = json.dumps([0, self._sent, name, parameters])
        self._socket.sendall(f"{len(text)}:{text}".encode())
        _, _, error, result = self._receive()
        assert error is None, error
        return result

    def _receive(self) -> Any:
        length = b""
        while not length.endswith(b":"):
            length += self._file.read(1)
        return json.loads(self._file.read(int(length[:-1])))

    def open(self, address: str) -> None:
        """Open an address."""
        self.command("WebDriver:Navigate", url=address)

    def evaluate(self, expression: str, *arguments: Any) -> Any:
        """The value of an expression in the page."""
        return self.command("WebDriver:ExecuteScript", script=f"return {expression}", args=list(arguments))["value"]

    def of_browser(self, expression: str) -> Any:
        """The value of an expression in the browser itself."""
        self.command("Marionette:SetContext", value="chrome")
        found = self.evaluate(expression)
        self.command("Marionette:SetContext", value="content")
        return found

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()

    def wait(self, expression: str) -> None:
        """Wait until an expression is true in the page."""
        end = time.monotonic() + SECONDS
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < end, expression

    def errors(self) -> list[str]:
        """The errors and warnings of scripts, policies and documents of pages with the protocol of the open one.

        They reach the browser later, in order: a planted one is the last.
        """
        self.evaluate("void setTimeout(() => { throw Error(arguments[0]); })", LAST)
        own = json.dumps(self.evaluate("location.protocol"))
        expression = f"""Services.console.getMessageArray()
            .filter((one) => one instanceof Ci.nsIScriptError && one.sourceName.startsWith({own}))
            .map((one) => one.message)"""
        end, found = time.monotonic() + SECONDS, list[str]()
        while not found or LAST not in found[-1]:
            assert time.monotonic() < end, found
            found = self.of_browser(expression)
        return found[:-1]

    def set_offline(self) -> None:
        """Refuse every connection from now on."""
        self.of_browser("Services.io.offline = true")


@contextmanager
def firefox(profile: Path) -> Iterator[Firefox]:
    """Firefox with a new profile in an empty folder."""
    assert FIREFOX is not None
    preferences = "".join(f"user_pref({json.dumps(k)}, {json.dumps(v)});\n" for k, v in PREFERENCES.items())
    (profile / "user.js").write_text(preferences)
    command = [FIREFOX, "--headless", "--marionette", "-remote-allow-system-access", "--profile", str(profile)]
    out = (profile / "out").open("wb")
    process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "HOME": str(profile)})
    try:
        end, port = time.monotonic() + SECONDS, profile / "MarionetteActivePort"
        while not port.exists() or not port.read_text():
            assert process.poll() is None and time.monotonic() < end, (profile / "out").read_text()
            time.sleep(0.05)
        with closing(Firefox(int(port.read_text()))) as found:
            yield found
    finally:
        process.terminate()
        process.wait()
        out.close()
