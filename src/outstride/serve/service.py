"""Requests in flight: admission, deadlines, clients that disconnect, engines that die."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from outstride.models.tokenizer import Tokenizer
from outstride.serve.engine_client import EngineClient, EngineDown
from outstride.serve.ipc import EngineFault, EngineOutput, Handshake
from outstride.serve.metrics import Metrics
from outstride.serve.requests import ParsedRequest, RequestParser
from outstride.serve.responses import ResponseBuilder
from outstride.serve.settings import APIError, ServeSettings, invalid

DONE = "[DONE]"
"""The last event of a stream."""


class InFlightRequest:
    """One request from its admission to its last output."""

    def __init__(self, service: Service, parsed: ParsedRequest, response: ResponseBuilder) -> None:
        self.parsed = parsed
        self.response = response
        self.time_to_first_token: float | None = None
        """Seconds; None until then, and for requests that do not stream."""
        self.failure: APIError | None = None
        self.started = time.monotonic()
        self._service = service
        self._ids: dict[int, int] = {}
        self._outputs: asyncio.Queue[tuple[int, EngineOutput] | None] = asyncio.Queue()
        self._unfinished = len(parsed.engine_requests)
        self._closed = False
        self._last_output: dict[tuple[int, int], float] = {}
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(parsed.deadline, self._expire)

    def begin(self) -> None:
        """Submits to the engine."""
        engine = self._service.engine
        try:
            for place, request in enumerate(self.parsed.engine_requests):
                number = engine.submit(
                    request,
                    lambda output, p=place: self._outputs.put_nowait((p, output)),  # type: ignore[misc]
                )
                self._ids[place] = number
        except EngineDown:
            self.close()
            raise self._service.down() from None

    def abandon(self) -> None:
        """Ends a request whose client has disconnected."""
        self.failure = self.failure or APIError(499, "the client closed the connection")
        self.close()

    def _expire(self) -> None:
        self.failure = APIError(
            408,
            f"the request took longer than {self.parsed.deadline:g} seconds",
            kind="timeout_error",
            code="deadline_exceeded",
        )
        self.close()

    def close(self) -> None:
        """Ends the request in any state; engine requests that still run are cancelled."""
        if self._closed:
            return
        self._closed = True
        self._timer.cancel()
        for number in self._ids.values():
            self._service.engine.cancel(number)
        self._outputs.put_nowait(None)
        self._service.leave(self)

    # --- the answer ---------------------------------------------------------------------------------

    async def batches(self) -> AsyncGenerator[list[tuple[int, EngineOutput]], None]:
        """Outputs as they arrive, in batches: a slow reader gets more at once. Raises failures."""
        while self._unfinished:
            batch = [await self._outputs.get()]
            while not self._outputs.empty():
                batch.append(self._outputs.get_nowait())
            found = []
            for item in batch:
                if item is None:
                    self._unfinished = 0
                    break
                place, output = item
                if output.fault is not None:
                    self.failure = self._to_http_error(output.fault)
                    self._unfinished = 0
                    break
                if output.done:
                    del self._ids[place]
                    self._unfinished -= 1
                found.append(item)
            if found:
                if self.parsed.stream:
                    self._measure(found)
                yield found
        if self.failure is not None:
            raise self.failure

    def _measure(self, batch: list[tuple[int, EngineOutput]]) -> None:
        """Time to first token, and the time between two outputs of the same answer."""
        now = time.monotonic()
        if self.time_to_first_token is None:
            self.time_to_first_token = now - self.started
        for place, output in batch:
            answer = (place, output.sample)
            if (before := self._last_output.get(answer)) is not None:
                self._service.metrics.inter_token_latency.observe(now - before)
            self._last_output[answer] = now

    def _to_http_error(self, fault: EngineFault) -> APIError:
        if fault.kind == "request":
            return APIError(400, fault.message)
        if fault.kind == "grammar":
            return invalid(fault.message, self.parsed.shape_param or None)
        error_id = f"err_{secrets.token_hex(6)}"
        self._service.metrics.log_fault(error_id, fault)
        message = f"{fault.message} ({error_id})"
        if fault.kind == "engine":
            return APIError(503, message, kind="server_error", code="engine_died")
        return APIError(500, message, kind="server_error", code=error_id)

    async def whole(self) -> ResponseBuilder:
        """Waits for the end."""
        try:
            async for batch in self.batches():
                for place, output in batch:
                    self.response.add(place, output)
        finally:
            self.close()
        return self.response

    async def chunks(self) -> AsyncIterator[list[str]]:
        """Chunks of a stream as they come, in batches; `DONE` is the last one."""
        response = self.response
        try:
            async for batch in self.batches():
                found: list[str] = []
                for place, output in batch:
                    found += response.chunks(response.add(place, output), output)
                if found:
                    yield found
            yield [response.usage_chunk(), DONE] if self.parsed.include_usage else [DONE]
        finally:
            self.close()


class Service:
    """Admits requests and owns the engine client, the request parser and the metrics."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.parser = RequestParser(settings)
        self.engine = EngineClient(
            settings.engine,
            on_engine_dead=self.metrics.engine_restarts.inc,
            on_ready=self._engine_ready,
            on_failed_permanently=lambda: self.on_failed_permanently(),
        )
        self.on_failed_permanently: Callable[[], None] = lambda: None
        """Called when no engine can be started."""
        self.on_ready: Callable[[Handshake], None] = lambda handshake: None
        """Called each time an engine has started and answers."""
        self.draining = False
        self._in_flight: set[InFlightRequest] = set()
        self._load = 0
        """Answers in flight."""
        self._mean_seconds = 1.0
        """How long a request takes, as a moving average."""

    async def start(self) -> None:
        await self.engine.start()

    async def close(self) -> None:
        """Ends everything."""
        self.abort_all()
        await self.engine.close()

    def abort_all(self) -> None:
        """Ends what still runs, with an error."""
        for request in list(self._in_flight):
            request.failure = self._stopping()
            request.close()

    @staticmethod
    def _stopping() -> APIError:
        return APIError(503, "the server is stopping", kind="server_error", code="stopping")

    def _engine_ready(self, handshake: Handshake, tokenizer: Tokenizer) -> None:
        self.parser.on_ready(handshake, tokenizer)
        self.on_ready(handshake)

    def down(self) -> APIError:
        """The error for requests that come while no engine is ready."""
        return APIError(
            503,
            "the engine is not ready; try again in a few seconds",
            kind="server_error",
            code="not_ready",
            headers={"retry-after": "5"},
        )

    def admit(self, parsed: ParsedRequest) -> InFlightRequest:
        """Submits a request; raises at once if the queue is full or no engine is ready."""
        if self.draining:
            raise self._stopping()
        if not self.engine.ready:
            raise self.down()
        capacity = self.settings.engine.max_sequences + self.settings.queue
        size = len(parsed.engine_requests) * parsed.samples
        if size > capacity:
            raise APIError(400, f"the request asks for {size} answers; {capacity} is the maximum")
        if self._load + size > capacity:
            self.metrics.requests_rejected.inc()
            wait = self._load * self._mean_seconds / self.settings.engine.max_sequences
            raise APIError(
                429,
                "too many requests are waiting; try again later",
                kind="rate_limit_error",
                code="queue_full",
                headers={"retry-after": str(min(max(round(wait), 1), 60))},
            )
        fingerprint = self.parser.fingerprint_of(parsed.adapter)
        name = parsed.adapter or self.parser.names[0]
        response = ResponseBuilder(parsed, self.parser.tokenizer, name, fingerprint)
        request = InFlightRequest(self, parsed, response)
        self._in_flight.add(request)
        self._load += size
        self.metrics.in_flight.set(self._load)
        request.begin()
        return request

    def leave(self, request: InFlightRequest) -> None:
        """Counts a request that has ended."""
        if request not in self._in_flight:
            return
        self._in_flight.discard(request)
        parsed = request.parsed
        self._load -= len(parsed.engine_requests) * parsed.samples
        seconds = time.monotonic() - request.started
        self._mean_seconds += 0.1 * (seconds - self._mean_seconds)
        self.metrics.in_flight.set(self._load)
        self.metrics.finished(request.response, seconds, request.time_to_first_token)
