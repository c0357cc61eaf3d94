"""A headless Chromium, driven by the DevTools protocol over a pair of pipes: no port is opened and no package is needed."""

import json
import os
import select
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update
--disable-sync --disable-dev-shm-usage --disable-extensions --disable-breakpad --mute-audio --hide-scrollbars --remote-debugging-pipe"""
PATIENCE = 120.0
"""Seconds for any one answer; the machine may be busy."""


def find_browser() -> str | None:
    return next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)


class Browser:
    """One process and one tab. `events` holds everything that the tab reports: console, exceptions, requests."""

    def __init__(self, program: str, directory: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        moves = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'  # the protocol's descriptors
        command = ["bash", "-c", moves, program, *FLAGS.split(), f"--user-data-dir={directory / 'profile'}", "about:blank"]
        with (directory / "browser.log").open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                pass_fds=(to_read, to_write),
                env={**os.environ, "HOME": str(directory)},
                start_new_session=True,
            )
        os.close(to_read), os.close(to_write)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        try:
            self._attach()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attach(self) -> None:
        pages = [target for target in self.ask("Target.getTargets")["targetInfos"] if target["type"] == "page"]
        target = pages[0]["targetId"] if pages else self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to one command; what is reported meanwhile goes to `events`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while True:
            found = self._next(deadline)
            if found.get("id") == self._number:
                assert "error" not in found, f"{method}: {found['error']}"
                return dict(found["result"])
            self.events.append(found)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0], "the browser does not answer"
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser has ended"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def open(self, page: Path, *, width: int = 1200, height: int = 900, dense: float = 1, scheme: str = "light") -> None:
        """Show a file, and wait until it is there."""
        self.look(width, height, dense, scheme)
        self.events.clear()
        self.ask("Page.navigate", url=page.as_uri())
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")

    def look(self, width: int, height: int, dense: float = 1, scheme: str = "light") -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=dense, mobile=False)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def value(self, expression: str) -> Any:
        """What an expression is in the page, or its promise becomes; an exception there is one here."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.value(expression):
            assert time.monotonic() < deadline, f"in vain: {expression}"
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """A true click in the middle of an element."""
        place = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{place}.scrollIntoView({{block: 'center'}})")
        x, y = self.value(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({place}.getBoundingClientRect())")
        self.click_at(x, y)

    def click_at(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, *, shift: bool = False) -> None:
        code = {" ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}.get(key, ord(key[0]))
        more = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        text = {"text": key} if len(key) == 1 else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **more, **text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **more)

    def complaints(self) -> list[str]:
        """Everything that the page said on its console or that the browser said about it."""
        names = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event)[:500] for event in self.events if event.get("method") in names]

    def requests(self) -> list[str]:
        """All addresses that were asked for."""
        return [event["params"]["request"]["url"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]

    def close(self) -> None:
        """End the process that was started, and those that it started."""
        with suppress(OSError):
            os.close(self._write)  # the browser exits when the pipe is closed
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read)
