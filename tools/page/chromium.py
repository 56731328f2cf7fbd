"""Drives a headless Chromium over its DevTools protocol, for the tests and pictures of the web page.

The protocol goes through two pipes (`--remote-debugging-pipe`: JSON texts that end with a zero byte), so that
neither a port nor a library is needed. What a user does is done as a user does it: the mouse is pressed
where an element is, and keys in whatever has the focus.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
WAIT_S: Final = 60.0
"""How long anything is waited for. A machine with much else to do may be slow."""
_FLAGS: Final = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",  # nothing is asked of the network but the page
    "--disable-component-update",
    "--disable-sync",
    "--disable-gpu",
    "--disable-dev-shm-usage",  # containers have little of it
    "--font-render-hinting=none",
    "--hide-scrollbars",
    "--use-mock-keychain",
)
_KEYS: Final = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32, "ArrowDown": 40, "ArrowRight": 39}


class BrowserError(RuntimeError):
    """The browser refused a command, or what was waited for did not come."""


def find_chromium() -> str | None:
    """Return the path of the browser; None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Chromium:
    """A browser with a profile of its own."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="penstock-chromium-", ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The browser reads from 3 and writes to 4. Numbers far above these cannot be overwritten while the
        # shell moves them there.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]
        flags = [*_FLAGS, f"--user-data-dir={self._profile.name}"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # Chromium refuses root otherwise, and containers are root
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{high[0]} 4>&{high[1]}', program, *flags, "about:blank"],
            pass_fds=high,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        self._ids = itertools.count(1)
        self._rest = b""
        self._tabs: dict[str, Tab] = {}
        self._answers: dict[int, dict[str, Any]] = {}

    def close(self) -> None:
        """End the browser."""
        with contextlib.suppress(BrowserError, OSError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def call(
        self, method: str, params: Mapping[str, Any] | None = None, session: str | None = None
    ) -> dict[str, Any]:
        """Run one command of the protocol, and return its result."""
        number = next(self._ids)
        command: dict[str, Any] = {"id": number, "method": method, "params": params or {}}
        if session is not None:
            command["sessionId"] = session
        data = json.dumps(command).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        deadline = time.monotonic() + WAIT_S
        while number not in self._answers:
            self._receive(deadline, method)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self, deadline: float, method: str) -> None:
        if not select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise BrowserError(f"{method}: the browser did not answer in {WAIT_S:g} s")
        data = os.read(self._in, 1 << 20)
        if not data:
            raise BrowserError(f"{method}: the browser has ended")
        *texts, self._rest = (self._rest + data).split(b"\0")
        for text in texts:
            message = json.loads(text)
            if "id" in message:
                self._answers[message["id"]] = message
            elif tab := self._tabs.get(message.get("sessionId", "")):
                tab.happened(message["method"], message["params"])

    @contextlib.contextmanager
    def tab(
        self,
        *,
        width: int = 1280,
        height: int = 800,
        dark: bool = False,
        touch: bool = False,
        scale: float = 1.0,
        reduced_motion: bool = True,
    ) -> Iterator[Tab]:
        """Open a tab that shares neither storage nor cache with others. Sizes are in CSS pixels."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", {"url": "about:blank", "browserContextId": context})
        attached = self.call("Target.attachToTarget", {"targetId": target["targetId"], "flatten": True})
        tab = Tab(self, attached["sessionId"])
        self._tabs[attached["sessionId"]] = tab
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.size(width, height, scale=scale, touch=touch)
        features = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce" if reduced_motion else "no-preference",
        }
        pairs = [{"name": name, "value": value} for name, value in features.items()]
        tab.call("Emulation.setEmulatedMedia", {"features": pairs})
        tab.call("Emulation.setFocusEmulationEnabled", {"enabled": True})
        try:
            yield tab
        finally:
            self.call("Target.disposeBrowserContext", {"browserContextId": context})
            del self._tabs[attached["sessionId"]]


