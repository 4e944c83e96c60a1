"""A headless Chromium as the tests drive it: the DevTools protocol over two pipes, without another package."""

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
_TIMEOUT_S = 60
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)


class Page:
    """One page: it is opened, asked and looked at.

    Args:
        send: descriptor to write to.
        receive: descriptor to read from.
    """

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._rest = send, receive, b""
        self._numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _TIMEOUT_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._receive], [], [], max(deadline - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            data = os.read(self._receive, 1 << 20)
            assert data, "the browser has gone"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def show(self, path: Path, *, width: int, height: int = 900, scheme: Literal["light", "dark"] = "light") -> None:
        """Open a page and wait until its charts are drawn."""
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.documentElement?.dataset.ready === 'true'")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not self.ask(condition):
            assert time.monotonic() < deadline, (condition, self.complaints())
            time.sleep(0.05)

    def ask(self, expression: str) -> Any:
        """Return the value of an expression of the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """Press and let go of a key."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def complaints(self) -> list[str]:
        """Return everything that the browser's console has shown since the page was opened."""
        methods = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
        return [json.dumps(event) for event in self.events if event.get("method") in methods]

    def requested(self) -> list[str]:
        """Return the addresses that were asked for since the page was opened."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write what is to be seen as a PNG file, the whole page or the window."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Start a browser with a fresh profile, and end it."""
    to_read, send = os.pipe()
    receive, to_write = os.pipe()
    # The browser reads commands from descriptor 3 and writes answers to 4.
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in (to_read, to_write)]
    place = "import os, sys; [os.dup2(int(sys.argv[at]), at + 2) for at in (1, 2)]; os.execv(sys.argv[3], sys.argv[3:])"
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            place,
            *map(str, high),
            CHROMIUM,
            *_OPTIONS,
            f"--user-data-dir={profile}",
            "about:blank",
        ],
        pass_fds=high,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for descriptor in (to_read, to_write, *high):
        os.close(descriptor)
    try:
        yield Page(send, receive)
    finally:
        os.close(send)
        os.close(receive)
        process.terminate()
        process.wait(timeout=20)
