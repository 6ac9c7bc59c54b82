"""A headless Chromium that a test drives through the DevTools protocol, over two pipes.

Keys and clicks are sent as a person's are. What the page logs, throws or requests is kept for the test.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.kit.waiting import DEADLINE_S, until

PROGRAMS = ("chromium-headless-shell", "chromium")
OPTIONS = (
    "--headless",
    "--no-sandbox",  # its own sandbox does not work for root, and the pages are ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-pipe",
)
CODES = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9}


def program() -> str | None:
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


@dataclass
class Page:
    to: int
    answers: int
    session: str = ""
    number: int = 0
    buffer: bytes = b""
    problems: list[str] = field(default_factory=list)
    """Exceptions, errors and warnings of the console, and what a policy refused."""
    requests: list[str] = field(default_factory=list)

    def call(self, method: str, **parameters: object) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _receive(self) -> dict:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.answers], [], [], DEADLINE_S)
            data = os.read(self.answers, 1 << 16) if ready else b""
            assert data, "the browser does not answer"
            self.buffer += data
        text, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(text)

    def _note(self, event: dict) -> None:
        what, about = event.get("method"), event.get("params", {})
        if what == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif what == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(about["exceptionDetails"])[:1000])
        elif what == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(about["args"])[:1000])
        elif what == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.problems.append(about["entry"]["text"])

    def ask(self, expression: str) -> object:
        """The value of an expression, which may be a promise."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        until(lambda: self.ask(expression), f"{expression} to be true")

    def visit(self, path: Path, place: str = "") -> None:
        self.call("Page.navigate", url=f"{path.as_uri()}{place}")
        shown = f"document.getElementById('main')?.dataset.place === {json.dumps(place)}"
        self.wait(f"document.readyState === 'complete' && {shown}")

    def click(self, selector: str, number: int = 0) -> None:
        """Press the mouse in the middle of an element, when it has come to rest."""
        self.wait(f"document.querySelectorAll({json.dumps(selector)}).length > {number}")
        place = self.ask(
            "(async () => {let before = null; for (;;) {"
            f"const e = document.querySelectorAll({json.dumps(selector)})[{number}];"
            "if (!e) return null; e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "await new Promise(requestAnimationFrame); await new Promise(requestAnimationFrame);"
            "const b = e.getBoundingClientRect(), at = [b.left + b.width / 2, b.top + b.height / 2];"
            "if (before && before.join() === at.join()) return at; before = at}})()"
        )
        assert place, f"nothing is at {selector}[{number}]"
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1
            )

    def press(self, *keys: str) -> None:
        for key in keys:
            code = CODES.get(key, ord(key.upper()) if key.isalnum() and len(key) == 1 else 0)
            about = {"key": key, "windowsVirtualKeyCode": code}
            about |= {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", **about)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def look(self, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Make the window so large, on a light or a dark screen."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        preference = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[preference])

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser() -> Iterator[Page]:
    """Start a browser with one tab; it ends with the block."""
    name = program()
    assert name is not None
    # The ends that it gets are above 20, so that 3 and 4 are free for it.
    (low, to), (answers, other) = os.pipe(), os.pipe()
    read_to, write_answers = (fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (low, other))
    os.close(low)
    os.close(other)
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as home:
        # It reads commands from descriptor 3 and answers on 4.
        line = ["bash", "-c", f'exec "$@" 3<&{read_to} 4>&{write_answers}', "bash", name]
        running = subprocess.Popen(
            [*line, *OPTIONS, f"--user-data-dir={home}", "about:blank"],
            pass_fds=(read_to, write_answers),
            env={**os.environ, "HOME": home},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_to)
        os.close(write_answers)
        page = Page(to, answers)
        try:
            target = page.call("Target.createTarget", url="about:blank")["targetId"]
            page.session = page.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                page.call(f"{domain}.enable")
            yield page
            page.session = ""
            page.call("Browser.close")
        finally:
            if running.poll() is None:
                running.terminate()
            running.wait(DEADLINE_S)
            os.close(to)
            os.close(answers)