class Tab:
    """One page, and what a user does on it. Elements are named by CSS selectors."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser = browser
        self._session = session
        self.complaints: list[str] = []
        """Uncaught errors, and what the browser logged as an error, such as a violated policy."""
        self.asked: list[str] = []
        """The address of every request that the page made."""

    def call(self, method: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Run one command of the protocol, for this tab."""
        return self._browser.call(method, params, self._session)

    def happened(self, method: str, params: Mapping[str, Any]) -> None:
        """Note an event of the protocol."""
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    def size(self, width: int, height: int, *, scale: float = 1.0, touch: bool = False) -> None:
        """Make the window this large, in CSS pixels, on a screen with `scale` pixels for each."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": touch}
        self.call("Emulation.setDeviceMetricsOverride", metrics)
        self.call("Emulation.setTouchEmulationEnabled", {"enabled": touch})

    def open(self, url: str) -> None:
        """Go to an address, and wait until the page has loaded."""
        self.call("Page.navigate", {"url": url})
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page. A promise is waited for."""
        params = {"expression": script, "returnByValue": True, "awaitPromise": True, "userGesture": True}
        answer = self.call("Runtime.evaluate", params)
        if details := answer.get("exceptionDetails"):
            raise BrowserError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + WAIT_S
        while not self.evaluate(f"Boolean({condition})"):
            if time.monotonic() > deadline:
                shown = self.evaluate("document.body.innerText")
                raise BrowserError(f"waited {WAIT_S:g} s for {condition}; the page shows:\n{shown}")
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """Return what a user can read of the first such element; "" where there is none."""
        found: str = self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return found

    def texts(self, selector: str) -> list[str]:
        """Return what a user can read of all such elements."""
        script = f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.innerText)"
        found: list[str] = self.evaluate(script)
        return found

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element, which must be there to be seen and not be covered."""
        one = f"document.querySelector({json.dumps(selector)})"
        self.wait(f"{one}?.checkVisibility()")
        self.evaluate(f"{one}.scrollIntoView({{block: 'nearest', behavior: 'instant'}})")
        x, y = self.evaluate(
            f"(() => {{ const box = {one}.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        hit = f"document.elementFromPoint({x}, {y})"
        if not self.evaluate(f"{one}.contains({hit}) || [...({hit}?.labels ?? [])].includes({one})"):
            raise BrowserError(f"{selector} is covered by {self.evaluate(f'{hit}?.outerHTML.slice(0, 200)')}")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            params = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", params)

    def type(self, text: str) -> None:
        """Put text into what has the focus, as a keyboard or an input method does."""
        self.call("Input.insertText", {"text": text})

    def fill(self, selector: str, text: str) -> None:
        """Replace what a field holds, and leave it."""
        self.click(selector)
        self.evaluate(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", {"text": text}) if text else self.press("Delete")
        self.evaluate("document.activeElement.blur()")

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select element by its value."""
        one = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{one}.value = {json.dumps(value)}")
        self.evaluate(f"{one}.dispatchEvent(new Event('change', {{bubbles: true}}))")

    def each(self, selector: str, expression: str) -> list[Any]:
        """Return the value of an expression on `one`, for each such element that can be seen."""
        found: list[Any] = self.evaluate(
            f"[...document.querySelectorAll({json.dumps(selector)})]"
            f".filter((one) => one.checkVisibility()).map((one) => {expression})"
        )
        return found

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key, such as "Enter" or "Tab"."""
        params: dict[str, Any] = {"key": key, "code": key, "modifiers": 8 if shift else 0}
        params["windowsVirtualKeyCode"] = {**_KEYS, "Delete": 46}[key]
        text = {"Enter": "\r", " ": " "}.get(key)
        self.call("Input.dispatchKeyEvent", {"type": "keyDown", **params} | ({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", {"type": "keyUp", **params})

    def save_picture(self, path: Path) -> None:
        """Write what the window shows into a file, as WebP."""
        # Two frames later everything that was asked for has been drawn.
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        shot = self.call("Page.captureScreenshot", {"format": "webp", "quality": 90})
        path.write_bytes(base64.b64decode(shot["data"]))
