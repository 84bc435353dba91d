"""How an answer leaves: whole or as server-sent events, watched for clients that hang up."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outstride.serve.answers import dumps
from outstride.serve.gate import refuse
from outstride.serve.service import DONE, Call
from outstride.serve.settings import Refusal

_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
_GONE = 499
"""The client closed the connection: nobody is there to read a status."""


class Reply(Response):
    """A call's answer."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._call
        watcher = asyncio.create_task(self._watch(receive))
        status = 200
        try:
            if call.order.stream:
                await self._stream(send)
            else:
                await self._whole(send)
        except Refusal as refusal:
            status = refusal.status
            if refusal.status != _GONE:
                await refuse(refusal, send)
        except OSError:
            status = _GONE
        finally:
            call.close()
            watcher.cancel()
            scope.get("outstride", {}).update(self._about(status))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._call.abandon()

    async def _whole(self, send: Send) -> None:
        answer = await self._call.whole()
        body = dumps(answer.whole()).encode("utf-8", "replace")
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        """Nothing is sent before the first text: what fails until then still gets a status."""
        begun = False
        try:
            async for chunks in self._call.chunks():
                if not begun:
                    begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
                await send(_events(chunks, more=True))
        except Refusal as refusal:
            if not begun or refusal.status == _GONE:
                raise
            await send(_events([dumps(refusal.body()), DONE], more=True))
            self._call.failure = refusal
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _about(self, status: int) -> dict[str, Any]:
        """For the log: figures, never texts."""
        call = self._call
        usage = call.answer.usage()
        if status == 200 and call.failure is not None:
            status = call.failure.status
        return {
            "id": call.answer.id,
            "status": status,
            "stream": call.order.stream,
            "method": usage["outstride"]["method"],
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "passes": usage["outstride"]["passes"],
            "first_token_seconds": None if call.first is None else round(call.first, 4),
            "finish": [c.end.reason if c.end else None for c in call.answer.choices],
        }


def _events(chunks: list[str], *, more: bool) -> dict[str, Any]:
    text = "".join([f"data: {chunk}\n\n" for chunk in chunks])
    return {
        "type": "http.response.body",
        "body": text.encode("utf-8", "replace"),
        "more_body": more,
    }
