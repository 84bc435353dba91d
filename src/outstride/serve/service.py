"""Requests under way: admission, deadlines, clients that leave, engines that die."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable

from outstride.serve.answers import Answer
from outstride.serve.link import EngineDown, EngineLink
from outstride.serve.metrics import Metrics
from outstride.serve.orders import Clerk, Order
from outstride.serve.settings import Refusal, ServeSettings
from outstride.serve.wire import Fault, News

DONE = "[DONE]"


class Call:
    """One request from its admission to its last word."""

    def __init__(self, service: Service, order: Order, answer: Answer) -> None:
        self.order = order
        self.answer = answer
        self.first: float | None = None
        self.failure: Refusal | None = None
        self.started = time.monotonic()
        self._service = service
        self._numbers: dict[int, int] = {}
        self._inbox: asyncio.Queue[tuple[int, News] | None] = asyncio.Queue()
        self._left = len(order.jobs)
        self._closed = False
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(order.deadline, self._expire)

    def begin(self) -> None:
        """Hands the jobs to the engine."""
        link = self._service.link
        try:
            for place, job in enumerate(self.order.jobs):
                number = link.submit(job, lambda news, p=place: self._inbox.put_nowait((p, news)))  # type: ignore[misc]
                self._numbers[place] = number
        except EngineDown:
            self.close()
            raise self._service.down() from None

    def abandon(self) -> None:
        """The client has gone: nobody wants the rest."""
        self.failure = self.failure or Refusal(499, "the client closed the connection")
        self.close()

    def _expire(self) -> None:
        self.failure = Refusal(
            408,
            f"the request took longer than {self.order.deadline:g} seconds",
            kind="timeout_error",
            code="deadline_exceeded",
        )
        self.close()

    def close(self) -> None:
        """Ends the call, whatever its state; what still runs is cancelled at once."""
        if self._closed:
            return
        self._closed = True
        self._timer.cancel()
        for number in self._numbers.values():
            self._service.link.cancel(number)
        self._inbox.put_nowait(None)
        self._service.leave(self)

    # --- the answer ---------------------------------------------------------------------------------

    async def _news(self) -> AsyncIterator[list[tuple[int, News]]]:
        """What has arrived, in batches: a slow reader gets the more at once. Raises what went wrong."""
        while self._left:
            batch = [await self._inbox.get()]
            while not self._inbox.empty():
                batch.append(self._inbox.get_nowait())
            found = []
            for item in batch:
                if item is None:
                    self._left = 0
                    break
                place, news = item
                if news.fault is not None:
                    self.failure = self._blame(news.fault)
                    self._left = 0
                    break
                if news.done:
                    del self._numbers[place]
                    self._left -= 1
                found.append(item)
            if found:
                if self.first is None:
                    self.first = time.monotonic() - self.started
                yield found
        if self.failure is not None:
            raise self.failure

    def _blame(self, fault: Fault) -> Refusal:
        if fault.kind == "request":
            return Refusal(400, fault.message)
        name = f"err_{secrets.token_hex(6)}"
        self._service.report(name, fault)
        if fault.kind == "engine":
            return Refusal(
                503, f"{fault.message} ({name})", kind="server_error", code="engine_died"
            )
        return Refusal(500, f"{fault.message} ({name})", kind="server_error", code=name)

    async def whole(self) -> Answer:
        """Waits for everything."""
        try:
            async for batch in self._news():
                for place, news in batch:
                    self.answer.take(place, news)
        finally:
            self.close()
        return self.answer

    async def chunks(self) -> AsyncIterator[list[str]]:
        """Chunks as they come, in batches; the last one is the mark of the end."""
        answer = self.answer
        try:
            async for batch in self._news():
                found: list[str] = []
                for place, news in batch:
                    found += answer.chunks(answer.take(place, news), news)
                if found:
                    yield found
            yield [answer.last_chunk(), DONE] if self.order.usage else [DONE]
        finally:
            self.close()


class Service:
    """The engine's front desk."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.clerk = Clerk(settings)
        self.link = EngineLink(
            settings.engine, self._died, self.clerk.meet, lambda: self.on_hopeless()
        )
        self.on_hopeless: Callable[[], None] = lambda: None
        """Called when no engine can be started."""
        self.draining = False
        self._calls: set[Call] = set()
        self._load = 0
        self._seconds = 1.0
        """What an answer takes, on average."""

    async def start(self) -> None:
        await self.link.start()

    async def close(self) -> None:
        """Ends everything."""
        self.cut()
        await self.link.close()

    def cut(self) -> None:
        """Ends what still runs, with an error."""
        for call in list(self._calls):
            call.failure = Refusal(
                503, "the server is stopping", kind="server_error", code="stopping"
            )
            call.close()

    def _died(self) -> None:
        self.metrics.restarts.inc()

    def report(self, name: str, fault: Fault) -> None:
        """Puts on record what the client is told only by its name."""
        self.metrics.fault(name, fault)

    def down(self) -> Refusal:
        return Refusal(
            503,
            "the engine is not ready; try again in a few seconds",
            kind="server_error",
            code="not_ready",
            headers={"retry-after": "5"},
        )

    def admit(self, order: Order) -> Call:
        """Takes a request in, or refuses it at once."""
        if self.draining:
            raise Refusal(503, "the server is stopping", kind="server_error", code="stopping")
        if not self.link.ready:
            raise self.down()
        room = self.settings.engine.max_sequences + self.settings.queue
        size = len(order.jobs) * order.samples
        if size > room:
            raise Refusal(400, f"{size} answers are wanted; {room} are the most at a time")
        if self._load + size > room:
            self.metrics.refused.inc()
            wait = self._load * self._seconds / self.settings.engine.max_sequences
            raise Refusal(
                429,
                "too many requests are waiting; try again later",
                kind="rate_limit_error",
                code="queue_full",
                headers={"retry-after": str(min(max(round(wait), 1), 60))},
            )
        hello = self.clerk.hello
        answer = Answer(order, self.clerk.tokenizer, self.clerk.names[0], hello.fingerprint)
        call = Call(self, order, answer)
        self._calls.add(call)
        self._load += size
        self.metrics.running.set(self._load)
        call.begin()
        return call

    def leave(self, call: Call) -> None:
        """A call is over."""
        if call not in self._calls:
            return
        self._calls.discard(call)
        order = call.order
        self._load -= len(order.jobs) * order.samples
        seconds = time.monotonic() - call.started
        self._seconds += 0.1 * (seconds - self._seconds)
        self.metrics.running.set(self._load)
        self.metrics.answered(call.answer, seconds, call.first)
