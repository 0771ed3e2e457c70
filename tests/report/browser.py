"""A headless Chromium, spoken to by WebDriver over plain http; nothing to install but Debian's two packages."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]
START_SECONDS = 60
ANSWER_SECONDS = 100


def missing_programs() -> list[str]:
    return [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]


class Browser:
    """One session of a driver that runs already."""

    def __init__(self, address: str, profile: Path) -> None:
        self.address = address
        wanted = {
            "browserName": "chrome",
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            "goog:chromeOptions": {
                "binary": shutil.which("chromium"),
                "args": [*FLAGS, f"--user-data-dir={profile}"],
            },
        }
        self.session = ""
        answer = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{answer['sessionId']}"
        self._ask("POST", "/timeouts", {"script": 1000 * ANSWER_SECONDS, "pageLoad": 1000 * ANSWER_SECONDS})

    def open(self, path: Path) -> None:
        self._ask("POST", "/url", {"url": path.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait_for(self, script: str, *arguments: Any) -> Any:
        """Run a script until it returns something true; the driver's own limit ends a hopeless wait."""
        waiting = """
            const [source, given, done] = arguments;
            const ask = new Function(source);
            const look = () => { const value = ask(...given); value ? done(value) : setTimeout(look, 20); };
            look();
        """
        return self._ask("POST", "/execute/async", {"script": waiting, "args": [script, list(arguments)]})

    def emulate(self, width: int, height: int, scale: float = 1, dark: bool | None = None) -> None:
        """Give the page a size (windows cannot be as narrow as a phone), and a system theme."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", size)
        if dark is not None:
            feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            self._devtools("Emulation.setEmulatedMedia", {"features": [feature]})

    def log(self, kind: str) -> list[dict[str, Any]]:
        return self._ask("POST", "/se/log", {"type": kind})

    def requests(self) -> list[str]:
        """Return the addresses that were asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def close(self) -> None:
        self._ask("DELETE", "")

    def _devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _ask(self, verb: str, path: str, values: dict[str, Any] | None = None) -> Any:
        body = None if values is None else json.dumps(values).encode()
        request = urllib.request.Request(
            self.address + self.session + path, body, {"Content-Type": "application/json"}, method=verb
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS + 20) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise RuntimeError(error.read().decode(errors="replace")[:2000]) from None


@contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder
    )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_until_ready(address)
        browser = Browser(address, folder / "profile")
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait(timeout=30)


def _wait_until_ready(address: str) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{address}/status", timeout=5) as answer:
                if json.loads(answer.read())["value"]["ready"]:
                    return
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)
