"""The engine process: takes jobs from a socket, steps the engine, and sends back what each pass did.

The main thread reads and compiles; the engine's own thread steps and sends. Nothing here waits for a
client: the HTTP process reads whatever comes at once.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import signal
import socket
import sys
import time
from collections import OrderedDict
from dataclasses import asdict
from typing import Any

import numpy as np

from outstride.core.contracts import Method, Model
from outstride.core.proposal import TARGET
from outstride.core.sequence import Counts, Sequence
from outstride.engine.measuring import measure
from outstride.engine.runner import Event, Runner, Ticket
from outstride.errors import IntegrityError, OutstrideError, RequestError
from outstride.llm import LLM
from outstride.serve.drawing import drawn
from outstride.serve.wire import (
    CANCEL,
    HELLO,
    NEWS,
    PING,
    PONG,
    QUIT,
    START,
    End,
    EngineSettings,
    Fault,
    Gauges,
    Hello,
    Job,
    News,
    pack,
    receive,
)

METHODS = 64
"""Methods, with their options, that stay built: they remember what was said before."""
BUFFER = 4 << 20
TOUCHED = 1024
"""Entries of a cache that are written at once when its memory is fetched."""


class Tally:
    """What passes cost on average, and what plain ones would have: for estimates of time saved."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.engine
        self.steps = 0
        self.plain = 0.0
        self.real = 0.0
        self._proposed = 0
        self._drafting = 0.0

    def note(self) -> None:
        """Enters a pass: its own cost by the measured curve, and that of one node per sequence."""
        engine, ledger = self._engine, self._engine.ledger
        cost, rows = engine.scheduler.cost, len(engine.scheduler.running)
        if cost is None or rows == 0:
            return
        drafted, spent = ledger.total.proposed - self._proposed, ledger.seconds["propose"]
        self._proposed += drafted
        curve = cost.curve(rows + max(drafted, 0))
        self.steps += 1
        self.plain += curve[rows]
        self.real += curve[rows + max(drafted, 0)] + spent - self._drafting
        self._drafting = spent

    def mark(self) -> tuple[int, float, float]:
        return self.steps, self.plain, self.real

    def saved(self, since: tuple[int, float, float], counts: Counts) -> float:
        """What an answer saved since a mark: its tokens at the price of plain passes, less its own."""
        steps = self.steps - since[0]
        if steps <= 0:
            return 0.0
        plain, real = (self.plain - since[1]) / steps, (self.real - since[2]) / steps
        return counts.emitted * plain - counts.passes * real


class Active:
    """A job that is under way."""

    def __init__(self, job: Job, mark: tuple[int, float, float]) -> None:
        self.job = job
        self.mark = mark
        self.ticket: Ticket | None = None
        self.told: dict[int, int] = {}
        self.prompt_told = False


