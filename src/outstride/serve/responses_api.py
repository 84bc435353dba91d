"""`/v1/responses`: OpenAI's newer API, over the same chats. Responses are kept in bounded memory."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.types import Send

from outstride.serve.parsing.tool_format import CONTENT, Part
from outstride.serve.responses import dumps
from outstride.serve.responses_output import Event, ResponseState
from outstride.serve.responses_protocol import ResponsesBody, to_chat, to_messages
from outstride.serve.service import InFlightRequest, Service
from outstride.serve.settings import APIError, invalid
from outstride.serve.streaming import STREAM_HEADERS, StreamingReply

MAX_RESPONSES = 1000
MAX_BYTES = 64 << 20
"""What is kept for `previous_response_id`; the oldest responses go first."""


@dataclass(slots=True)
class StoredResponse:
    """A response with the conversation that it belongs to."""

    state: ResponseState
    given: list[dict[str, Any]]
    """The messages of its own request."""
    earlier: list[dict[str, Any]]
    """The messages before them, without instructions."""
    request: InFlightRequest | None = None
    """While it runs."""
    size: int = 0

    def conversation(self) -> list[dict[str, Any]]:
        """Everything that a request after it continues."""
        return [*self.earlier, *self.given, *self.state.to_messages()]


class ResponseStore:
    """Responses by tenant and id, within bounds of count and size."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._found: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._bytes = 0

    def put(self, tenant: str, stored: StoredResponse) -> None:
        """Keeps a response, or counts the size that it has reached."""
        key = (tenant, stored.state.id)
        self.pop(*key)
        parts = (stored.given, stored.earlier, stored.state.output)
        stored.size = len(dumps(parts))
        self._found[key] = stored
        self._bytes += stored.size
        while len(self._found) > self._max_responses or self._bytes > self._max_bytes:
            self.pop(*next(iter(self._found)))

    def pop(self, tenant: str, name: str) -> StoredResponse | None:
        """Removes a response."""
        found = self._found.pop((tenant, name), None)
        self._bytes -= found.size if found else 0
        return found

    def get(self, tenant: str, name: str, param: str | None = None) -> StoredResponse:
        """A response that is kept; raises a 404."""
        found = self._found.get((tenant, name))
        if found is None:
            raise APIError(
                404,
                f"there is no response {name!r}: it was not stored, or has been dropped since",
                param=param,
                code="response_not_found",
            )
        return found


