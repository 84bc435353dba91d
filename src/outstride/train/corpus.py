"""Writes a corpus with one process or several: which process writes which text, and when to stop.

Numbers are assigned in order and texts finish in any order; they are sorted again before they are
written. So a folder always holds the first n texts of the one corpus that its spec defines.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outstride.errors import InvalidParams, OutstrideError
from outstride.llm import LLM
from outstride.models.load import PAGE_SIZE, load
from outstride.train.corpus_files import Corpus, CorpusText
from outstride.train.generate_data import CorpusGenerator, CorpusSpec
from outstride.train.interrupt import deferred_interrupt

PER_SHARD = 512
"""Texts of a shard, except the last one."""
SEQUENCES_PER_PROCESS = 128
"""Largest useful number of sequences per process on a GPU: it scores no more rows at once."""
MAX_UNUSABLE = 1000
"""Consecutive unusable prompts after which writing fails."""
Say = Callable[["CorpusProgress"], None]


@dataclass(frozen=True, slots=True)
class CorpusProgress:
    """Progress of writing."""

    texts: int
    tokens: int
    """Answer tokens in the folder."""
    rate: float
    """Tokens per second of this run."""
    share: float
    """Share of the goal that is done."""
    left: float
    """Estimated seconds left."""
    ended: bool = False


@dataclass(frozen=True, slots=True)
class CorpusGoal:
    """When to stop: a number of answer tokens in the folder, or a number of minutes of this run."""

    tokens: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.minutes is None):
            raise InvalidParams("say how much to write: a number of tokens or of minutes")
        much = self.minutes if self.tokens is None else self.tokens
        if much is None or much <= 0:
            raise InvalidParams("tokens and minutes are above 0")


@dataclass(slots=True)
class CorpusWriter:
    """Sorts finished texts, drops those with a known prompt, and writes shards."""

    corpus: Corpus
    goal: CorpusGoal
    show: Say
    next: int = 0
    """The first number that is not decided."""
    tokens: int = 0
    texts: int = 0
    dropped: int = 0
    full: bool = False
    _out_of_order: dict[int, CorpusText | None] = field(default_factory=dict)
    """Texts that finished before one with a lower number."""
    _shard: list[CorpusText] = field(default_factory=list)
    _seen: set[tuple[int, ...]] = field(default_factory=set)
    _began: float = field(default_factory=time.monotonic)
    _reported: float = 0.0
    _initial_tokens: int = 0
    """Tokens in the folder at the start of this run."""
    _new_tokens: int = 0
    """Tokens that finished in this run, in order or not."""

    @classmethod
    def at(cls, corpus: Corpus, goal: CorpusGoal, show: Say) -> CorpusWriter:
        """A writer that continues an existing corpus folder."""
        writer = cls(corpus, goal, show)
        for shard in corpus.shards():
            for text in shard.texts():
                writer._count(text)
            writer.next = shard.next_number
        writer._initial_tokens = writer.tokens
        writer.full = goal.tokens is not None and writer.tokens >= goal.tokens
        return writer

    def start(self) -> None:
        """Starts the clock."""
        self._began = self._reported = time.monotonic()

    @property
    def enough(self) -> bool:
        """Whether no new text should be started."""
        if self.goal.minutes is not None:
            return time.monotonic() - self._began >= 60.0 * self.goal.minutes
        return self.full

    def take(self, number: int, text: CorpusText | None) -> None:
        """Takes the text of a number, or None if its prompt is unusable."""
        self._out_of_order[number] = text
        self._new_tokens += len(text.tokens) - text.prompt if text else 0
        while self.next in self._out_of_order and not self.full:
            self._settle(self._out_of_order.pop(self.next))
        self.report()

    def _settle(self, text: CorpusText | None) -> None:
        self.next += 1
        if text is None or tuple(text.tokens[: text.prompt]) in self._seen:
            self.dropped += 1
        else:
            self._shard.append(text)
            self._count(text)
            self.full = self.goal.tokens is not None and self.tokens >= self.goal.tokens
        if len(self._shard) >= PER_SHARD:
            self.flush()
        if self.dropped >= MAX_UNUSABLE and not self.texts:
            raise OutstrideError(
                f"{self.dropped} prompts came out empty or overlong and none was of use; "
                "raise --max-prompt, or give --prompts"
            )

    def _count(self, text: CorpusText) -> None:
        self._seen.add(tuple(text.tokens[: text.prompt]))
        self.texts += 1
        self.tokens += len(text.tokens) - text.prompt

    def flush(self) -> None:
        """Writes the sorted texts that are not written yet."""
        if self._shard:
            self.corpus.append(self._shard, self.next)
            self._shard = []
            self.corpus.note(texts=self.texts, tokens=self.tokens)

    def report(self, *, ended: bool = False) -> None:
        """Reports progress, at most twice a second."""
        now = time.monotonic()
        if not ended and now - self._reported < 0.5:
            return
        self._reported = now
        seconds = max(now - self._began, 1e-9)
        rate = self._new_tokens / seconds
        if self.goal.minutes is not None:
            share, left = seconds / (60.0 * self.goal.minutes), 60.0 * self.goal.minutes - seconds
        else:
            wanted = self.goal.tokens or 1
            came = min(self._initial_tokens + self._new_tokens, wanted)
            share, left = came / wanted, (wanted - came) / max(rate, 1e-9)
        self.show(
            CorpusProgress(self.texts, self.tokens, rate, min(share, 1.0), max(left, 0.0), ended)
        )


@dataclass(frozen=True, slots=True)
class CorpusEngines:
    """The model, and the number of processes and sequences."""

    model: str
    weights: str = "auto"
    concurrency: int = 32
    """Sequences at once, over all processes."""
    workers: int = 1
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.workers < 1:
            raise InvalidParams("concurrency and workers are at least 1")

    @property
    def concurrency_per_worker(self) -> int:
        """Sequences at once in one process."""
        return -(-self.concurrency // self.workers)

    def load(self, spec: CorpusSpec) -> LLM:
        """A model with KV cache pages for all of its sequences."""
        pages = self.concurrency_per_worker * -(-spec.longest // PAGE_SIZE) + 64
        found = load(self.model, pages=pages, device=self.device, weights=self.weights)
        return LLM(
            found,
            max_nodes=max(256, 8 * self.concurrency_per_worker),
            max_sequences=self.concurrency_per_worker,
        )


def write(engines: CorpusEngines, spec: CorpusSpec, writer: CorpusWriter) -> None:
    """Writes until the goal is reached. Ctrl-C keeps the finished texts that are in order."""
    if writer.enough:
        return
    with deferred_interrupt() as asked:
        try:
            if engines.workers == 1:
                _alone(engines, spec, writer, asked)
            else:
                _together(engines, spec, writer, asked)
        finally:
            writer.flush()
            writer.report(ended=True)
        if asked():
            raise KeyboardInterrupt


def _alone(
    engines: CorpusEngines, spec: CorpusSpec, writer: CorpusWriter, asked: Callable[[], bool]
) -> None:
    next_number = writer.next

    def numbers() -> int | None:
        nonlocal next_number
        if writer.enough:
            return None
        next_number += 1
        return next_number - 1

    with engines.load(spec) as llm:
        generator = CorpusGenerator(llm, spec, engines.concurrency_per_worker, numbers, writer.take)
        writer.start()
        generator.run(lambda: writer.full or asked())


# --- several processes ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Shared:
    """State that the processes share."""

    counter: Any
    """The next number to assign."""
    enough: Any
    """Set when no more texts should be started."""
    outbox: Any
    """(number, text), an exception, or READY or DONE."""


READY, DONE = "ready", "done"


def _together(
    engines: CorpusEngines, spec: CorpusSpec, writer: CorpusWriter, asked: Callable[[], bool]
) -> None:
    spawn = multiprocessing.get_context("spawn")
    shared = _Shared(spawn.Value("q", writer.next), spawn.Event(), spawn.SimpleQueue())
    processes = [
        spawn.Process(target=_work, args=(engines, spec, shared), daemon=True)
        for _ in range(engines.workers)
    ]
    for process in processes:
        process.start()
    try:
        running, begun = len(processes), False
        while running and _message(processes, shared, asked):
            message = shared.outbox.get()
            if isinstance(message, BaseException):
                raise message
            if message == READY:
                if not begun:
                    writer.start()
                begun = True
            elif message == DONE:
                running -= 1
            else:
                writer.take(*message)
            if begun and writer.enough:
                shared.enough.set()
            if writer.full:
                return
    finally:
        shared.enough.set()
        for process in processes:
            process.terminate()
            process.join()


def _message(processes: Sequence[Any], shared: _Shared, asked: Callable[[], bool]) -> bool:
    """Waits for a message, or for an interrupt (False).

    A process that ends without a message is an error.
    """
    while shared.outbox.empty():
        if asked():
            return False
        if codes := [process.exitcode for process in processes if process.exitcode]:
            raise OutstrideError(
                f"a writer process ended with code {codes[0]}; perhaps memory ran out: "
                "try fewer --workers or a lower --concurrency, the same command goes on"
            )
        time.sleep(0.01)
    return not asked()


def _work(engines: CorpusEngines, spec: CorpusSpec, shared: _Shared) -> None:
    """One of several processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process decides when it ends

    def numbers() -> int | None:
        if shared.enough.is_set():
            return None
        with shared.counter.get_lock():
            shared.counter.value += 1
            return int(shared.counter.value) - 1

    try:
        with engines.load(spec) as llm:
            generator = CorpusGenerator(
                llm,
                spec,
                engines.concurrency_per_worker,
                numbers,
                lambda *done: shared.outbox.put(done),
            )
            shared.outbox.put(READY)
            generator.run()
        shared.outbox.put(DONE)
    except Exception as error:
        text = str(error) if isinstance(error, OutstrideError) else repr(error)
        shared.outbox.put(OutstrideError(text))
