"""A headless Chromium, driven over its debugging pipe.

::

    with Browser() as browser:
        page = browser.open("http://127.0.0.1:8090")
        browser.until("document.title === 'demo'")
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shlex
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from edgefl.errors import ConfigError
from edgefl.lab.agents import find_chromium
from edgefl.system.processes import end_process

_TIMEOUT_S = 60.0
_PAUSE_S = 0.05
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync "
    "--remote-debugging-pipe about:blank"
)


class LoadedPage:
    """A page after it has loaded: the addresses of its ``requests``, and its errors as ``problems``."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.problems: list[str] = []


class Browser:
    """Chromium process. Commands go to its file descriptor 3, answers and events come from 4, each ended by a zero byte.

    Args:
        flags: more flags of its command line.
    """

    def __init__(self, *flags: str) -> None:
        self._flags = flags

    def __enter__(self) -> Browser:
        program = find_chromium()
        if program is None:
            raise ConfigError("expected Chromium, found no browser; install it (apt-get install chromium)")
        # Processes of the browser may still write for a moment when its first one has ended.
        self._folder = tempfile.TemporaryDirectory(prefix="edgefl-browser-", ignore_cleanup_errors=True)
        read, self._write = os.pipe()
        answers, write = os.pipe()
        flags = f"{shlex.join(self._flags)} {_FLAGS}"
        command = f'exec "{program}" --user-data-dir="{self._folder.name}" {flags} 3<&{read} 4>&{write}'
        self._process = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=(read, write),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._answers = os.fdopen(answers, "rb")
        self._numbers = itertools.count(1)
        self._page = LoadedPage()
        self._session = ""
        self.new_tab()  # the browser's own targets come in any order, and not each of them is a page
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)  # the browser ends with its pipe
        end_process(self._process, 60)
        self._answers.close()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        """Process id of the browser's first process."""
        return self._process.pid

    @property
    def tab(self) -> str:
        """Name of the current tab, for :meth:`to`."""
        return self._session

    def to(self, tab: str) -> None:
        """Make a tab the current one."""
        self._session = tab

    def new_tab(self) -> str:
        """Open an empty tab, which becomes the current one."""
        self._session = ""
        return self._attach(self._send("Target.createTarget", url="about:blank")["targetId"])

    def close_tab(self) -> None:
        """Close the current tab; choose another one by :meth:`to`."""
        self._send("Page.close")

    def _attach(self, target: str) -> str:
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._send(f"{domain}.enable")
        return self._session

    def open(self, place: Path | str) -> LoadedPage:
        """Load the page of a file or at an address. A change behind the # alone loads nothing."""
        self._page = LoadedPage()
        url = place if isinstance(place, str) else place.resolve().as_uri()
        loads = "loaderId" in self._send("Page.navigate", url=url)
        while loads and self._event() != "Page.loadEventFired":
            pass
        return self._page

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        found = self._send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until a JavaScript expression is truthy, and return its value."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not (value := self.value(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(_PAUSE_S)
        return value

    def type(self, text: str) -> None:
        """Send keys, one after the other, to the focused element."""
        for key in text:
            self._send("Input.dispatchKeyEvent", type="keyDown", text=key, key=key)
            self._send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def press(self, key: str, code: int) -> None:
        """Press a key that types nothing, such as Tab (9) or Enter (13)."""
        for kind in ("rawKeyDown", "char", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "char" else {}
            if kind != "char" or text:
                self._send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def choose(self, selector: str, *places: str) -> None:
        """Choose files, or a folder, in the file input that ``selector`` finds."""
        root = self._send("DOM.getDocument")["root"]["nodeId"]
        node = self._send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self._send("DOM.setFileInputFiles", nodeId=node, files=list(places))

    def screen(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """Emulate a screen of this size, in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self._send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self) -> bytes:
        """Return a screenshot as PNG."""
        return base64.b64decode(self._send("Page.captureScreenshot", format="png")["data"])

    def _send(self, method: str, **params: object) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, object] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != number:
            self._note(answer)
        assert "error" not in answer, answer
        return dict(answer["result"])

    def _event(self) -> str:
        message = self._message()
        self._note(message)
        return str(message.get("method", ""))

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self._page.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self._page.problems.append(str(params["exceptionDetails"]["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self._page.problems.append(str(params["entry"]["text"]))

    def _message(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._answers.read(1)) not in (b"\0", b""):
            data += byte
        assert data, "the browser ended"
        return dict(json.loads(data))
