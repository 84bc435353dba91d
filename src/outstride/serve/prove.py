"""One request under plain decoding and under a method, side by side: are they the same?

Both run as one call with two jobs, in whatever company there is. Where they part, two short requests
find out how likely each of the two tokens was; their log-probabilities differ as their logits do.
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
from outstride.serve.answers import Answer, Choice, dumps
from outstride.serve.bodies import ChatBody, CompletionBody, Message, Sampled, Text, TokenIds
from outstride.serve.orders import Order
from outstride.serve.reply import Reply
from outstride.serve.service import Call, Service
from outstride.serve.settings import Refusal, invalid

PLAIN = "plain"
BEFORE = 60
"""Characters of the common text that are shown before a divergence."""


class ProveBody(Sampled):
    """/v1/outstride/prove: a chat or a completion, and in `outstride` the method to be held to it."""

    messages: list[Message] | None = Field(None, min_length=1, max_length=10_000)
    prompt: Text | Annotated[TokenIds, Field(min_length=1)] | None = None
    max_completion_tokens: int | None = Field(None, ge=1)


def add(app: FastAPI, service: Service, responses: dict[int | str, dict[str, Any]]) -> None:
    """Adds the route."""

    @app.post("/v1/outstride/prove", response_model=None, responses=responses)
    async def prove(body: ProveBody, request: Request) -> Response:
        """Runs a request under plain decoding and under a method, and compares the answers."""
        tenant: str = request.scope["outstride"]["tenant"]
        order = await _order(service, body, tenant)
        return Proof(service.admit(order), service)


async def _order(service: Service, body: ProveBody, tenant: str) -> Order:
    """Two jobs: the baseline first, then the method."""
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give prompt or messages, one of them")
    if body.stream:
        raise invalid("a proof comes whole: leave stream out", "stream")
    values = body.model_dump(exclude_unset=True, by_alias=True)
    if body.seed is None:  # the same one for both
        values["seed"] = secrets.randbits(48)
    if body.messages is not None:
        values.pop("prompt", None)
        order = await service.clerk.chat(ChatBody.model_validate(values), tenant)
    else:
        values.pop("messages", None)
        if (most := values.pop("max_completion_tokens", None)) is not None:
            values.setdefault("max_tokens", most)
        order = await service.clerk.completion(CompletionBody.model_validate(values), tenant)
    if order.silent or len(order.jobs) != 1:
        raise invalid("one prompt and at least one token are needed to prove anything")
    [job] = order.jobs
    return replace(order, jobs=[replace(job, method=registry.baseline(job.method)), job])


def parting(plain: Choice, other: Choice) -> int | None:
    """At which output token two answers part; None if they are the same."""
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


class Proof(Reply):
    """The answer to a proof."""

    def __init__(self, call: Call, service: Service) -> None:
        super().__init__(call)
        self._service = service

    async def _whole(self, send: Send) -> None:
        body = dumps(await self._told(await self._call.whole())).encode("utf-8", "replace")
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _told(self, answer: Answer) -> dict[str, Any]:
        order, samples = self._call.order, self._call.order.samples
        baseline, judged = (job.method for job in order.jobs)
        entry, _ = registry.parse(judged)
        whole = answer.whole()
        choices = []
        for i in range(samples):
            plain, other = answer.choices[i], answer.choices[samples + i]
            at = parting(plain, other)
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
        self, plain: Choice, other: Choice, at: int, baseline: str
    ) -> dict[str, Any]:
        assert plain.end is not None
        assert other.end is not None
        said = plain.end.tokens[:at]
        tokens = [e.tokens[at] if at < len(e.tokens) else None for e in (plain.end, other.end)]
        known: dict[int, float] = {}
        if baseline == PLAIN:  # on a canvas, the logits depend on the step
            known = await self._logprobs(said, [t for t in tokens if t is not None])
        spell = self._service.clerk.tokenizer.decode

        def side(token: int | None, reason: str) -> dict[str, Any]:
            if token is None:
                return {"token": None, "text": "", "logprob": None, "finish_reason": reason}
            text = spell([token], skip_special=False)
            return {"token": token, "text": text, "logprob": known.get(token)}

        both = tokens[0] in known and tokens[1] in known
        return {
            "position": at,
            "before": spell(said)[-BEFORE:],
            "plain": side(tokens[0], plain.end.reason),
            "method": side(tokens[1], other.end.reason),
            "gap": known[tokens[0] or 0] - known[tokens[1] or 0] if both else None,
        }

    async def _logprobs(self, said: list[int], tokens: list[int]) -> dict[int, float]:
        """How likely tokens are behind what was said; nothing where there is no room to ask."""
        job = self._call.order.jobs[0]
        prompt = job.tokens + said
        if not tokens or len(prompt) + 2 > self._service.clerk.hello.context:
            return {}
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        jobs = [
            replace(job, tokens=[*prompt, token], params=params, shape=None) for token in tokens
        ]
        order = replace(self._call.order, jobs=jobs, samples=1, prompt_logprobs=0)
        try:
            answer = await self._service.admit(order).whole()
        except Refusal:
            return {}
        rows = [answer.prompts[place][-1] for place in range(len(tokens))]
        return {int(row[0][0]): float(row[0][1]) for row in rows if row is not None}


def _passes(choice: Choice) -> int:
    return int(choice.end.counts["passes"]) if choice.end is not None else 0
