"""The HTTP process's end of the engine: starts it, watches it, and starts it again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import pickle
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outstride.models.tokenizer import Tokenizer
from outstride.serve.wire import (
    CANCEL,
    HELLO,
    LENGTH,
    NEWS,
    PING,
    PONG,
    QUIT,
    START,
    EngineSettings,
    Fault,
    Gauges,
    Hello,
    Job,
    News,
    pack,
)

Inbox = Callable[[News], None]
GONE = Fault("engine", "the engine died while this request ran; it is being started again")
PATIENCE = 30.0
"""Seconds between attempts to start an engine that dies before it answers, at the most."""


ATTEMPTS = 3
"""Engines that may die before one has answered for the first time."""


class EngineDown(Exception):
    """There is no engine to ask at the moment."""


class EngineLink:
    """One engine process at a time. All of this runs on the event loop."""

    def __init__(
        self,
        settings: EngineSettings,
        on_death: Callable[[], None] = lambda: None,
        on_hello: Callable[[Hello, Tokenizer], None] = lambda hello, tokenizer: None,
        on_hopeless: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.hello: Hello | None = None
        """What the engine said of itself; kept while it is started anew."""
        self.tokenizer: Tokenizer | None = None
        self.ready = False
        self.deaths = 0
        self.pid: int | None = None
        self.hopeless = False
        """Whether engines die before they ever answer: trying again would not help."""
        self._on_death, self._on_hello, self._on_hopeless = on_death, on_hello, on_hopeless
        self._numbers = itertools.count(1)
        self._inboxes: dict[int, Inbox] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._closing = asyncio.Event()

    # --- requests -----------------------------------------------------------------------------------

    def submit(self, job: Job, inbox: Inbox) -> int:
        """Hands a job over; its news arrive at the inbox, one that is `done` last."""
        if not self.ready:
            raise EngineDown
        number = next(self._numbers)
        self._inboxes[number] = inbox
        self._send((START, replace(job, id=number)))
        return number

    def cancel(self, number: int) -> None:
        """Nobody listens to this job any more: its pages are free before the next pass."""
        if self._inboxes.pop(number, None) is not None and self.ready:
            self._send((CANCEL, number))

    async def ping(self, timeout: float = 5.0) -> Gauges:
        """What the engine holds: answered between two passes, so it proves that it steps."""
        found: Gauges = await self._ask(PING, timeout)
        return found

    async def _ask(self, what: int, timeout: float) -> Any:
        if not self.ready:
            raise EngineDown
        number = next(self._numbers)
        future = self._questions[number] = asyncio.get_running_loop().create_future()
        self._send((what, number))
        try:
            return await asyncio.wait_for(future, timeout)
        finally:
            self._questions.pop(number, None)

    def _send(self, message: tuple[Any, ...]) -> None:
        if self._writer is None:
            raise EngineDown
        self._writer.write(pack(message))

    # --- the process --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begins to look after an engine; `wait` tells when it answers."""
        self._task = asyncio.create_task(self._supervise())

    async def wait(self, timeout: float | None = None) -> bool:
        """Whether the engine is ready within a time."""
        try:
            await asyncio.wait_for(self._up.wait(), timeout)
        except TimeoutError:
            return False
        return self.ready

    async def close(self) -> None:
        """Ends the engine."""
        self._closing.set()
        if self._writer is not None:
            with contextlib.suppress(EngineDown, OSError):
                self._send((QUIT,))
        if self._task is not None:
            try:
                await asyncio.wait_for(asyncio.shield(self._task), 5.0)
            except TimeoutError:
                self._task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._task

    async def _supervise(self) -> None:
        pause = 0.0
        while not self._closing.is_set():
            began = time.monotonic()
            said_hello = await self._live()
            if self._closing.is_set():
                return
            self.deaths += 1
            self._on_death()
            if self.hello is None and self.deaths >= ATTEMPTS:
                self.hopeless = True
                self._on_hopeless()
                return
            quick = said_hello and time.monotonic() - began > 1.0
            pause = 0.0 if quick else min(max(2 * pause, 0.5), PATIENCE)
            await asyncio.sleep(pause)

    async def _live(self) -> bool:
        """One engine process from its start to its end; whether its model ever answered."""
        ours, theirs = socket.socketpair()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "outstride.serve.worker",
            str(theirs.fileno()),
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
        )
        theirs.close()
        self.pid = process.pid
        reader, self._writer = await asyncio.open_connection(sock=ours)
        said_hello = False
        try:
            self._send((self.settings,))
            while True:
                head = await reader.readexactly(LENGTH.size)
                message = pickle.loads(await reader.readexactly(LENGTH.unpack(head)[0]))
                if message[0] == NEWS:
                    self._tell(message[1])
                elif message[0] == PONG:
                    self._answer(*message[1:])
                elif message[0] == HELLO:
                    self._greet(message[1])
                    said_hello = True
        except (asyncio.IncompleteReadError, ConnectionError, OSError):
            return said_hello
        finally:
            self._bury()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await process.wait()

    def _greet(self, hello: Hello) -> None:
        if self.tokenizer is None or hello.fingerprint != (self.hello and self.hello.fingerprint):
            self.tokenizer = pickle.loads(hello.tokenizer)
            gc.freeze()  # it stays, and looking through it again and again would hold up streams
        self.hello = replace(hello, tokenizer=b"")
        self._on_hello(self.hello, self.tokenizer)
        self.ready = True
        self._up.set()

    def _tell(self, news: list[News]) -> None:
        for item in news:
            inbox = self._inboxes.get(item.job)
            if inbox is not None:
                if item.done:
                    del self._inboxes[item.job]
                inbox(item)

    def _answer(self, number: int, value: Any) -> None:
        future = self._questions.get(number)
        if future is not None and not future.done():
            future.set_result(value)

    def _bury(self) -> None:
        """The engine has gone: everybody who waits for it is told."""
        self.ready, self.pid = False, None
        self._up.clear()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        inboxes, self._inboxes = self._inboxes, {}
        for number, inbox in inboxes.items():
            inbox(News(number, fault=GONE, done=True))
        for future in self._questions.values():
            if not future.done():
                future.set_exception(EngineDown())