def add(app: FastAPI, service: Service, responses: dict[int | str, dict[str, Any]]) -> None:
    """Adds the routes."""
    store, tasks = ResponseStore(), set[asyncio.Task[None]]()

    def tenant_of(request: Request) -> str:
        found: str = request.scope["outstride"]["tenant"]
        return found

    @app.post("/v1/responses", response_model=None, responses=responses)
    async def create(body: ResponsesBody, request: Request) -> Response:
        """Answers a conversation, as chat completions do, and keeps it for the next request."""
        tenant = tenant_of(request)
        stored, in_flight = await _admit(service, store, body, tenant)
        reply = ResponsesReply(
            in_flight, stored, store if body.store is not False else None, tenant
        )
        if not body.background:
            return reply
        store.put(tenant, stored)
        task = asyncio.create_task(reply.run())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return _json(stored.state.to_json())

    @app.get("/v1/responses/{response_id}", response_model=None, responses={404: responses[404]})
    async def retrieve(response_id: str, request: Request) -> Response:
        """A response that was stored."""
        return _json(store.get(tenant_of(request), response_id).state.to_json())

    @app.get(
        "/v1/responses/{response_id}/input_items",
        response_model=None,
        responses={404: responses[404]},
    )
    async def input_items(response_id: str, request: Request) -> Response:
        """The messages that a stored response answered."""
        given = store.get(tenant_of(request), response_id).given
        data = [{"id": f"item_{i}", "type": "message", **item} for i, item in enumerate(given)]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        return _json({"object": "list", "data": data, "has_more": False, **ends})

    @app.delete("/v1/responses/{response_id}", responses={404: responses[404]})
    async def delete(response_id: str, request: Request) -> dict[str, Any]:
        """Drops a stored response."""
        store.get(tenant_of(request), response_id)
        store.pop(tenant_of(request), response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @app.post(
        "/v1/responses/{response_id}/cancel", response_model=None, responses={404: responses[404]}
    )
    async def cancel(response_id: str, request: Request) -> Response:
        """Ends a response that runs in the background."""
        found = store.get(tenant_of(request), response_id)
        if found.request is not None:
            found.state.status = "cancelled"
            found.request.abandon()
        return _json(found.state.to_json())


def _json(value: dict[str, Any]) -> Response:
    body = dumps(value).encode("utf-8", "replace")
    return Response(body, media_type="application/json")


async def _admit(
    service: Service, store: ResponseStore, body: ResponsesBody, tenant: str
) -> tuple[StoredResponse, InFlightRequest]:
    if body.background and body.stream:
        raise invalid("a response in the background cannot stream", "background")
    if body.background and body.store is False:
        raise invalid("a response in the background must be stored", "background")
    earlier: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        before = store.get(tenant, body.previous_response_id, "previous_response_id")
        if before.request is not None:
            raise invalid("the previous response is not complete yet", "previous_response_id")
        earlier = before.conversation()
    given = to_messages(body.input)
    try:
        parsed = await service.parser.chat(to_chat(body, earlier + given), tenant)
    except APIError as error:
        names = {"messages": "input", "response_format": "text", "max_completion_tokens": None}
        head = (error.param or "").partition(".")[0]
        error.param = names.get(head, error.param)
        raise
    request = service.admit(parsed)
    state = ResponseState(body, parsed.adapter or service.parser.names[0])
    return StoredResponse(state, given, earlier, request), request


class ResponsesReply(StreamingReply):
    """The HTTP answer to a request for a response, whole or as events."""

    def __init__(
        self,
        request: InFlightRequest,
        stored: StoredResponse,
        store: ResponseStore | None,
        tenant: str,
    ) -> None:
        super().__init__(request)
        self._stored, self._store, self._tenant = stored, store, tenant

    async def _events(self) -> AsyncIterator[list[Event]]:
        """Runs the request; the events of each pass."""
        request, state = self._request, self._stored.state
        yield state.begin()
        try:
            async with aclosing(request.batches()) as batches:
                async for batch in batches:
                    events: list[Event] = []
                    for place, output in batch:
                        choice = request.response.add(place, output)
                        parts = choice.fresh
                        if choice.parser is None:
                            parts = [Part(CONTENT, output.text)] if output.text else []
                        for part in parts:
                            events += state.add(part)
                    if events:
                        yield events
            [choice] = request.response.choices
            yield state.end(choice.end, request.response.usage())
        finally:
            self._stored.request = None
            request.close()
        if self._store is not None:
            self._store.put(self._tenant, self._stored)

    async def run(self) -> None:
        """Runs the request in the background."""
        state = self._stored.state
        try:
            async for _ in self._events():
                pass
        except APIError as error:
            if state.status != "cancelled":
                state.fail(error.code or "server_error", error.message)

    async def _whole(self, send: Send) -> None:
        async for _ in self._events():
            pass
        body = dumps(self._stored.state.to_json()).encode("utf-8", "replace")
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        """Sends nothing before the first part: what fails until then still gets a status."""
        waiting: list[Event] = []
        begun = False
        try:
            async for events in self._events():
                waiting += events
                if not begun and len(waiting) <= 2:
                    continue  # the response has begun, and nothing else
                if not begun:
                    begun = True
                    await send(
                        {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}
                    )
                await send(_body(waiting))
                waiting = []
        except APIError as error:
            if not begun or error.status == 499:
                raise
            state = self._stored.state
            await send(_body(waiting + state.fail(error.code or "server_error", error.message)))
            self._request.failure = error
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _body(events: list[Event]) -> dict[str, Any]:
    text = "".join(f"event: {event['type']}\ndata: {dumps(event)}\n\n" for event in events)
    return {
        "type": "http.response.body",
        "body": text.encode("utf-8", "replace"),
        "more_body": True,
    }
