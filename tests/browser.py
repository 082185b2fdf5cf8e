"""A headless browser for the tests, driven over its debugging protocol."""

import base64
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page of a running browser."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._number = 0

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        self._connection.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=60))
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page."""
        return self._call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 60) -> None:
        """Wait until an expression is true in the page."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, (
                f"not in the page: {expression}\n{self.evaluate('document.body.innerText')}"
            )
            time.sleep(0.3)

    def screenshot(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(directory: Path) -> Iterator[Browser]:
    """A browser with a profile in ``directory``."""
    assert CHROMIUM is not None, "no chromium; infra/services installs it"
    log = directory / "chromium.log"
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--remote-debugging-port=0", "--window-size=1600,1400", f"--user-data-dir={directory / 'profile'}"]
    with log.open("wb") as output, subprocess.Popen([*command, "about:blank"], stderr=output) as process:
        try:
            port = _wait_for(log, r"ws://127\.0\.0\.1:(\d+)/")
            with connect(_page_address(port), max_size=None, open_timeout=60) as connection:
                yield Browser(connection)
        finally:
            process.terminate()


def _wait_for(log: Path, pattern: str, seconds: float = 60) -> str:
    deadline = time.monotonic() + seconds
    while (match := re.search(pattern, log.read_text(errors="replace"))) is None:
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.2)
    return match[1]


def _page_address(port: str) -> str:
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
        pages = json.load(answer)
    return str(next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page"))
