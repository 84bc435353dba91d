"""The HTTP process's side of the engine process: starts it, talks to it, restarts it when it dies."""

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
from outstride.serve.ipc import (
    CANCEL,
    LENGTH,
    OUTPUTS,
    PING,
    PONG,
    READY,
    SHUTDOWN,
    SUBMIT,
    EngineFault,
    EngineOutput,
    EngineRequest,
    EngineSettings,
    Gauges,
    Handshake,
    pack,
)

OutputSink = Callable[[EngineOutput], None]
ENGINE_DIED = EngineFault(
    "engine", "the engine died while this request ran; it is being started again"
)
MAX_RESTART_PAUSE = 30.0
"""Seconds between attempts to start an engine that dies before it is ready, at most."""
MAX_FAILED_STARTS = 3
"""Engines that may die before one has been ready for the first time."""


class EngineDown(Exception):
    """No engine is ready at the moment."""


class EngineClient:
    """One engine process at a time. Everything here runs on the event loop."""

    def __init__(
        self,
        settings: EngineSettings,
        on_engine_dead: Callable[[], None] = lambda: None,
        on_ready: Callable[[Handshake, Tokenizer], None] = lambda handshake, tokenizer: None,
        on_failed_permanently: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.handshake: Handshake | None = None
        """Of the latest engine; kept while the next one starts."""
        self.tokenizer: Tokenizer | None = None
        self.ready = False
        self.deaths = 0
        self.pid: int | None = None
        self.failed_permanently = False
        """Whether engines die before they are ever ready: another attempt would not help."""
        self._on_engine_dead, self._on_ready = on_engine_dead, on_ready
        self._on_failed_permanently = on_failed_permanently
        self._ids = itertools.count(1)
        self._sinks: dict[int, OutputSink] = {}
        self._pings: dict[int, asyncio.Future[Gauges]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._closing = asyncio.Event()

    # --- requests -----------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, sink: OutputSink) -> int:
        """Sends a request and returns its id; its outputs go to `sink`, the last one is `done`."""
        if not self.ready:
            raise EngineDown
        number = next(self._ids)
        self._sinks[number] = sink
        self._send((SUBMIT, replace(request, id=number)))
        return number

    def cancel(self, number: int) -> None:
        """Ends a request without further outputs: its pages are free before the next pass."""
        if self._sinks.pop(number, None) is not None and self.ready:
            self._send((CANCEL, number))

    async def ping(self, timeout: float = 5.0) -> Gauges:
        """The engine's gauges: it answers between two passes, so an answer proves that it steps."""
        if not self.ready:
            raise EngineDown
        number = next(self._ids)
        future = self._pings[number] = asyncio.get_running_loop().create_future()
        self._send((PING, number))
        try:
            return await asyncio.wait_for(future, timeout)
        finally:
            self._pings.pop(number, None)

    def _send(self, message: tuple[Any, ...]) -> None:
        if self._writer is None:
            raise EngineDown
        self._writer.write(pack(message))

    # --- the process --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts an engine and keeps one running; `wait` says when it is ready."""
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
                self._send((SHUTDOWN,))
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
            was_ready = await self._run_engine()
            if self._closing.is_set():
                return
            self.deaths += 1
            self._on_engine_dead()
            if self.handshake is None and self.deaths >= MAX_FAILED_STARTS:
                self.failed_permanently = True
                self._up.set()  # `wait` returns
                self._on_failed_permanently()
                return
            stable = was_ready and time.monotonic() - began > 1.0
            pause = 0.0 if stable else min(max(2 * pause, 0.5), MAX_RESTART_PAUSE)
            await asyncio.sleep(pause)

    async def _run_engine(self) -> bool:
        """One engine process from its start to its end; returns whether it was ever ready."""
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
        was_ready = False
        try:
            self._send((self.settings,))
            while True:
                head = await reader.readexactly(LENGTH.size)
                message = pickle.loads(await reader.readexactly(LENGTH.unpack(head)[0]))
                if message[0] == OUTPUTS:
                    self._publish(message[1])
                elif message[0] == PONG:
                    self._on_pong(*message[1:])
                elif message[0] == READY:
                    self._on_handshake(message[1])
                    was_ready = True
        except (asyncio.IncompleteReadError, ConnectionError, OSError):
            return was_ready
        finally:
            self._on_disconnect()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await process.wait()

    def _on_handshake(self, handshake: Handshake) -> None:
        known = self.handshake and self.handshake.fingerprint
        if self.tokenizer is None or handshake.fingerprint != known:
            self.tokenizer = pickle.loads(handshake.tokenizer)
            gc.freeze()  # it stays: scanning it in every collection would delay streams
        self.handshake = replace(handshake, tokenizer=b"")
        self._on_ready(self.handshake, self.tokenizer)
        self.ready = True
        self._up.set()

    def _publish(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            sink = self._sinks.get(output.request_id)
            if sink is not None:
                if output.done:
                    del self._sinks[output.request_id]
                sink(output)

    def _on_pong(self, number: int, gauges: Gauges) -> None:
        future = self._pings.get(number)
        if future is not None and not future.done():
            future.set_result(gauges)

    def _on_disconnect(self) -> None:
        """The engine process has ended: all of its requests end with a fault."""
        self.ready, self.pid = False, None
        self._up.clear()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        sinks, self._sinks = self._sinks, {}
        for number, sink in sinks.items():
            sink(EngineOutput(number, fault=ENGINE_DIED, done=True))
        for future in self._pings.values():
            if not future.done():
                future.set_exception(EngineDown())
