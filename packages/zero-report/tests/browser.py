"""A headless Chromium, driven by its DevTools protocol: what a page logs, asks for and draws."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
_START_SECONDS = 30.0


class Browser:
    """One browser with one page. ``messages``: errors, exceptions and blocked things; ``requests``: addresses."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0"]
        flags += ["--disable-dev-shm-usage", "--disable-extensions", "--hide-scrollbars", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [CHROMIUM, *flags, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._open = ExitStack()
        self._socket = self._connect(profile / "DevToolsActivePort")
        self._number = 0
        self._session = ""
        self.messages: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._page = self._attach(target, "Page", "Runtime", "Log", "Network")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        self._process.terminate()
        self._process.wait()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; events that come meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._socket.send(json.dumps({**message, "sessionId": self._session} if self._session else message))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file and wait until it has drawn itself."""
        self.messages.clear()
        self.requests.clear()
        self._session = self._page
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.as_uri())
        self.until("document.documentElement?.dataset.ready === 'true'")

    def enter_frame(self) -> None:
        """Go on in the page's sandboxed frame, which is a target of its own, until the next `open`."""
        end = time.monotonic() + _START_SECONDS
        while not (found := self.call("Target.getTargets", filter=[{"type": "iframe"}])["targetInfos"]):
            assert time.monotonic() < end, "the page has no frame of its own process"
            time.sleep(0.05)
        self._attach(found[0]["targetId"], "Runtime", "Log")
        self.until("document.documentElement?.dataset.ready === 'true'")

    def resize(self, width: int, height: int) -> None:
        """Give the window a size, in pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def evaluate(self, expression: str) -> Any:
        """Return the plain value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = 20.0) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < end, f"not true in {seconds} s: {expression}; {self.messages}"
            time.sleep(0.05)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key."""
        codes = {
            "Tab": 9,
            "Enter": 13,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
            "Home": 36,
            "End": 35,
        }
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes.get(key, 0),
                text=text if kind == "keyDown" else "",
                modifiers=8 if shift else 0,
            )

    def type(self, text: str) -> None:
        """Type text into what has the focus."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _attach(self, target: str, *domains: str) -> str:
        """Send further calls to a target, enable these domains of its events, and return the session."""
        self._session = ""
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in domains:
            self.call(f"{domain}.enable")
        return self._session

    def _note(self, event: dict[str, Any]) -> None:
        handlers: dict[str, Callable[[dict[str, Any]], None]] = {
            "Log.entryAdded": lambda p: self.messages.append(f"{p['entry']['level']}: {p['entry']['text']}"),
            "Runtime.exceptionThrown": lambda p: self.messages.append(f"exception: {p['exceptionDetails']}"),
            "Runtime.consoleAPICalled": lambda p: self.messages.append(f"console: {p['type']}: {p['args']}"),
            "Network.requestWillBeSent": lambda p: self.requests.append(p["request"]["url"]),
        }
        handler = handlers.get(event.get("method", ""))
        if handler is not None:
            handler(event["params"])

    def _connect(self, port_file: Path) -> ClientConnection:
        end = time.monotonic() + _START_SECONDS
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert time.monotonic() < end and self._process.poll() is None, "the browser did not start"
            time.sleep(0.05)
        port, path = port_file.read_text().split("\n")[:2]
        return self._open.enter_context(connect(f"ws://127.0.0.1:{port}{path}", max_size=None))
