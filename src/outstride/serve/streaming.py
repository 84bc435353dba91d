"""Sending an answer: whole or as server-sent events, cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outstride.serve.middleware import refuse
from outstride.serve.responses import dumps
from outstride.serve.service import DONE, InFlightRequest
from outstride.serve.settings import APIError

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
_GONE = 499
"""The client closed the connection: no status can be sent."""


class StreamingReply(Response):
    """The HTTP response to a request in flight."""

    def __init__(self, request: InFlightRequest) -> None:
        super().__init__()
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = self._request
        disconnect = asyncio.create_task(self._cancel_on_disconnect(receive))
        status = 200
        try:
            if request.parsed.stream:
                await self._stream(send)
            else:
                await self._whole(send)
        except APIError as refusal:
            status = refusal.status
            if refusal.status != _GONE:
                await refuse(refusal, send)
        except OSError:
            status = _GONE
        finally:
            request.close()
            disconnect.cancel()
            scope.get("outstride", {}).update(self._log_fields(status))

    async def _cancel_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._request.abandon()

    async def _whole(self, send: Send) -> None:
        response = await self._request.whole()
        body = dumps(response.whole()).encode("utf-8", "replace")
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        """Sends nothing before the first chunk: what fails until then still gets a status."""
        begun = False
        try:
            async for chunks in self._request.chunks():
                if not begun:
                    begun = True
                    await send(
                        {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}
                    )
                await send(_events(chunks, more=True))
        except APIError as refusal:
            if not begun or refusal.status == _GONE:
                raise
            await send(_events([dumps(refusal.body()), DONE], more=True))
            self._request.failure = refusal
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _log_fields(self, status: int) -> dict[str, Any]:
        """For the log: counts and states, never text."""
        request = self._request
        usage, first = request.response.usage(), request.time_to_first_token
        if status == 200 and request.failure is not None:
            status = request.failure.status
        return {
            "id": request.response.id,
            "status": status,
            "stream": request.parsed.stream,
            "method": usage["outstride"]["method"],
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "passes": usage["outstride"]["passes"],
            "time_to_first_token_seconds": first if first is None else round(first, 4),
            "finish": [c.end.reason if c.end else None for c in request.response.choices],
        }


def _events(chunks: list[str], *, more: bool) -> dict[str, Any]:
    text = "".join([f"data: {chunk}\n\n" for chunk in chunks])
    return {
        "type": "http.response.body",
        "body": text.encode("utf-8", "replace"),
        "more_body": more,
    }
