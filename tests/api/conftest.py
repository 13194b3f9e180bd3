from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
from aiohttp import web

from tokenbus.core.api import admin, misc
from tokenbus.core.api.app import Routes, make_app
from tokenbus.core.api.auth import Gate
from tokenbus.core.api.connection import make_runner
from tokenbus.core.bus import Bus
from tokenbus.core.config import Config, from_mapping
from tokenbus.core.experiments.controller import Experiments
from tokenbus.core.experiments.engines import engine_configs, experiment_with_engines
from tokenbus.core.front.chat import ChatTemplate
from tokenbus.core.front.events import FeatureChange, RequestRecord, RequestRefused
from tokenbus.core.front.service import Service
from tokenbus.core.host import PluginHost, make_host

sys.path.insert(0, str(Path(__file__).parent))  # the kits


def _sibling(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"tokenbus_api_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake = _sibling("fake")
tiny = _sibling("tiny_tokenizer")
demo = _sibling("demo_process")


@dataclass
class Answer:
    status: int
    headers: Any
    body: Any
    """Decoded JSON."""

    @property
    def choice(self) -> dict[str, Any]:
        assert self.status == 200, self.body
        return self.body["choices"][0]

    @property
    def text(self) -> str:
        return self.choice["text"] if "text" in self.choice else self.choice["message"]["content"]

    @property
    def error(self) -> dict[str, Any]:
        assert self.status >= 400, self.body
        assert self.body.keys() == {"error"}
        return self.body["error"]


@dataclass
class Events:
    status: int
    headers: Any
    chunks: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    def text(self, index: int = 0) -> str:
        return "".join(self.deltas(index))

    def deltas(self, index: int = 0) -> list[str]:
        found = []
        for chunk in self.chunks:
            for choice in chunk.get("choices", ()):
                if choice["index"] == index:
                    text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                    found.append(text)
        return found

    def reasons(self, index: int = 0) -> list[str | None]:
        return [c["finish_reason"] for chunk in self.chunks for c in chunk.get("choices", ()) if c["index"] == index]


class ApiClient:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session

    async def call(self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, **options: Any) -> Answer:
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        async with self.session.request(method, self.url + path, data=data, **options) as response:
            text = await response.read()
            return Answer(response.status, response.headers, json.loads(text) if text else None)

    async def complete(self, prompt: Any = "abc", *, headers: Any = None, **fields: Any) -> Answer:
        return await self.call("POST", "/v1/completions", {"prompt": prompt, **fields}, headers=headers)

    async def chat(self, messages: Any = "hi", *, headers: Any = None, **fields: Any) -> Answer:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return await self.call("POST", "/v1/chat/completions", {"messages": messages, **fields}, headers=headers)

    async def stream(self, path: str, body: dict[str, Any]) -> Events:
        async with self.session.post(f"{self.url}{path}", json={**body, "stream": True}) as response:
            events = Events(response.status, response.headers)
            async for line in response.content:
                if not line.strip() or line.startswith(b":"):  # a comment: the answer is late
                    continue
                assert line.startswith(b"data: ") or response.status != 200, line
                if line == b"data: [DONE]\n":
                    assert not events.done
                    events.done = True
                else:
                    assert not events.done
                    events.chunks.append(json.loads(line.removeprefix(b"data: ")))
            return events

    async def stream_completion(self, prompt: Any = "abc", **fields: Any) -> Events:
        return await self.stream("/v1/completions", {"prompt": prompt, **fields})

    async def stream_chat(self, messages: Any = "hi", **fields: Any) -> Events:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return await self.stream("/v1/chat/completions", {"messages": messages, **fields})

    async def until(self, condition: Any) -> None:
        with anyio.fail_after(5):
            while not condition():  # noqa: ASYNC110 - any condition, of objects that signal nothing
                await anyio.sleep(0.001)


class Harness(ApiClient):
    """A server over the fake engine, and a client of it."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, service: Service, engine: Any, engines: dict[str, Any]
    ) -> None:
        super().__init__(url, session)
        self.service, self.engine = service, engine
        self.engines = engines
        """By arm, for an experiment whose arms have engines of their own."""
        self.tokenizer = service.tokenizer
        self.records: list[RequestRecord] = []
        self.refusals: list[RequestRefused] = []
        self.changes: list[FeatureChange] = []
        service.bus.listen(self.records.append, RequestRecord)
        service.bus.listen(self.refusals.append, RequestRefused)
        service.bus.listen(self.changes.append, FeatureChange)

    def outputs(self, texts: str) -> None:
        """Every request is answered with this text, then the end token."""
        ids = self.tokenizer.encode_now(texts, add_special_tokens=False)
        self.engine.answer = lambda admitted: ids

    async def check_well(self) -> None:
        """One plain request gets its expected text: nothing before has left a trace."""
        self.engine.resume()
        self.engine.fail_after.clear()
        self.engine.answer = lambda admitted: list(admitted.prompt)
        assert (await self.complete("plain request", temperature=0)).text == "plain request"
        assert self.engine.open == {}


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny.tiny_tokenizer()


@pytest.fixture(scope="session")
def bos_tokenizer() -> Any:
    return tiny.tiny_tokenizer(adds_bos=True)


@pytest.fixture(scope="session")
def special_tokenizer() -> Any:
    """With a control token that begins tool calls."""
    return tiny.tiny_tokenizer(special=("[TOOL_CALLS]",))


@pytest.fixture(scope="session")
def serve(tokenizer: Any, anyio_backend: str) -> Any:
    """`async with serve(settings, tokenizer=..., template=...) as harness`."""
    default = tokenizer

    @asynccontextmanager
    async def start(
        settings: dict[str, Any] | None = None,
        *,
        tokenizer: Any = None,
        template: str | None = tiny.TEMPLATE,
        vocab_size: int = 261,
    ) -> AsyncIterator[Harness]:
        tokenizer = tokenizer or default
        config = from_mapping(settings or {}, "test")
        host, bus = make_host("front", config), Bus()
        eos = tokenizer.markers[tiny.END]

        def fake_engine(config: Config, host: PluginHost, bus: Bus, main: bool = True) -> Any:
            switches = host.start_switches(config.features.enable, config.features.disable)
            sizes = {"vocab_size": vocab_size, "max_model_len": 512, "eos": eos}
            return fake.FakeEngineClient(config, bus, host, switches, **sizes, main=main)

        engine, engines = fake_engine(config, host, bus), {}
        if (own := experiment_with_engines(config)) is not None:
            configs = engine_configs(own, config, host)
            control = config.experiments[own].control_arm
            engines = {
                arm: fake_engine(one, make_host("front", one), Bus(), main=arm == control) for arm, one in configs.items()
            }
            engine = engines[control]
            config, host, bus = engine.config, engine.host, engine.bus
        made = None if template is None else ChatTemplate(template, tokenizer)
        experiments = Experiments(config, host, engine, bus, engines=engines)
        service = Service(
            config,
            host,
            engine,
            bus,
            model_name="tiny",
            tokenizer=tokenizer,
            template=made,
            experiments=experiments,
            engines=engines,
        )
        routes = Routes(service)
        misc.add_routes(routes)
        admin.add_routes(routes)
        app = make_app(service, routes, Gate(config.server))
        runner = make_runner(app, 0.1)
        async with anyio.create_task_group() as tasks:
            for one in engines.values() or (engine,):
                await tasks.start(one.run)
            await tasks.start(experiments.run)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            async with aiohttp.ClientSession() as session:
                yield Harness(url, session, service, engine, engines)
            await runner.cleanup()
            service.close()
            tasks.cancel_scope.cancel()

    return start


@pytest.fixture
async def api(serve: Any) -> AsyncIterator[Harness]:
    async with serve() as harness:
        yield harness


class DemoClient(ApiClient):
    """A client of a real server with the demo model."""

    async def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        async with self.session.get(self.url + "/metrics") as response:
            text = await response.text()
        values = [line.rpartition(" ")[2] for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
        assert values, name
        return sum(map(float, values))

    async def check_well(self) -> None:
        answer = await self.complete("1, 2, 3, 4,", temperature=0, max_tokens=3)
        assert answer.text == " 5,"


@pytest.fixture(scope="session")
def demo_server() -> Iterator[Any]:
    """`tokenbus serve` with the demo model in fp32, context 512, in a process of its own."""
    with demo.serve_demo() as server:
        yield server


@pytest.fixture
async def client_of(anyio_backend: str) -> AsyncIterator[Any]:
    """A function from a server process to a client of it."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=100)) as session:
        yield lambda server: DemoClient(server.url, session)


@pytest.fixture(scope="session")
def serve_demo() -> Any:
    """`with serve_demo(*flags) as server`: one more server, with other settings."""
    return demo.serve_demo
