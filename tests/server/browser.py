"""A real browser without a screen: Debian's Chromium, driven over its own debugging protocol.

Before: a test with a page to open. After: the page's state, read by JavaScript, and pictures of it. Always: a profile of its
own in a temporary folder, and no process left behind.
"""

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from websockets.sync.client import connect

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)

START_S = 60.0
WAIT_S = 30.0


class PageError(AssertionError):
    """What the page threw, or did not do in time."""


class Browser:
    """One tab. `with Browser() as page: page.open(url)`."""

    def __init__(self, width: int = 1280, height: int = 960) -> None:
        self._size = (width, height)
        self._calls = 0
        self.errors: list[str] = []

    def __enter__(self) -> Self:
        assert CHROMIUM is not None
        self._profile = tempfile.mkdtemp(prefix="blocktable-browser-")
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio"]
        flags += [
            "--remote-debugging-port=0",
            f"--user-data-dir={self._profile}",
            f"--window-size={','.join(map(str, self._size))}",
        ]
        self._process = subprocess.Popen(
            [CHROMIUM, *flags, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        with ExitStack() as ends:
            ends.callback(self._end)
            self._socket = ends.enter_context(connect(self._tab(), max_size=None, ping_interval=None))
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
            self._ends = ends.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ends.close()

    def open(self, url: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=url)

    def read(self, expression: str) -> Any:
        """The value of a JavaScript expression, which may be a promise. Raises `PageError`."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise PageError(f"{expression}: {told['exceptionDetails']}")
        return told["result"].get("value")

    def wait_for(self, expression: str, seconds: float = WAIT_S) -> Any:
        """The value of an expression as soon as it is true. Raises `PageError`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                value = self.read(expression)
            except PageError:  # the page is not there yet
                if time.monotonic() > deadline:
                    raise
                value = None
            if value:
                return value
            if time.monotonic() > deadline:
                raise PageError(f"{expression} was not true in {seconds:g} s; the page said: {self.errors}")
            time.sleep(0.05)

    def move_mouse(self, x: float, y: float) -> None:
        """To a place of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def save_picture(self, path: Path) -> None:
        """Of what the window shows, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def call(self, method: str, **parameters: Any) -> Any:
        """One command of the protocol. What the page reports meanwhile as errors is kept in `errors`."""
        self._calls += 1
        self._socket.send(json.dumps({"id": self._calls, "method": method, "params": parameters}))
        while True:
            told = json.loads(self._socket.recv(timeout=WAIT_S))
            if told.get("id") == self._calls:
                if "error" in told:
                    raise PageError(f"{method}: {told['error']}")
                return told["result"]
            self._hear(told)

    def _hear(self, told: dict[str, Any]) -> None:
        if told["method"] == "Runtime.exceptionThrown":
            self.errors.append(str(told["params"]["exceptionDetails"]))
        elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
            self.errors.append(told["params"]["entry"]["text"] + " " + told["params"]["entry"].get("url", ""))

    def _tab(self) -> str:
        """The address of the one tab's socket."""
        from urllib.request import urlopen

        deadline, port_file = time.monotonic() + START_S, Path(self._profile) / "DevToolsActivePort"
        while time.monotonic() < deadline:
            if port_file.exists() and (lines := port_file.read_text().splitlines()):
                with urlopen(f"http://127.0.0.1:{lines[0]}/json") as answer:
                    tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
                if tabs:
                    address: str = tabs[0]["webSocketDebuggerUrl"]
                    return address
            time.sleep(0.05)
        raise PageError(f"the browser was not there in {START_S:g} s")

    def _end(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)
