"""`EngineThread`: steps an engine while it has work, and runs tasks of other threads between steps."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from outstride.core.contracts import Grammar, Method
from outstride.core.params import SamplingParams
from outstride.core.sequence import Sequence
from outstride.engine.engine import Engine
from outstride.engine.ledger import SequenceProgress
from outstride.engine.stopping import TokenToBytes
from outstride.errors import OutstrideError

T = TypeVar("T")
OutputCallback = Callable[["OutputEvent"], None]


@dataclass(frozen=True, slots=True)
class OutputEvent:
    """The progress of one sequence of a request, or the reason why the request failed."""

    progress: SequenceProgress | None = None
    error: Exception | None = None
    done: bool = False
    """Whether this is the last event of the request."""


@dataclass(eq=False, slots=True)
class RequestHandle:
    """A request as its owner holds it."""

    tokens: list[int]
    params: SamplingParams
    method: Method
    callback: OutputCallback
    """Receives every event of the request, on the engine's thread."""
    salt: str = ""
    streaming: bool = True
    """Whether progress is published after each pass, not only at the end."""
    fixed: Mapping[int, int] | None = None
    """Tokens after the prompt that are known already, by position."""
    stream_canvas: bool = False
    """Whether the tokens beyond gaps are published after each pass, too."""
    grammar: Grammar | None = None
    token_to_bytes: TokenToBytes | None = None
    """Detokenizes the output; None: the engine's own function."""
    priority: int = 0
    """Requests with lower values are served first."""
    sequences: list[Sequence] = field(default_factory=list)
    finished: int = 0


def _nothing() -> None:
    """The default of `EngineThread.after_each`."""


class EngineThread:
    """The only owner of an engine. Its methods may be called from any thread.

    Callbacks of requests run on the engine's thread. An engine takes one thread only: a second one
    raises OutstrideError.
    """

    def __init__(self, engine: Engine) -> None:
        engine.claim()
        self.engine = engine
        self.after_each: Callable[[], None] = _nothing
        """Called on the engine's thread after each pass and after each task."""
        self.cpu_seconds = 0.0
        """Processor time that this process spent in steps."""
        self._handles: dict[int, RequestHandle] = {}
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, handle: RequestHandle) -> None:
        """Queues a request. All its events, rejection included, go to its callback."""
        self.post(lambda: self._start(handle))

    def cancel(self, handle: RequestHandle) -> None:
        """Ends a request before the next pass."""
        self.post(lambda: self._stop(handle))

    def post(self, task: Callable[[], None]) -> None:
        """Runs a task between two passes, on the engine's thread, and does not wait for it."""
        with self._lock:
            if self._closed:
                raise OutstrideError("this engine is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="outstride", daemon=True)
                self._thread.start()
            self._tasks.put(task)

    def call(self, task: Callable[[], T]) -> T:
        """Runs a task between two passes and returns its result, or raises what it raised.

        This is how models and draft heads are changed while requests run. An engine that has not
        started runs it in the caller's thread.
        """
        if threading.current_thread() is self._thread:
            return task()
        with self._lock:
            if self._closed:
                raise OutstrideError("this engine is closed")
            if self._thread is None:
                return task()
        done = Future[T]()

        def run() -> None:
            try:
                done.set_result(task())
            except BaseException as error:
                done.set_exception(error)

        self.post(run)
        return done.result()

    def close(self) -> None:
        """Cancels all requests and ends the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._tasks.put(None)
            thread.join()

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(block=not self.engine.busy)
            except queue.Empty:
                self._step()
                continue
            if task is None:
                for handle in list(self._handles.values()):
                    self._stop(handle)
                if self.engine.busy:
                    self._step()
                return
            task()
            self.after_each()

    def _step(self) -> None:
        before = time.process_time()
        try:
            self.engine.step(self._publish)
        except Exception as error:  # the engine itself failed: no request may be left waiting
            for handle in self._handles.values():
                self._stop(handle)
                handle.callback(OutputEvent(error=error, done=True))
            self._handles.clear()
            self.engine.discard_outputs()
            self.after_each()
        self.cpu_seconds += time.process_time() - before

    def _publish(self, outputs: list[SequenceProgress]) -> None:
        for progress in outputs:
            request = progress.sequence.request
            handle = self._handles[request]
            handle.finished += progress.finished
            done = handle.finished == len(handle.sequences)
            handle.callback(OutputEvent(progress=progress, done=done))
            if done:
                del self._handles[request]
        self.after_each()

    def _start(self, handle: RequestHandle) -> None:
        try:
            sequence = self.engine.submit(
                handle.tokens,
                handle.params,
                handle.method,
                salt=handle.salt,
                grammar=handle.grammar,
                streaming=handle.streaming,
                fixed=handle.fixed,
                stream_canvas=handle.stream_canvas,
                token_to_bytes=handle.token_to_bytes,
                priority=handle.priority,
            )
        except Exception as error:
            handle.callback(OutputEvent(error=error, done=True))
            return
        handle.sequences = sequence.group
        self._handles[sequence.request] = handle

    def _stop(self, handle: RequestHandle) -> None:
        for sequence in list(handle.sequences):
            self.engine.cancel(sequence)
