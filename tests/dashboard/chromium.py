"""A small client of headless Chromium (its DevTools protocol over a web socket): enough to load a page, look at it, and press keys."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions", "--no-first-run",
    "--disable-background-networking", "--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-port=0",
)  # fmt: skip
KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), " ": (32, " "), "ArrowDown": (40, ""), "End": (35, "")}


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._session = ""
        self._ids = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.problems: list[str] = []
        """Console errors and exceptions of the page, and what its content security policy refused."""

    async def open(self) -> None:
        target = await self.send("Target.createTarget", url="about:blank")
        attached = await self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.send(f"{domain}.enable")

    async def listen(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                if not (answer := self._answers.pop(data["id"])).done():  # it is when whoever asked has given up
                    answer.set_result(data)
            elif data["method"] == "Runtime.exceptionThrown":
                details = data["params"]["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description") or details["text"])
            elif data["method"] == "Log.entryAdded" and data["params"]["entry"]["level"] == "error":
                entry = data["params"]["entry"]
                self.problems.append(f"{entry['text']} {entry.get('url', '')}")
            elif data["method"] == "Runtime.consoleAPICalled" and data["params"]["type"] in {"error", "assert"}:
                self.problems.append(str(data["params"]["args"]))

    async def send(self, method: str, **params: Any) -> Any:
        self._ids += 1
        answer = self._answers[self._ids] = asyncio.get_running_loop().create_future()
        message: dict[str, Any] = {"id": self._ids, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        await self._socket.send_str(json.dumps(message))
        data = await answer
        assert "error" not in data, data
        return data["result"]

    async def size(self, width: int, height: int) -> None:
        await self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    async def scheme(self, value: str) -> None:
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    async def go(self, url: str) -> None:
        """Until it is loaded."""
        result = await self.send("Page.navigate", url=url)
        assert "errorText" not in result, result
        await self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    async def eval(self, code: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        result = await self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, code: str, seconds: float = 30) -> Any:
        """The expression's value once it is true."""
        value = None
        with anyio.move_on_after(seconds):
            while not (value := await self.eval(code)):  # noqa: ASYNC110 - of a page, which signals nothing
                await anyio.sleep(0.05)
        assert value, f"never true: {code}; the page's state: {await self.text('state')}; {self.problems}"
        return value

    async def text(self, element_id: str) -> str:
        return await self.eval(f"document.getElementById({element_id!r}).textContent")

    async def press(self, key: str) -> None:
        code, text = KEYS[key]
        common = {"key": key, "windowsVirtualKeyCode": code}
        await self.send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    async def type(self, text: str) -> None:
        await self.send("Input.insertText", text=text)

    async def screenshot(self, path: Path) -> bytes:
        data = base64.b64decode((await self.send("Page.captureScreenshot", format="png"))["data"])
        path.write_bytes(data)  # noqa: ASYNC240 - nothing else runs
        return data


@asynccontextmanager
async def open_tab(program: str, folder: Path) -> AsyncIterator[Tab]:
    """folder: for the browser's profile."""
    command = [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        told = folder / "DevToolsActivePort"
        with anyio.fail_after(60):
            while not told.exists() or told.read_text().count("\n") < 1:
                assert process.poll() is None, "the browser has ended"
                await anyio.sleep(0.05)
        port, path = told.read_text().split("\n")[:2]
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"ws://127.0.0.1:{port}{path}", max_msg_size=0) as socket,
        ):
            tab = Tab(socket)
            listening = asyncio.create_task(tab.listen())
            try:
                await tab.open()
                yield tab
            finally:
                listening.cancel()
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
