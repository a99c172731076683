"""A real server on a loopback port: the official client, clients that go away, the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import openai
import pytest

from tests.serving.fake import FakeEngine
from twofold.serving.app import Server, serve


@dataclass
class Running:
    url: str
    engine: FakeEngine
    server: Server
    thread: threading.Thread

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def active(self) -> int:
        return int(httpx.get(f"{self.url}/health").json()["active_requests"])


def start(engine: FakeEngine) -> Running:
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(engine)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    until(lambda: server.started, 10)
    return Running(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, server, thread)


def until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    found = start(FakeEngine(cycle_s=0.001))
    yield found
    found.server.should_exit = True
    found.thread.join(10)
    assert not found.thread.is_alive()


def test_the_official_client_chats(running: Running) -> None:
    answer = running.client().chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hello"}], logprobs=True
    )
    assert answer.choices[0].message.content == "re: hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 15
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert [entry.token for entry in answer.choices[0].logprobs.content] == list("re: hello")


def test_the_official_client_streams_whole_characters(running: Running) -> None:
    text = "naïve 你好 😀👩‍👩‍👧 " * 20
    stream = running.client().chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": text}],
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces = list(stream)
    given = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
    assert "".join(given) == "re: " + text
    assert not any("\ufffd" in piece for piece in given)
    assert len(given) > 50
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == len(("re: " + text).encode())


def test_the_official_client_completes(running: Running) -> None:
    client = running.client()
    answer = client.completions.create(model="fake", prompt="one two", stop="two")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("re: one ", "stop")
    pieces = client.completions.create(model="fake", prompt="one two", max_tokens=6, stream=True)
    found = [piece.choices[0] for piece in pieces]
    assert "".join(piece.text for piece in found) == "re: on"
    assert found[-1].finish_reason == "length"
    assert [model.id for model in client.models.list()] == ["fake"]


def test_the_official_client_understands_refusals(running: Running) -> None:
    client = running.client()
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'") as caught:
        client.completions.create(model="gpt", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="n is not supported") as refused:
        client.completions.create(model="fake", prompt="x", n=2)
    assert refused.value.param == "n"
    with pytest.raises(openai.APIError, match="the engine failed"):
        list(client.completions.create(model="fake", prompt="fail", stream=True))


@pytest.mark.parametrize("stream", [True, False])
def test_fifty_clients_that_go_away_leave_nothing(running: Running, stream: bool) -> None:
    """llama.cpp#24496: generation must not go on after a disconnect."""
    engine = running.engine
    before, closed = len(engine.requests), engine.closed_early
    asked = {"model": "fake", "messages": [{"role": "user", "content": "forever"}], "stream": stream}

    def leave(client: httpx.Client) -> None:
        if stream:
            with client.stream("POST", url, json=asked) as reply:
                lines = reply.iter_lines()
                while '"content":"re' not in next(lines):
                    pass
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(url, json=asked, timeout=0.02)

    url = f"{running.url}/v1/chat/completions"
    with httpx.Client(timeout=10) as client:
        for _ in range(50):
            leave(client)
    until(lambda: running.active() == 0, 2)
    assert engine.running == 0
    begun = len(engine.requests) - before
    assert begun == 50 if stream else begun > 0
    assert engine.closed_early - closed == begun
    answer = running.client().completions.create(model="fake", prompt="hello")
    assert answer.choices[0].text == "re: hello"


def test_one_who_waits_and_leaves_is_never_begun(running: Running) -> None:
    engine = running.engine

    async def session() -> None:
        async with httpx.AsyncClient(base_url=running.url, timeout=10) as client:
            asked = {"model": "fake", "prompt": "forever", "max_tokens": 4000}
            first = asyncio.create_task(client.post("/v1/completions", json=asked))
            while engine.running == 0:
                await asyncio.sleep(0.002)
            begun = len(engine.requests)
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/completions", json={**asked, "prompt": "second"}, timeout=0.05)
            third = await client.post("/v1/completions", json={**asked, "prompt": "third"})
            assert third.json()["choices"][0]["text"] == "re: third"
            assert len(engine.requests) == begun + 1
            assert (await first).json()["usage"]["completion_tokens"] == 4000

    asyncio.run(session())


def test_a_reader_that_does_not_read_does_not_slow_the_engine(running: Running) -> None:
    with httpx.Client(timeout=10) as client:
        asked = {"model": "fake", "prompt": "forever", "max_tokens": 3000, "stream": True}
        with client.stream("POST", f"{running.url}/v1/completions", json=asked):
            until(lambda: running.engine.running == 1, 5)
            until(lambda: running.engine.running == 0, 10)


def test_the_end_of_the_server_ends_the_generation() -> None:
    engine = FakeEngine(cycle_s=0.005)
    running = start(engine)
    asked = {"model": "fake", "prompt": "forever", "max_tokens": 4000, "stream": True}
    with httpx.stream("POST", f"{running.url}/v1/completions", json=asked, timeout=10):
        until(lambda: engine.running == 1, 5)
        running.server.should_exit = True
        running.thread.join(5)
        assert not running.thread.is_alive()
    assert engine.running == 0
    assert engine.closed_early == 1


def test_a_port_in_use_is_one_line_before_anything_is_loaded() -> None:
    def load() -> FakeEngine:
        raise AssertionError("loaded although the port is taken")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"port {port} of 127\.0\.0\.1 is in use; choose another"):
            serve(load, host="127.0.0.1", port=port)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"cannot listen on port 8000 of nowhere\.invalid"):
        serve(load, host="nowhere.invalid", port=8000)  # type: ignore[arg-type]


SERVER = """
import sys, types
from tests.serving.fake import FakeEngine
from twofold import cli
commands = types.ModuleType("twofold.pipeline.commands")
commands.load_engine = lambda *_: FakeEngine(cycle_s=0.005)
sys.modules[commands.__name__] = commands
sys.exit(cli.main(["serve", ".", "--port", "0"]))
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_answer_with_an_error_that_its_client_understands(end: signal.Signals) -> None:
    """A stream, one who waits behind it, one who reads nothing, one whose request never becomes whole."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", process.stdout.readline())
    assert found is not None
    client = openai.OpenAI(base_url=found[0], api_key="none", max_retries=0, timeout=60)
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as sockets:
        stream = client.completions.create(model="fake", prompt="forever", max_tokens=4000, stream=True)
        next(iter(stream))
        waiting = pool.submit(client.completions.create, model="fake", prompt="hello")
        for body in (json.dumps({"model": "fake", "prompt": "forever", "stream": True}), "{"):
            raw = sockets.enter_context(socket.create_connection(("127.0.0.1", int(found[1]))))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {max(9, len(body))}\r\n\r\n"
            raw.sendall((head + body).encode())
        until(lambda: httpx.get(found[0].replace("/v1", "/health")).json()["active_requests"] == 3, 30)
        process.send_signal(end)
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="the server is shutting down") as refused:
            waiting.result()
        assert refused.value.status_code == 503
        assert process.wait(30) == (130 if end == signal.SIGINT else -end)
    assert process.stderr is not None
    assert process.stderr.read() == ""
