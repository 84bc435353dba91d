"""`/v1/embeddings`: a vector of length 1 for each input, from the model's last hidden states.

An input runs through the one loop like any prompt, so its vector has the same bits in every batch.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from starlette.types import Send

from outstride.serve.protocol import CompletionBody, DecodingOptions, EmbeddingBody
from outstride.serve.requests import ParsedRequest
from outstride.serve.responses import ResponseBuilder, dumps
from outstride.serve.service import InFlightRequest, Service
from outstride.serve.settings import APIError, invalid
from outstride.serve.streaming import StreamingReply
from outstride.serve.validation import validated


def add(app: FastAPI, service: Service, responses: dict[int | str, dict[str, Any]]) -> None:
    """Adds the route."""

    @app.post("/v1/embeddings", response_model=None, responses=responses)
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        """Embeds texts."""
        tenant: str = request.scope["outstride"]["tenant"]
        parsed = await _parse(service, body, tenant)
        return EmbeddingReply(service.admit(parsed), body)


async def _parse(service: Service, body: EmbeddingBody, tenant: str) -> ParsedRequest:
    values: dict[str, Any] = {
        "prompt": body.input,
        "model": body.model,
        "max_tokens": 0,
        "echo": True,
        "temperature": 0.0,
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
        "cache_salt": body.cache_salt,
        "priority": body.priority,
        "outstride": DecodingOptions(method="plain").model_dump(exclude_none=True),
    }
    try:
        parsed = await service.parser.completion(validated(CompletionBody, values), tenant)
    except APIError as error:
        if error.param == "prompt":
            error.param = "input"
        raise
    pooling = body.pooling or "mean"
    parsed.engine_requests = [
        replace(request, params=replace(request.params, pooling=pooling))
        for request in parsed.engine_requests
    ]
    return parsed


class EmbeddingReply(StreamingReply):
    """The HTTP response to a request for embeddings."""

    def __init__(self, request: InFlightRequest, body: EmbeddingBody) -> None:
        super().__init__(request)
        self._body = body

    async def _whole(self, send: Send) -> None:
        value = self._value(await self._request.whole())
        body = dumps(value).encode("utf-8", "replace")
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _value(self, response: ResponseBuilder) -> dict[str, Any]:
        data = []
        for choice in response.choices:
            vector = None if choice.end is None else choice.end.embedding
            if vector is None:
                raise APIError(500, "the engine returned no embedding", kind="server_error")
            data.append(
                {"object": "embedding", "index": choice.index, "embedding": self._encoded(vector)}
            )
        usage = response.usage()
        counts = {name: usage[name] for name in ("prompt_tokens", "total_tokens")}
        model = response.whole()["model"]
        return {"object": "list", "data": data, "model": model, "usage": counts}

    def _encoded(self, vector: np.ndarray[Any, np.dtype[np.float32]]) -> list[float] | str:
        if (size := self._body.dimensions) is not None:
            if size > len(vector):
                raise invalid(f"dimensions may be {len(vector)} at most", "dimensions")
            vector = vector[:size]
            norm = float(np.linalg.norm(vector))
            vector = (vector / norm if norm > 0 else vector).astype(np.float32)
        if self._body.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return [float(value) for value in vector]
