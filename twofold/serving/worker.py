"""The engine's thread: requests wait in line for it, one runs at a time, and any can be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

from twofold.decoding.engine import Delta, Engine, Request
from twofold.serving.protocol import ApiError


class Generation:
    """The deltas of one request, as they come. Iterate over it once; `cancel` ends the iteration early.

    Lives on the event loop; only `_run` is the engine's thread.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()
        self._cancelled = False
        self._reason: Exception | None = None
        self._future: Future[None] | None = None

    def start(self, pool: ThreadPoolExecutor, finished: Callable[[], None]) -> Future[None]:
        """`finished` is called before the client can see the end."""
        self._finished = finished
        self._future = pool.submit(self._run)
        return self._future

    def cancel(self, reason: Exception | None = None) -> None:
        """Makes the engine stop after the cycle it is in; a request that still waits is never begun. The iteration
        ends, with `reason` raised if there is one."""
        self._cancelled, self._reason = True, reason
        if self._future is not None:
            self._future.cancel()
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while not self._cancelled and (item := await self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
        if self._reason is not None:
            raise self._reason

    def _run(self) -> None:
        # The thread does not wait for the loop between deltas: the engine is never slowed by a client.
        try:
            deltas = cast("Generator[Delta, None, None]", self._engine.generate(self._request))
            try:
                for delta in deltas:
                    if self._cancelled:
                        return
                    self._put(delta)
            finally:
                deltas.close()  # the engine's cleaning up happens here, on its own thread
            self._finished()
            self._put(None)
        except Exception as error:
            self._finished()
            self._put(error)  # raised again by the iteration

    def _put(self, item: Delta | Exception | None) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, item)


class Worker:
    """One thread that owns the engine; first come, first served."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._unfinished: set[Generation] = set()
        self._ended = False

    @property
    def active(self) -> int:
        """Requests that run or wait."""
        return len(self._unfinished)

    def start(self, request: Request) -> Generation:
        """ApiError after `end`."""
        if self._ended:
            raise _ending()
        generation = Generation(self._engine, request)
        self._unfinished.add(generation)

        def finished(_: object = None) -> None:
            self._unfinished.discard(generation)

        generation.start(self._pool, finished).add_done_callback(finished)
        return generation

    def end(self) -> None:
        """Whoever runs or waits is refused, as are all who come later."""
        self._ended = True
        for generation in list(self._unfinished):
            generation.cancel(_ending())

    async def close(self) -> None:
        """`end`, and waits for the thread to end."""
        self.end()
        await asyncio.to_thread(self._pool.shutdown)


def _ending() -> ApiError:
    return ApiError("the server is shutting down; ask again when it is back", status=503)
