"""A headless Chromium, steered through a pair of pipes by its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
MISSING = f"needs a browser: install one of {', '.join(NAMES)} (Debian: apt-get install chromium)"
PATIENCE_S = 60.0
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-breakpad", "--no-proxy-server", "--remote-debugging-pipe", "--force-color-profile=srgb",
)  # fmt: skip
"""Without a sandbox, because tests run as root in containers, and only pages of their own server are opened."""

WIRED = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3]]
for end, place in zip(ends, (3, 4)):
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Run a command whose descriptors 3 and 4 are the two that are given."""


def find() -> str | None:
    """Return the browser's command; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """A tab of the browser.

    Attributes:
        messages: what was written to the console, and errors that nobody caught.
        requests: the addresses that were asked for.
    """

    def __init__(self, pipes: tuple[int, int]) -> None:
        self._read, self._write = pipes
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.messages: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = self._next(deadline)
            assert found is not None, f"the browser does not answer {method}"
            if found.get("id") == self._number:
                assert "error" not in found, (method, found["error"])
                return found["result"]

    def listen(self, seconds: float) -> None:
        """Take in what happens in the page for some time."""
        deadline = time.monotonic() + seconds
        while self._next(deadline) is not None:
            pass

    def _next(self, deadline: float) -> dict[str, Any] | None:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            self._buffer += os.read(self._read, 2**16)
        line, _, self._buffer = self._buffer.partition(b"\0")
        found = json.loads(line)
        self._note(found.get("method"), found.get("params", {}))
        return found

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.messages.append(" ".join(str(one.get("value", one.get("description"))) for one in params["args"]))
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.messages.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.messages.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, url: str) -> None:
        """Open an address, also where only its hash is another one."""
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Run a script in the page, and return its value. `page` is the document of the tab Runs, if it is there."""
        body = f"const page = document.querySelector('iframe')?.contentDocument; return ({script});"
        expression = f"(async () => {{ {body} }})()"
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, (script, found["exceptionDetails"])
        return found["result"].get("value")

    def wait(self, script: str, timeout_s: float = PATIENCE_S) -> Any:
        """Return the value of a script as soon as it is true."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(AssertionError):  # the page is not there yet
                if found := self.run(script):
                    return found
            assert time.monotonic() < deadline, f"not in {timeout_s} s: {script}; {self.messages}"
            self.listen(0.05)

    def click(self, selector: str) -> None:
        """Click on the first element that a selector takes."""
        self.wait(
            f"(page.querySelector({json.dumps(selector)})?.click(), !!page.querySelector({json.dumps(selector)}))"
        )

    def texts(self, selector: str) -> list[str]:
        """Return the text of each element that a selector takes."""
        return self.run(f"[...page.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)")

    def prefer(self, scheme: str) -> None:
        """Make the browser ask for "dark" or "light"."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page in pixels."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self, path: Path) -> None:
        """Write a picture of the page as PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Tab]:
    """Start a browser with an empty profile.

    Args:
        folder: for the profile.

    Yields:
        Its tab.
    """
    browser = find()
    assert browser is not None, MISSING
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()
    wired = [sys.executable, "-c", WIRED, str(to_browser), str(from_browser)]
    command = [*wired, browser, *OPTIONS, f"--user-data-dir={folder}"]
    environment = {**os.environ, "HOME": str(folder)}
    with (folder.parent / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            command, pass_fds=(to_browser, from_browser), stdout=log, stderr=log, env=environment,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    os.close(to_browser)
    os.close(from_browser)
    try:
        tab = Tab((to_us, from_us))
        yield tab
        tab._session = None
        tab.send("Browser.close")
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(to_us)
        os.close(from_us)
