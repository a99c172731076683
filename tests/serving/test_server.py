"""A real server on a loopback port: the official client, clients that go away, the end."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import openai
import pytest
import uvicorn

from tests.serving.fake import FakeEngine
from twofold.serving.app import create_app, serve


@dataclass
class Running:
    url: str
    engine: FakeEngine
    server: uvicorn.Server
    thread: threading.Thread

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)

    def active(self) -> int:
        return int(httpx.get(f"{self.url}/health").json()["active_requests"])


def start(engine: FakeEngine) -> Running:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        create_app(engine),  # type: ignore[arg-type]
        log_level="warning",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
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
