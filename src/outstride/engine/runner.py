"""A thread that steps an engine while there is work, and does what other threads ask in between."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from outstride.core.contracts import Grammar, Method
from outstride.core.params import SamplingParams
from outstride.core.sequence import Sequence
from outstride.engine.engine import Engine
from outstride.engine.ledger import Progress
from outstride.errors import OutstrideError

Sink = Callable[["Event"], None]


@dataclass(frozen=True, slots=True)
class Event:
    """News of a request: progress of one of its sequences, or why it could not start."""

    progress: Progress | None = None
    error: Exception | None = None
    done: bool = False
    """Nothing follows."""


@dataclass(eq=False, slots=True)
class Ticket:
    """A request as its owner sees it."""

    tokens: list[int]
    params: SamplingParams
    method: Method
    sink: Sink
    salt: str = ""
    watched: bool = True
    """Whether its owner wants to hear of each pass, not only of the end."""
    fixed: Mapping[int, int] | None = None
    """Tokens behind the prompt that are known already, by position."""
    painted: bool = False
    """Whether its owner wants to see what stands beyond gaps, too."""
    grammar: Grammar | None = None
    priority: int = 0
    """Whoever has the lower one is served first."""
    sequences: list[Sequence] = field(default_factory=list)
    finished: int = 0


class Runner:
    """Owns an engine. `submit` and `cancel` may be called from any thread; sinks run on its own."""

    def __init__(self, engine: Engine, after: Callable[[], None] = lambda: None) -> None:
        self.engine = engine
        self._after = after
        self.cpu = 0.0
        """Seconds of processor time that this process spent in steps."""
        self._tickets: dict[int, Ticket] = {}
        self._errands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, ticket: Ticket) -> None:
        """Queues a request; everything about it, refusal included, arrives at its sink."""
        self._ask(lambda: self._start(ticket))

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request before the next pass."""
        self._ask(lambda: self._stop(ticket))

    def ask(self, errand: Callable[[], None]) -> None:
        """Does something between two passes, on the engine's thread."""
        self._ask(errand)

    def close(self) -> None:
        """Cancels what runs and ends the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._errands.put(None)
            thread.join()

    def _ask(self, errand: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise OutstrideError("this engine is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="outstride", daemon=True)
                self._thread.start()
            self._errands.put(errand)

    def _run(self) -> None:
        while True:
            try:
                errand = self._errands.get(block=not self.engine.busy)
            except queue.Empty:
                self._step()
                continue
            if errand is None:
                for ticket in list(self._tickets.values()):
                    self._stop(ticket)
                if self.engine.busy:
                    self._step()
                return
            errand()
            self._after()

    def _step(self) -> None:
        before = time.process_time()
        try:
            self.engine.step(self._tell)
        except Exception as error:  # the engine itself broke: nobody may be left waiting
            for ticket in self._tickets.values():
                self._stop(ticket)
                ticket.sink(Event(error=error, done=True))
            self._tickets.clear()
            self.engine.commit.forget()
            self._after()
        self.cpu += time.process_time() - before

    def _tell(self, news: list[Progress]) -> None:
        for progress in news:
            request = progress.sequence.request
            ticket = self._tickets[request]
            ticket.finished += progress.finished
            done = ticket.finished == len(ticket.sequences)
            ticket.sink(Event(progress=progress, done=done))
            if done:
                del self._tickets[request]
        self._after()

    def _start(self, ticket: Ticket) -> None:
        try:
            sequence = self.engine.submit(
                ticket.tokens,
                ticket.params,
                ticket.method,
                salt=ticket.salt,
                grammar=ticket.grammar,
                watched=ticket.watched,
                fixed=ticket.fixed,
                painted=ticket.painted,
                priority=ticket.priority,
            )
        except Exception as error:
            ticket.sink(Event(error=error, done=True))
            return
        ticket.sequences = sequence.group
        self._tickets[sequence.request] = ticket

    def _stop(self, ticket: Ticket) -> None:
        for sequence in list(ticket.sequences):
            self.engine.cancel(sequence)
