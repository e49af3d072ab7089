"""A headless Chromium, driven over its DevTools protocol through two pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
LIMIT_S = 60.0


def find() -> str:
    """Return the browser's path; raise an error that says how to install one."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    raise FileNotFoundError(
        f"no browser: none of {', '.join(NAMES)} is on the path; install one: apt-get install -y chromium"
    )


class Browser:
    """One process with one page at a time."""

    def __init__(self, profile: Path) -> None:
        to_read, self._send = os.pipe()
        self._receive, to_write = os.pipe()
        options = ["--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run"]
        options += ["--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars", "--disable-background-networking"]
        # The protocol is on the file descriptors 3 and 4.
        command = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", find(), *options],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        try:
            self.call("Browser.close")
        finally:
            self._process.wait(timeout=LIMIT_S)
            os.close(self._send)
            os.close(self._receive)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method and return its result. Events that come meanwhile are kept in ``events``."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        text = json.dumps(message).encode() + b"\0"
        while text:
            text = text[os.write(self._send, text) :]
        deadline = time.monotonic() + LIMIT_S
        while True:
            found = self._next(deadline, method)
            if found.get("id") == self._number:
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]
            if "method" in found:
                self.events.append(found)

    def _next(self, deadline: float, waited_for: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._receive], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"no answer to {waited_for} within {LIMIT_S} s"
            more = os.read(self._receive, 1 << 20)
            assert more, f"the browser ended before it answered {waited_for}"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def open(
        self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False, touch: bool = False
    ) -> None:
        """Open a file in a new page and wait until it is drawn."""
        self._session = None
        self.events.clear()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        self.dark(dark)
        self.call("Page.navigate", url=path.as_uri())
        self.wait_for("document.readyState === 'complete' && location.protocol === 'file:'")
        self.settle()

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def dark(self, dark: bool) -> None:
        """Ask for the dark colours or for the light ones."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page; wait for it if it is a promise."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def settle(self) -> None:
        """Wait for two frames: what was asked for is drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def wait_for(self, condition: str) -> None:
        """Wait until a condition holds in the page."""
        deadline = time.monotonic() + LIMIT_S
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {condition}"

    def key(self, key: str, text: str = "") -> None:
        """Press and release a key."""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send one event of the mouse."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.settle()

    def click(self, x: float, y: float) -> None:
        """Click."""
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        self.mouse("mouseReleased", x, y, button="left", clickCount=1)

    def screenshot(self, *, whole: bool = False) -> bytes:
        """Return a picture as PNG, of the window or of the whole page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(found["data"])

    def pdf(self) -> bytes:
        """Return the page as it prints."""
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=False)["data"])

    def complaints(self) -> list[str]:
        """Return what the console got of level warning or error, and what was thrown."""
        found = []
        for event in self.events:
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("warning", "error", "assert"):
                found.append(str(params["args"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("warning", "error"):
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        return found

    def requests(self) -> list[str]:
        """Return the addresses that were asked for."""
        return [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]
