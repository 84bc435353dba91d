"""Who writes which text of a corpus, and when it is enough: one process or several, one folder.

Numbers are handed out in order and texts come back in any; they are put in order again before they go
to disk. So what is written is always the first so many texts of one corpus that the order defines.
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
from outstride.train.patience import patient
from outstride.train.words import Text, Words
from outstride.train.write import Order, Scribe

PER_SHARD = 512
"""Texts of a shard, but for the last one."""
HEAD = 128
"""So many sequences a process on a card serves well: it scores no more rows at once."""
HOPELESS = 1000
"""Prompts in a row that may be of no use."""
Say = Callable[["Standing"], None]


@dataclass(frozen=True, slots=True)
class Standing:
    """How far it is."""

    texts: int
    tokens: int
    """Of answers, in all."""
    rate: float
    """Tokens per second of this run."""
    share: float
    """Of what was asked for."""
    left: float
    """Seconds, about."""
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Goal:
    """When it is enough: so many tokens of answers in the folder, or so many minutes of this run."""

    tokens: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.minutes is None):
            raise InvalidParams("say how much to write: a number of tokens or of minutes")
        much = self.minutes if self.tokens is None else self.tokens
        if much is None or much <= 0:
            raise InvalidParams("tokens and minutes are above 0")


@dataclass(slots=True)
class Desk:
    """Puts finished texts in order, drops those whose prompt was there, and writes shards."""

    words: Words
    goal: Goal
    say: Say
    next: int = 0
    """The number behind all that are decided."""
    tokens: int = 0
    texts: int = 0
    dropped: int = 0
    full: bool = False
    _early: dict[int, Text | None] = field(default_factory=dict)
    """Texts that are done although one before them is not."""
    _shard: list[Text] = field(default_factory=list)
    _seen: set[tuple[int, ...]] = field(default_factory=set)
    _began: float = field(default_factory=time.monotonic)
    _told: float = 0.0
    _at: int = 0
    """Tokens that were there when this run began."""
    _fresh: int = 0
    """Tokens that came in during this run, in order or not."""

    @classmethod
    def at(cls, words: Words, goal: Goal, say: Say) -> Desk:
        """Behind what a folder holds already."""
        desk = cls(words, goal, say)
        for shard in words.shards():
            for text in shard.texts():
                desk._count(text)
            desk.next = shard.after
        desk._at = desk.tokens
        desk.full = goal.tokens is not None and desk.tokens >= goal.tokens
        return desk

    def start(self) -> None:
        """Now the writing begins, and time counts."""
        self._began = self._told = time.monotonic()

    @property
    def enough(self) -> bool:
        """Whether no new text is to be begun."""
        if self.goal.minutes is not None:
            return time.monotonic() - self._began >= 60.0 * self.goal.minutes
        return self.full

    def take(self, number: int, text: Text | None) -> None:
        """A number is decided."""
        self._early[number] = text
        self._fresh += len(text.tokens) - text.prompt if text else 0
        while self.next in self._early and not self.full:
            self._settle(self._early.pop(self.next))
        self.tell()

    def _settle(self, text: Text | None) -> None:
        self.next += 1
        if text is None or tuple(text.tokens[: text.prompt]) in self._seen:
            self.dropped += 1
        else:
            self._shard.append(text)
            self._count(text)
            self.full = self.goal.tokens is not None and self.tokens >= self.goal.tokens
        if len(self._shard) >= PER_SHARD:
            self.flush()
        if self.dropped >= HOPELESS and not self.texts:
            raise OutstrideError(
                f"{self.dropped} prompts came out empty or overlong and none was of use; "
                "raise --max-prompt, or give --prompts"
            )

    def _count(self, text: Text) -> None:
        self._seen.add(tuple(text.tokens[: text.prompt]))
        self.texts += 1
        self.tokens += len(text.tokens) - text.prompt

    def flush(self) -> None:
        """Writes what is there and in order."""
        if self._shard:
            self.words.append(self._shard, self.next)
            self._shard = []
            self.words.note(texts=self.texts, tokens=self.tokens)

    def tell(self, *, ended: bool = False) -> None:
        """Says now and then how far it is."""
        now = time.monotonic()
        if not ended and now - self._told < 0.5:
            return
        self._told = now
        seconds = max(now - self._began, 1e-9)
        rate = self._fresh / seconds
        if self.goal.minutes is not None:
            share, left = seconds / (60.0 * self.goal.minutes), 60.0 * self.goal.minutes - seconds
        else:
            wanted = self.goal.tokens or 1
            came = min(self._at + self._fresh, wanted)
            share, left = came / wanted, (wanted - came) / max(rate, 1e-9)
        self.say(Standing(self.texts, self.tokens, rate, min(share, 1.0), max(left, 0.0), ended))


@dataclass(frozen=True, slots=True)
class Engines:
    """Which model, and how many of it."""

    model: str
    weights: str = "auto"
    concurrency: int = 32
    """Sequences at once, in all processes together."""
    workers: int = 1

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.workers < 1:
            raise InvalidParams("concurrency and workers are at least 1")

    @property
    def each(self) -> int:
        """Sequences at once in one process."""
        return -(-self.concurrency // self.workers)

    def load(self, order: Order) -> LLM:
        """A model with room for all of its sequences."""
        pages = self.each * -(-order.longest // PAGE_SIZE) + 64
        found = load(self.model, pages=pages, weights=self.weights)
        return LLM(found, max_nodes=max(256, 8 * self.each), max_sequences=self.each)


def write(engines: Engines, order: Order, desk: Desk) -> None:
    """Writes into the desk's folder until it is enough. Ctrl-C keeps what is done and in order."""
    if desk.enough:
        return
    with patient() as asked:
        try:
            if engines.workers == 1:
                _alone(engines, order, desk, asked)
            else:
                _together(engines, order, desk, asked)
        finally:
            desk.flush()
            desk.tell(ended=True)
        if asked():
            raise KeyboardInterrupt


