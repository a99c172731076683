"""The server: an OpenAI-compatible API and a page to chat on, over one engine."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from twofold.decoding.engine import Engine
from twofold.serving.answers import DONE, Answer, event
from twofold.serving.protocol import ApiError, Call, parse_chat, parse_completion, to_request
from twofold.serving.worker import Generation, Worker

_log = logging.getLogger(__name__)
_GRACE_S = 1
_BODY_BYTES, _TOKEN_BYTES = 1 << 20, 64  # a request may have these, and these for each token of the context

# The page loads nothing from anywhere and talks to its own server only.
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def create_app(engine: Engine) -> Starlette:
    """The ASGI application: /v1/chat/completions, /v1/completions, /v1/models, /health, and a page at /.

    The engine runs in a thread of its own, one request at a time, in the order of their coming. A client
    that goes away ends its generation within one cycle.
    """
    worker = Worker(engine)

    async def chat_completions(request: Request) -> Response:
        return await answer(request, parse_chat(await body(request)))

    async def completions(request: Request) -> Response:
        return await answer(request, parse_completion(await body(request)))

    async def body(request: Request) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            parts.append(part)
            if (size := size + len(part)) > most_bytes:
                raise ApiError(f"the body is larger than {most_bytes} bytes; shorten the request", status=413)
        return b"".join(parts)

    async def answer(request: Request, call: Call) -> Response:
        check_model(call.model)
        prompt_ids = await asyncio.to_thread(_prompt_ids, engine, call)
        wanted = to_request(call, prompt_ids, vocab_size=engine.tokenizer.vocab_size, max_context=engine.max_context)
        shape = Answer(
            model=engine.model_name,
            chat=call.messages is not None,
            prompt_tokens=len(prompt_ids),
            logprobs=call.logprobs,
            decode=engine.tokenizer.decode,
        )
        generation = worker.start(wanted)
        if call.stream:
            return _EventStream(generation, shape, include_usage=call.include_usage)
        async with _cancelled_without_client(generation, request.receive):
            try:
                return JSONResponse(await shape.whole(generation))
            except Exception as error:
                raise _refusal(error) from error

    async def models(request: Request) -> Response:
        if name := request.path_params.get("model"):
            check_model(name)
            return JSONResponse(described)
        return JSONResponse({"object": "list", "data": [described]})

    def check_model(model: str) -> None:
        if model != engine.model_name:
            raise ApiError(
                f"there is no model {model!r}; this server has {engine.model_name!r}",
                param="model",
                status=404,
                code="model_not_found",
            )

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "active_requests": worker.active})

    async def page(request: Request) -> Response:
        return HTMLResponse(html, headers={"Content-Security-Policy": _PAGE_POLICY})

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await worker.close()

    html = files("twofold.serving").joinpath("page", "index.html").read_text(encoding="utf-8")
    most_bytes = _BODY_BYTES + _TOKEN_BYTES * engine.max_context
    described = {
        "id": engine.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "twofold",
        "max_model_len": engine.max_context,
    }
    app = Starlette(
        lifespan=lifespan,
        routes=[
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", models),
            Route("/health", health),
            Route("/", page),
        ],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _nobody,
            Exception: _failed,
        },
    )
    app.state.worker = worker
    return app


class Server(uvicorn.Server):
    """The application on a socket. When it is told to end, answers under way end at once with an error that their
    clients are told; a client that does not take it, or is still sending its request, is left after a second."""

    def __init__(self, engine: Engine) -> None:
        self._app = create_app(engine)
        super().__init__(
            uvicorn.Config(self._app, log_level="warning", access_log=False, timeout_graceful_shutdown=2 * _GRACE_S)
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.worker.end()
        asyncio.get_running_loop().call_later(_GRACE_S, self._leave)
        await super().shutdown(sockets)

    def _leave(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def serve(load: Callable[[], Engine], *, host: str, port: int) -> None:
    """Serves the engine that `load` gives until interrupted; port 0 takes a free one.

    The port is taken before the engine is loaded, which may take minutes. Raises ValueError if it cannot be.
    """
    with _listen(host, port) as listener:
        server = Server(load())
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listener.getsockname()[1]}"
        print(f"chat: {address}/   OpenAI API: {address}/v1   end with Ctrl-C", flush=True)
        server.run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} of {host} is in use; choose another with --port") from error
        raise ValueError(f"cannot listen on port {port} of {host}: {error.strerror or error}") from error


def _prompt_ids(engine: Engine, call: Call) -> list[int]:
    if call.messages is not None:
        try:
            return engine.tokenizer.chat_ids(call.messages)
        except ValueError as error:
            raise ApiError(str(error), param="messages") from error
    if isinstance(call.prompt, str):
        return engine.tokenizer.encode(call.prompt)
    assert call.prompt is not None
    return list(call.prompt)


class _EventStream(Response):
    """Server-sent events of one generation."""

    def __init__(self, generation: Generation, shape: Answer, *, include_usage: bool) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._generation = generation
        self._shape = shape
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def put(content: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": content, "more_body": more})

        async with _cancelled_without_client(self._generation, receive):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for chunk in self._shape.chunks(self._generation, include_usage=self._include_usage):
                    await put(event(chunk))
                await put(DONE, more=False)
            except Exception as error:  # the status is sent already, so the stream itself has to say it
                await put(event(_refusal(error).body), more=False)


@asynccontextmanager
async def _cancelled_without_client(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """Cancels the generation as soon as the client goes away, and in any case at the end of the block."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        generation.cancel()


def _refusal(error: Exception) -> ApiError:
    """What the client is told about an error of the engine; what is not about the request is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValueError):
        return ApiError(str(error))
    _log.error("the engine failed", exc_info=error)
    return ApiError("the engine failed; the server's log says why", status=500)


async def _api_error(request: Request, error: Any) -> Response:
    return JSONResponse(error.body, status_code=error.status)


async def _http_error(request: Request, error: Any) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    refusal = ApiError(message, status=error.status_code)
    return JSONResponse(refusal.body, status_code=error.status_code, headers=error.headers)


async def _failed(request: Request, error: Any) -> Response:
    """What nobody foresaw; it is logged by whoever runs the application."""
    refusal = ApiError("the server failed; its log says why", status=500)
    return JSONResponse(refusal.body, status_code=500)


async def _nobody(request: Request, error: Any) -> Response:
    return Response(status_code=400)  # the client went away before its request was whole
