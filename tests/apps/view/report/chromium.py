"""Debian's Chromium without a window, driven over the DevTools protocol.

A missing Debian package is installed with apt, which needs root.
"""

import base64
import contextlib
import itertools
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.conftest import TIMEOUT_S
from tests.debian import why_missing

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-default-apps", "--disable-dev-shm-usage",
         "--hide-scrollbars", "--remote-debugging-port=0")  # fmt: skip


def why_not() -> str:
    """Install Chromium if it is missing; return the reason why it cannot run, or an empty string."""
    return why_missing(("chromium",), ("chromium", "fonts-dejavu-core"))


class ProtocolError(Exception):
    """An error that the browser reports for a command, or an exception of evaluated code."""


class PageChanged(ProtocolError):
    """The page was reloaded, as by itself at its first step, before the answer."""


class Tab:
    """One page. ``messages`` are the lines of its console, exceptions, and log entries such as blocked requests."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket, self.numbers = socket, itertools.count(1)
        self.messages: list[str] = []
        self.loaded = 0
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while (message := self._receive()).get("id") != number:
            pass
        if "error" in message:
            kind = PageChanged if "navigated" in message["error"]["message"] else ProtocolError
            raise kind(f"{method}: {message['error']}")
        return message["result"]

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self.socket.recv(TIMEOUT_S))
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled":
                self.messages.append(str([value.get("value") for value in parameters["args"]]))
            case "Runtime.exceptionThrown":
                self.messages.append(json.dumps(parameters["exceptionDetails"])[:1000])
            case "Log.entryAdded":
                self.messages.append(parameters["entry"]["text"])
            case "Page.loadEventFired":
                self.loaded += 1
        return message

    def size(self, width: int, height: int = 900, dark: bool = False, media: str = "") -> None:
        """Set the size of the window in pixels, and the preferences of the reader."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme, motion])

    def open(self, url: str) -> None:
        before = self.loaded
        self.call("Page.navigate", url=url)
        while self.loaded == before:
            self._receive()

    def run(self, expression: str) -> Any:
        """Evaluate an expression, and return its value; a promise is awaited."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise ProtocolError(json.dumps(result["exceptionDetails"])[:1000])
        return result["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Return the value of an expression when it is true."""
        deadline = time.monotonic() + TIMEOUT_S
        value = None
        while not value:
            assert time.monotonic() < deadline, f"{expression} has not become true"
            time.sleep(0.1)
            with contextlib.suppress(PageChanged):
                value = self.run(expression)
        return value

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, height: int | None = None) -> None:
        """Write a picture of the page from its top, of the whole page without ``height``."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(picture["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Callable[[], Tab]]:
    """Run Chromium with a new profile in ``folder``; yields a function that opens tabs."""
    profile = folder / "profile"
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "chromium.log").open("wb"))
        command = ["chromium", *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        browser = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log))
        stack.callback(browser.kill)
        deadline = time.monotonic() + TIMEOUT_S
        port_file = profile / "DevToolsActivePort"
        while not (port_file.is_file() and len(port_file.read_text().splitlines()) == 2):
            assert browser.poll() is None, (folder / "chromium.log").read_text()
            assert time.monotonic() < deadline, "Chromium does not open its port"
            time.sleep(0.1)
        port, path = port_file.read_text().splitlines()
        address = f"ws://127.0.0.1:{port}"
        control = stack.enter_context(connect(address + path, proxy=None))

        def new_tab() -> Tab:
            control.send(json.dumps({"id": 1, "method": "Target.createTarget", "params": {"url": "about:blank"}}))
            while "result" not in (answer := json.loads(control.recv(TIMEOUT_S))):
                pass
            page = f"{address}/devtools/page/{answer['result']['targetId']}"
            return Tab(stack.enter_context(connect(page, proxy=None, max_size=None)))

        yield new_tab