def _alone(engines: Engines, order: Order, desk: Desk, asked: Callable[[], bool]) -> None:
    next_number = desk.next

    def numbers() -> int | None:
        nonlocal next_number
        if desk.enough:
            return None
        next_number += 1
        return next_number - 1

    with engines.load(order) as llm:
        scribe = Scribe(llm, order, engines.each, numbers, desk.take)
        desk.start()
        scribe.run(lambda: desk.full or asked())


# --- several processes ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Shared:
    """What processes have in common."""

    counter: Any
    """The next number to hand out."""
    enough: Any
    """Set when no more texts are to be begun."""
    outbox: Any
    """(number, text), an exception, or a word on how far a process is."""


READY, DONE = "ready", "done"


def _together(engines: Engines, order: Order, desk: Desk, asked: Callable[[], bool]) -> None:
    spawn = multiprocessing.get_context("spawn")
    shared = _Shared(spawn.Value("q", desk.next), spawn.Event(), spawn.SimpleQueue())
    processes = [
        spawn.Process(target=_work, args=(engines, order, shared), daemon=True)
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
                    desk.start()
                begun = True
            elif message == DONE:
                running -= 1
            else:
                desk.take(*message)
            if begun and desk.enough:
                shared.enough.set()
            if desk.full:
                return
    finally:
        shared.enough.set()
        for process in processes:
            process.terminate()
            process.join()


def _message(processes: Sequence[Any], shared: _Shared, asked: Callable[[], bool]) -> bool:
    """Waits for a message, or for somebody who wants an end.

    A process that died without a word is an error.
    """
    while shared.outbox.empty():
        if asked():
            return False
        if codes := [process.exitcode for process in processes if process.exitcode]:
            raise OutstrideError(
                f"a process that writes ended with code {codes[0]}; perhaps memory ran out: "
                "try fewer --workers or a lower --concurrency, the same command goes on"
            )
        time.sleep(0.01)
    return not asked()


def _work(engines: Engines, order: Order, shared: _Shared) -> None:
    """One of several processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it decides when it ends

    def numbers() -> int | None:
        if shared.enough.is_set():
            return None
        with shared.counter.get_lock():
            shared.counter.value += 1
            return int(shared.counter.value) - 1

    try:
        with engines.load(order) as llm:
            scribe = Scribe(
                llm, order, engines.each, numbers, lambda *done: shared.outbox.put(done)
            )
            shared.outbox.put(READY)
            scribe.run()
        shared.outbox.put(DONE)
    except Exception as error:
        text = str(error) if isinstance(error, OutstrideError) else repr(error)
        shared.outbox.put(OutstrideError(text))
