"""One request under plain decoding and under a method: are the answers equal?

Both run in the same batch, together with other requests. At the first token that differs, two short
requests find the log-probability of either token; their difference is that of the logits.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from pydantic import Field
from starlette.types import Send

from outstride import registry
from outstride.core.contracts import Exactness
from outstride.core.params import SamplingParams
from outstride.serve.protocol import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    SamplingBody,
    Text,
    TokenIds,
)
from outstride.serve.requests import ParsedRequest
from outstride.serve.responses import ChoiceBuilder, ResponseBuilder, dumps
from outstride.serve.service import InFlightRequest, Service
from outstride.serve.settings import APIError, invalid
from outstride.serve.streaming import StreamingReply
from outstride.serve.validation import validated

PLAIN = "plain"
BEFORE = 60
"""Characters of the common text that an answer shows before a divergence."""


class ProveBody(SamplingBody):
    """/v1/outstride/prove: a chat or a completion; `outstride` names the method to compare."""

    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=10_000)
    prompt: Text | Annotated[TokenIds, Field(min_length=1)] | None = None
    max_completion_tokens: int | None = Field(None, ge=1)


def add(app: FastAPI, service: Service, responses: dict[int | str, dict[str, Any]]) -> None:
    """Adds the route."""

    @app.post("/v1/outstride/prove", response_model=None, responses=responses)
    async def prove(body: ProveBody, request: Request) -> Response:
        """Runs a request under plain decoding and under a method, and compares the answers."""
        tenant: str = request.scope["outstride"]["tenant"]
        parsed = await _parse(service, body, tenant)
        return ProofReply(service.admit(parsed), service)


async def _parse(service: Service, body: ProveBody, tenant: str) -> ParsedRequest:
    """Two engine requests: the baseline first, then the method."""
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either prompt or messages")
    if body.stream:
        raise invalid("a proof cannot stream: leave stream out", "stream")
    values = body.model_dump(exclude_unset=True, by_alias=True)
    if body.seed is None:  # the same one for both
        values["seed"] = secrets.randbits(48)
    if body.messages is not None:
        values.pop("prompt", None)
        parsed = await service.parser.chat(validated(ChatBody, values), tenant)
    else:
        values.pop("messages", None)
        if (limit := values.pop("max_completion_tokens", None)) is not None:
            values.setdefault("max_tokens", limit)
        parsed = await service.parser.completion(validated(CompletionBody, values), tenant)
    [request] = parsed.engine_requests
    baseline = replace(request, method=registry.baseline(request.method))
    return replace(parsed, engine_requests=[baseline, request])


def first_divergence(plain: ChoiceBuilder, other: ChoiceBuilder) -> int | None:
    """The index of the first output token that differs; None if the answers are equal."""
    assert plain.end is not None
    assert other.end is not None
    ours, theirs = plain.end.tokens, other.end.tokens
    for at, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return at
    if len(ours) != len(theirs):
        return min(len(ours), len(theirs))
    same = (plain.text, plain.end.reason) == (other.text, other.end.reason)
    return None if same else len(ours)


class ProofReply(StreamingReply):
    """The HTTP response to a proof."""

    def __init__(self, request: InFlightRequest, service: Service) -> None:
        super().__init__(request)
        self._service = service

    async def _whole(self, send: Send) -> None:
        body = dumps(await self._result(await self._request.whole())).encode("utf-8", "replace")
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _result(self, response: ResponseBuilder) -> dict[str, Any]:
        parsed, samples = self._request.parsed, self._request.parsed.samples
        baseline, judged = (request.method for request in parsed.engine_requests)
        entry, _ = registry.parse(judged)
        whole = response.whole()
        choices = []
        for i in range(samples):
            plain, other = response.choices[i], response.choices[samples + i]
            at = first_divergence(plain, other)
            found = None if at is None else await self._divergence(plain, other, at, baseline)
            assert plain.end is not None
            choices.append(
                {
                    "index": i,
                    "equal": at is None,
                    "text": plain.text,
                    "tokens": len(plain.end.tokens),
                    "passes": {
                        name: _passes(c)
                        for name, c in zip(("plain", "method"), (plain, other), strict=True)
                    },
                    "divergence": found,
                }
            )
        equal = all(choice["equal"] for choice in choices)
        own = whole["usage"]["outstride"]
        return {
            "id": whole["id"],
            "object": "outstride.proof",
            "created": whole["created"],
            "model": whole["model"],
            "system_fingerprint": whole["system_fingerprint"],
            "method": judged,
            "exactness": entry.exactness.value,
            "baseline": baseline,
            "seed": own["seed"],
            "equal": equal,
            "broken": not equal and entry.exactness is Exactness.EXACT,
            "choices": choices,
        }

    async def _divergence(
        self, plain: ChoiceBuilder, other: ChoiceBuilder, at: int, baseline: str
    ) -> dict[str, Any]:
        assert plain.end is not None
        assert other.end is not None
        common = plain.end.tokens[:at]
        tokens = [e.tokens[at] if at < len(e.tokens) else None for e in (plain.end, other.end)]
        known: dict[int, float] = {}
        if baseline == PLAIN:  # on a canvas, the logits depend on the step
            known = await self._logprobs(common, [t for t in tokens if t is not None])
        decode = self._service.parser.tokenizer.decode

        def side(token: int | None, reason: str) -> dict[str, Any]:
            if token is None:
                return {"token": None, "text": "", "logprob": None, "finish_reason": reason}
            text = decode([token], skip_special=False)
            return {"token": token, "text": text, "logprob": known.get(token)}

        both = tokens[0] in known and tokens[1] in known
        return {
            "position": at,
            "before": decode(common)[-BEFORE:],
            "plain": side(tokens[0], plain.end.reason),
            "method": side(tokens[1], other.end.reason),
            "gap": known[tokens[0] or 0] - known[tokens[1] or 0] if both else None,
        }

    async def _logprobs(self, common: list[int], tokens: list[int]) -> dict[int, float]:
        """Log-probabilities of tokens after the common text; none where the context is too short."""
        baseline = self._request.parsed.engine_requests[0]
        prompt = baseline.tokens + common
        if not tokens or len(prompt) + 2 > self._service.parser.handshake.context:
            return {}
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        requests = [
            replace(baseline, tokens=[*prompt, token], params=params, output_format=None)
            for token in tokens
        ]
        parsed = replace(
            self._request.parsed, engine_requests=requests, samples=1, prompt_logprobs=0
        )
        try:
            response = await self._service.admit(parsed).whole()
        except APIError:
            return {}
        rows = [response.prompts[place][-1] for place in range(len(tokens))]
        return {int(row[0][0]): float(row[0][1]) for row in rows if row is not None}


def _passes(choice: ChoiceBuilder) -> int:
    return int(choice.end.counts["passes"]) if choice.end is not None else 0