class Worker:
    """One engine and the socket to its HTTP process."""

    def __init__(self, link: socket.socket, llm: LLM) -> None:
        self._link = link
        self._llm = llm
        self._tally = Tally(llm)
        self._runner = Runner(llm.engine, after=self._flush)
        self._methods: OrderedDict[str, Method] = OrderedDict()
        self._active: dict[int, Active] = {}
        self._news: list[News] = []
        self._steps = 0
        self._telling = 0.0
        self._intact = True

    # --- the reading thread -------------------------------------------------------------------------

    def run(self) -> None:
        """Serves until the other end goes away."""
        while (message := receive(self._link)) is not None:
            what, *rest = message
            if what == START:
                self._start(*rest)
            elif what == CANCEL:
                self._cancel(*rest)
            elif what == PING:
                self._runner.ask(lambda number=rest[0]: self._pong(number, self._gauges()))  # type: ignore[misc]
            elif what == QUIT:
                break
        self._runner.close()

    def _start(self, job: Job) -> None:
        """Everything that may take long or fail happens here, not between passes."""
        active = Active(job, self._tally.mark())
        try:
            method = self._method(job.method)
            method, grammar = self._llm.shaped(method, job.shape, job.params)
        except Exception as error:
            fault = _fault(error)
            if isinstance(error, OutstrideError):  # it asks for what is not there
                fault = Fault("request", fault.message)
            self._runner.ask(lambda: self._news.append(News(job.id, fault=fault, done=True)))
            return
        active.ticket = Ticket(
            job.tokens,
            job.params,
            method,
            lambda event: self._take(active, event),
            salt=job.salt,
            watched=job.watched,
            painted=job.graphs,
            grammar=grammar,
            priority=job.priority,
        )
        self._active[job.id] = active
        self._runner.submit(active.ticket)

    def _method(self, spec: str) -> Method:
        found = self._methods.pop(spec, None)
        if found is None:
            found = self._llm.build(spec)
        self._methods[spec] = found
        while len(self._methods) > METHODS:
            self._methods.popitem(last=False)
        return found

    def _cancel(self, number: int) -> None:
        active = self._active.pop(number, None)
        if active is not None and active.ticket is not None:
            self._runner.cancel(active.ticket)

    # --- the engine's thread ------------------------------------------------------------------------

    def _take(self, active: Active, event: Event) -> None:
        job = active.job
        if event.progress is None:
            self._active.pop(job.id, None)
            fault = _fault(event.error) if event.error else None
            self._news.append(News(job.id, fault=fault, done=event.done))
            return
        progress = event.progress
        sequence, rows, trace, fault = progress.sequence, None, None, None
        if event.done:
            self._active.pop(job.id, None)
        elif job.id not in self._active:
            return  # cancelled: nobody listens
        if job.params.logprobs is not None or job.trace:
            first = active.told.get(sequence.index, 0)
            last = len(sequence.tokens) - sequence.prompt_length
            active.told[sequence.index] = last
            if job.trace:
                trace = [(*row,) for row in sequence.trace[first:last]]
            if job.params.logprobs is not None:
                places = range(first + sequence.prompt_length, len(sequence.tokens))
                rows = [sequence.logprobs.get(at) for at in places]
        end = prompt = None
        if progress.finished:
            end = self._end(active, sequence)
            if sequence.error is not None:
                fault = _fault(sequence.error)
            if job.params.prompt_logprobs is not None and not active.prompt_told:
                active.prompt_told = True
                known = sequence.prompt_logprobs
                prompt = [known.get(at) for at in range(sequence.prompt_length)]
        self._news.append(
            News(
                job.id,
                sequence.index,
                progress.text,
                rows,
                trace,
                end,
                prompt,
                fault,
                event.done,
                drawn(progress) if job.graphs else None,
            )
        )

    def _end(self, active: Active, sequence: Sequence) -> End:
        counts = sequence.counts
        return End(
            sequence.finish_reason or "error",
            asdict(counts),
            sequence.seed,
            sequence.method.spec or sequence.method.name,
            self._tally.saved(active.mark, counts),
            sequence.output,
        )

    def _flush(self) -> None:
        """After each pass and each errand: one message with whatever is new."""
        started = time.thread_time()
        steps = self._llm.engine.ledger.steps
        if steps != self._steps:
            self._steps = steps
            self._tally.note()
        if self._news:
            news, self._news = self._news, []
            self._send((NEWS, news))
        self._telling += time.thread_time() - started

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._link.sendall(pack(message))
        except OSError:
            os._exit(0)  # nobody is there to answer to

    def hello(self, fingerprint: str, tokenizer: bytes) -> None:
        """The first message."""
        model = self._llm.model
        self._send(
            (
                HELLO,
                Hello(
                    model=self._llm.name,
                    fingerprint=fingerprint,
                    operations=model.ops.name,
                    context=model.context,
                    capacity=self._llm.engine.passes.pools[TARGET].capacity,
                    vocab_size=model.vocab_size,
                    tokenizer=tokenizer,
                ),
            )
        )

    def _pong(self, number: int, value: Any) -> None:
        self._send((PONG, number, value))

    def _check(self) -> bool:
        """Whether the cache agrees with itself; looked at while there is nothing else to do."""
        if not self._llm.engine.busy:
            try:
                self._llm.engine.check_integrity()
            except IntegrityError as error:
                self._intact = False
                print(f"integrity: {error}", file=sys.stderr, flush=True)
        return self._intact

    def _gauges(self) -> Gauges:
        engine = self._llm.engine
        pool = engine.passes.pools[TARGET]
        return Gauges(
            steps=engine.ledger.steps,
            totals=asdict(engine.ledger.total),
            seconds=dict(engine.ledger.seconds),
            running=len(engine.scheduler.running),
            waiting=len(engine.scheduler.waiting),
            pages=pool.capacity // pool.page_size,
            pages_free=pool.available,
            cpu_steps=self._runner.cpu - self._telling,
            cpu_all=time.process_time(),
            rss=_memory(),
            intact=self._check(),
        )


def _memory() -> int:
    """Bytes that this process holds in memory."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _fault(error: BaseException) -> Fault:
    kind = "request" if isinstance(error, RequestError) else "method"
    if not isinstance(error, OutstrideError):
        kind = "engine"
    return Fault(kind, str(error) or type(error).__name__)


def _touch(model: Model) -> None:
    """Writes every entry of an empty cache once, so that its memory is there before it is needed.

    Else the system finds it page by page in the midst of passes, for all who reach a new page in the
    same pass at once: with eight talking, that pass took half as long again.
    """
    slots = model.pages * model.page_size
    for first in range(0, slots, TOUCHED):
        targets = np.arange(first, min(first + TOUCHED, slots))
        model.move(np.zeros_like(targets), targets)


def main() -> None:
    """Runs in the new process: the socket's number is on the command line."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number, signal.SIG_IGN
        )  # whoever ends the group means the parent, which decides
    link = socket.socket(fileno=int(sys.argv[1]))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    message = receive(link)
    if message is None:
        return
    settings: EngineSettings = message[0]
    llm = LLM(
        settings.model,
        weights=settings.weights,
        adapter=settings.adapter,
        pages=settings.pages,
        max_nodes=settings.max_nodes,
        max_sequences=settings.max_sequences,
    )
    tokenizer = pickle.dumps(llm.tokenizer)
    pool = llm.engine.passes.pools[TARGET]
    llm.method("auto")  # what it needs is attached before anything is read
    for name in settings.draft_models:
        llm.method(f"draft:model={name}")
    for model in llm.engine.passes.models.values():
        _touch(model)
    llm.engine.scheduler.cost = measure(llm.model, pool, settings.max_nodes, reading=True)
    worker = Worker(link, llm)
    gc.collect()
    gc.freeze()  # what is loaded stays: looking through it again would hold up everybody each time
    worker.hello(llm.fingerprint, tokenizer)
    worker.run()


if __name__ == "__main__":
    main()
