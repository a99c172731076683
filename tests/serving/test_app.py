"""The application without a network: routes, formats, and errors, over an engine that echoes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.serving.fake import CONTEXT, ByteTokenizer, FakeEngine
from twofold.serving.app import create_app

Session = Callable[[httpx.AsyncClient], Awaitable[Any]]


def talk(session: Session, engine: FakeEngine | None = None) -> Any:
    """Runs a session with a client of an application of its own."""

    async def run() -> Any:
        transport = httpx.ASGITransport(create_app(engine or FakeEngine()))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await session(client)

    return asyncio.run(run())


def post(path: str, engine: FakeEngine | None = None, **fields: Any) -> httpx.Response:
    return talk(lambda client: client.post(path, json={"model": "fake", **fields}), engine)


def chat(content: Any, engine: FakeEngine | None = None, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": content}]
    return post("/v1/chat/completions", engine, messages=messages, **fields)


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_request_may_be_as_large_as_its_context_needs() -> None:
    most = 2**20 + 64 * CONTEXT

    async def parts(size: int) -> AsyncIterator[bytes]:
        for _ in range(size // 2**14):
            yield b" " * 2**14

    async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
        sent = [parts(most), parts(most + 2**14), b" " * (most + 1)]  # in chunks there is no Content-Length
        return [await client.post("/v1/completions", content=content) for content in sent]

    whole, *larger = talk(ask)
    assert (whole.status_code, whole.json()["error"]["message"][:23]) == (400, "the body is not JSON (E")
    for refused in larger:
        assert refused.status_code == 413
        assert refused.json()["error"]["message"] == f"the body is larger than {most} bytes; shorten the request"


def test_what_nobody_foresaw_is_told_as_an_error_of_the_api() -> None:
    class Broken(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            raise LookupError("a defect")

    engine = FakeEngine()
    engine.tokenizer = Broken()
    transport = httpx.ASGITransport(create_app(engine), raise_app_exceptions=False)  # type: ignore[arg-type]

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/v1/completions", json={"model": "fake", "prompt": "hello"})

    answer = asyncio.run(ask())
    assert answer.status_code == 500
    message = "the server failed; its log says why"
    assert answer.json()["error"] == {"message": message, "type": "server_error", "param": None, "code": None}


def test_a_whole_answer() -> None:
    answer = chat("hello").json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "fake"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "re: hello"}
    assert choice["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 9, "total_tokens": 15}
    assert answer["twofold"]["accept_length"] == 9 / answer["twofold"]["cycles"]


def test_a_completion_of_a_text_and_of_ids() -> None:
    for prompt in ("hello", list(b"hello"), ["hello"]):
        answer = post("/v1/completions", prompt=prompt).json()
        assert answer["object"] == "text_completion"
        assert answer["choices"][0]["text"] == "re: hello"
        assert answer["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_says_the_same_as_the_whole(path: str) -> None:
    text = "naïve 你好 😀👩‍👩‍👧 " * 9
    asked = {"messages": [{"role": "user", "content": text}], "prompt": text, "max_tokens": 999}
    whole = post(path, **asked).json()
    engine = FakeEngine()
    pieces = chunks(post(path, engine, **asked, stream=True, stream_options={"include_usage": True}))
    *rest, usage = pieces
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert all(piece["usage"] is None for piece in rest)
    assert len({piece["id"] for piece in pieces}) == 1
    texts = [
        piece["choices"][0]["delta"]["content"] if "chat" in path else piece["choices"][0]["text"] for piece in rest
    ]
    assert "".join(texts) == "re: " + text
    assert "\ufffd" not in "".join(texts)
    assert [piece["choices"][0]["finish_reason"] for piece in rest] == [None] * (len(rest) - 1) + ["stop"]
    if "chat" in path:
        assert rest[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert rest[-1]["twofold"]["cycles"] == whole["twofold"]["cycles"]


def test_without_include_usage_there_is_none() -> None:
    pieces = chunks(chat("hello", stream=True))
    assert all("usage" not in piece for piece in pieces)


def test_stop_strings_end_the_text_and_the_count() -> None:
    answer = chat("one two three", stop=["two", "three"]).json()
    assert answer["choices"][0]["message"]["content"] == "re: one "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len("re: one ")
    pieces = chunks(chat("one two three", stop="two", stream=True))
    assert "".join(piece["choices"][0]["delta"]["content"] for piece in pieces) == "re: one "


@pytest.mark.parametrize("limit", [1, 2, 5, 9])
def test_max_tokens_are_kept_to_the_token(limit: int) -> None:
    answer = chat("hello, you", max_tokens=limit).json()
    assert answer["usage"]["completion_tokens"] == limit
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"] == "re: hello, you"[:limit]


def test_logprobs_are_one_a_token() -> None:
    def check(entries: list[dict[str, Any]]) -> None:
        assert [entry["logprob"] for entry in entries] == [-token / 256 for token in "re: é".encode()]
        assert [entry["bytes"] for entry in entries][3:] == [[32], None, None]
        assert all(entry["top_logprobs"] == [] for entry in entries)

    check(chat("é", logprobs=True).json()["choices"][0]["logprobs"]["content"])
    pieces = [piece["choices"][0] for piece in chunks(chat("é", logprobs=True, stream=True))]
    check([entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]])
    old = post("/v1/completions", prompt="hi", logprobs=0).json()["choices"][0]["logprobs"]
    assert old["tokens"] == list("re: hi")
    assert old["token_logprobs"] == [-token / 256 for token in b"re: hi"]
    assert chat("é").json()["choices"][0]["logprobs"] is None


def test_offsets_are_those_of_characters_in_the_answer() -> None:
    """Bytes as tokens: those of one character have its offset. A stream's offsets go on from chunk to chunk."""
    asked: dict[str, Any] = {"prompt": "né你😀!", "logprobs": 0, "max_tokens": 99}
    answer = post("/v1/completions", **asked).json()["choices"][0]
    wanted = [at for at, character in enumerate(answer["text"]) for _ in character.encode()]
    assert answer["text"] == "re: né你😀!"
    assert answer["logprobs"]["text_offset"] == wanted
    pieces = [piece["choices"][0]["logprobs"] for piece in chunks(post("/v1/completions", **asked, stream=True))]
    assert [offset for piece in pieces for offset in piece["text_offset"]] == wanted


