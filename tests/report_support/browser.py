"""A headless Chromium, spoken to in the DevTools protocol over a pair of pipes: no sockets, no
driver, no dependency.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
REPLY_WITHIN_S = 60.0
PHONE, DESKTOP = (360, 740), (1280, 900)

_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4);"
    " os.execv(sys.argv[3], sys.argv[3:])"
)
"""Chromium reads commands from descriptor 3 and answers on descriptor 4."""


def find_browser() -> str | None:
    """The path of a Chromium, or None where there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of one browser. `console` collects everything that the page complained of since it
    was opened.
    """

    def __init__(self, executable: str, profile: Path) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        flags = (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            "--no-first-run",
        )
        command = [
            executable,
            *flags,
            "--disable-background-networking",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs_in), str(theirs_out), *command],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = ours_out, ours_in
        self._unread = b""
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        self.console: list[str] = []
        self.requests: list[str] = []
        page = next(
            target
            for target in self.call("Target.getTargets")["targetInfos"]
            if target["type"] == "page"
        )
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        while (answer := self._receive()).get("id") != self._number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def open(self, path: Path, *, size: tuple[int, int] = DESKTOP, dark: bool = False) -> None:
        """Show the file at `path` and wait until it has loaded."""
        width, height = size
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.console.clear()
        self.requests.clear()
        self._loaded = False
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; promises are waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(
                answer["exceptionDetails"]
                .get("exception", answer["exceptionDetails"])
                .get("description")
            )
        return answer["result"].get("value")

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(data["data"]))

    def close(self) -> None:
        if self._process.poll() is None:
            self._session = None
            self.call("Browser.close")
        self._process.wait(timeout=REPLY_WITHIN_S)
        os.close(self._out)
        os.close(self._in)

    def _receive(self) -> dict[str, Any]:
        until_s = time.monotonic() + REPLY_WITHIN_S
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until_s - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            if not data:
                raise RuntimeError(
                    "the browser ended"
                    if ready
                    else f"the browser said nothing for {REPLY_WITHIN_S:.0f} s"
                )
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._notice(message.get("method", ""), message.get("params", {}))
        return message

    def _notice(self, method: str, params: Mapping[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.console.append(
                str(params["exceptionDetails"].get("exception", {}).get("description", params))
            )
        elif method == "Runtime.consoleAPICalled":
            self.console.append(" ".join(str(argument.get("value")) for argument in params["args"]))
        elif method == "Log.entryAdded":
            self.console.append(str(params["entry"]["text"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(str(params["request"]["url"]))