def test_the_sampling_reaches_the_engine_and_its_seed_differs() -> None:
    engine = FakeEngine()
    for _ in range(2):
        chat("hello", engine, temperature=0.7, top_p=0.9, stop="x", ignore_eos=True)
    first, second = engine.requests
    assert first.sampling.temperature == 0.7
    assert first.stop == ("x",)
    assert first.ignore_eos
    assert first.max_tokens == CONTEXT - 6
    assert first.sampling.seed != second.sampling.seed


@pytest.mark.parametrize(
    ("path", "fields", "status", "message"),
    [
        ("/v1/chat/completions", {"model": "gpt"}, 404, "there is no model 'gpt'; this server has 'fake'"),
        ("/v1/chat/completions", {"n": 2}, 400, "n is not supported"),
        ("/v1/chat/completions", {"frequency_penalty": 1}, 400, "frequency_penalty is not supported"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "content of a message must be"),
        ("/v1/completions", {"prompt": [256]}, 400, "from 0 to 255"),
        ("/v1/completions", {"prompt": ""}, 400, "the prompt is empty"),
        ("/v1/completions", {"prompt": "x" * CONTEXT}, 400, "has 4096 tokens and the context holds 4096"),
        ("/v1/completions", {"prompt": "refuse"}, 400, "this engine refuses"),
        ("/v1/completions", {"prompt": "fail"}, 500, "the engine failed"),
        ("/v1/embeddings", {}, 404, "/v1/embeddings: Not Found"),
        ("/v1/models", {}, 405, "/v1/models: Method Not Allowed"),
    ],
)
def test_errors_have_the_apis_shape(path: str, fields: dict[str, Any], status: int, message: str) -> None:
    messages = {} if "messages" in fields else {"messages": [{"role": "user", "content": "x"}]}
    response = post(path, **{**messages, **fields})
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]


def test_an_error_in_the_middle_of_a_stream_is_an_event() -> None:
    events = chat("fail", stream=True).text.split("\n\n")
    assert "the engine failed" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]
    assert "[DONE]" not in events[-2]


def test_after_an_error_the_next_answer_is_right() -> None:
    async def session(client: httpx.AsyncClient) -> None:
        for content, status in (("fail", 500), ("refuse", 400), ("hello", 200)):
            asked = {"model": "fake", "messages": [{"role": "user", "content": content}]}
            assert (await client.post("/v1/chat/completions", json=asked)).status_code == status
        assert (await client.get("/health")).json() == {"status": "ok", "active_requests": 0}

    talk(session)


def test_models_and_health() -> None:
    async def session(client: httpx.AsyncClient) -> None:
        [model] = (await client.get("/v1/models")).json()["data"]
        assert model["id"] == "fake"
        assert (await client.get("/v1/models/fake")).json() == model
        assert (await client.get("/v1/models/other")).status_code == 404
        assert (await client.get("/health")).json() == {"status": "ok", "active_requests": 0}

    talk(session)


def test_the_page_stands_alone() -> None:
    response = talk(lambda client: client.get("/"))
    assert response.status_code == 200
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!data:)|https?:|@import|url\(", response.text)


def test_many_at_once_are_all_right_and_run_one_by_one() -> None:
    engine = FakeEngine(cycle_s=0.0005)

    async def session(client: httpx.AsyncClient) -> list[str]:
        async def ask(index: int) -> str:
            content = f"{index} " * (1 + index % 7)
            asked = {"model": "fake", "messages": [{"role": "user", "content": content}]}
            if index % 2:
                reply = await client.post("/v1/chat/completions", json=asked)
                return str(reply.json()["choices"][0]["message"]["content"])
            streamed = await client.post("/v1/chat/completions", json={**asked, "stream": True})
            return "".join(piece["choices"][0]["delta"]["content"] for piece in chunks(streamed))

        return await asyncio.gather(*map(ask, range(32)))

    assert talk(session, engine) == ["re: " + f"{i} " * (1 + i % 7) for i in range(32)]
    assert engine.most_running == 1
    assert len(engine.threads) == 1
