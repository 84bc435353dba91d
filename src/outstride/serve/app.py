"""The routes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import outstride
from outstride import registry
from outstride.serve import prove
from outstride.serve.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from outstride.serve.gate import Gate
from outstride.serve.link import EngineDown
from outstride.serve.metrics import CONTENT_TYPE
from outstride.serve.reply import Reply
from outstride.serve.service import Service
from outstride.serve.settings import PAGE, PAGE_FILES, Refusal, ServeSettings, invalid
from outstride.serve.wire import Gauges

_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request is wrong; the message says where"},
    404: {"description": "No such model"},
    408: {"description": "The deadline passed"},
    429: {"description": "The queue is full; Retry-After says when to come back"},
    500: {"description": "This request failed, and only this one; the message has an id"},
    503: {"description": "The engine is not ready"},
}


def make_app(settings: ServeSettings) -> tuple[ASGIApp, Service]:
    """The whole server as an ASGI application."""
    service = Service(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.close()

    app = FastAPI(
        title="Outstride",
        version=outstride.__version__,
        description="Same model, same seed, same text, fewer passes.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    _errors(app)
    _generation(app, service)
    prove.add(app, service, _ERRORS)
    _tokens(app, service)
    _state(app, service)
    _page(app)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    return Gate(app, settings, service.metrics), service


def _errors(app: FastAPI) -> None:
    def answer(refusal: Refusal) -> Response:
        return JSONResponse(refusal.body(), refusal.status, refusal.headers)

    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Refusal) -> Response:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        place = place.encode("utf-8", "replace").decode()[:200]
        return answer(invalid(f"{place}: {first['msg']}" if place else first["msg"], place or None))

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, Refusal):  # while the body was read
            return answer(error.__cause__)
        return answer(
            Refusal(error.status_code, str(error.detail), headers=dict(error.headers or {}))
        )


def _tenant(request: Request) -> str:
    found: str = request.scope["outstride"]["tenant"]
    return found


def _generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", response_model=None, responses=_ERRORS)
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answers a conversation."""
        return Reply(service.admit(await service.clerk.chat(body, _tenant(request))))

    @app.post("/v1/completions", response_model=None, responses=_ERRORS)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continues texts."""
        return Reply(service.admit(await service.clerk.completion(body, _tenant(request))))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model, under its names."""
        return {"object": "list", "data": [_model(name, service) for name in service.clerk.names]}

    @app.get("/v1/models/{name:path}", responses={404: _ERRORS[404]})
    async def model(name: str) -> dict[str, Any]:
        """The model, if it is called that."""
        if name not in service.clerk.names:
            raise Refusal(404, f"there is no model {name!r} here", code="model_not_found")
        return _model(name, service)

    @app.get("/v1/methods")
    async def methods() -> dict[str, Any]:
        """The methods that a request may choose from."""
        return {"object": "list", "data": [_method(entry) for entry in registry.entries()]}


def _model(name: str, service: Service) -> dict[str, Any]:
    hello = service.link.hello
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "outstride",
        "context_length": hello.context if hello else None,
        "system_fingerprint": hello.fingerprint if hello else None,
        "operations": hello.operations if hello else None,
    }


def _method(entry: registry.Entry) -> dict[str, Any]:
    return {
        "id": entry.name,
        "family": entry.family,
        "summary": entry.summary,
        "exactness": entry.exactness.value,
        "needs": list(entry.needs),
        "paper": entry.paper,
        "cost": entry.cost,
        "options": [
            {
                "name": option.name,
                "type": option.type.__name__,
                "default": option.default,
                "required": option.required,
            }
            for option in entry.options
        ],
    }


def _tokens(app: FastAPI, service: Service) -> None:
    clerk = service.clerk

    @app.post("/tokenize", responses={400: _ERRORS[400], 503: _ERRORS[503]})
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """Token ids of a text or a conversation."""
        if (body.prompt is None) == (body.messages is None):
            raise invalid("give prompt or messages, one of them")
        if body.messages is not None:
            text = clerk.chat_text(body.messages, [], body.add_generation_prompt)
            tokens = await clerk.encode(text, add_special=False)
        else:
            tokens = await clerk.encode(body.prompt or "", body.add_special_tokens)
        found: dict[str, Any] = {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": clerk.hello.context,
        }
        if body.return_token_strs:
            found["token_strs"] = [clerk.tokenizer.decode([t], skip_special=False) for t in tokens]
        return found

    @app.post("/detokenize", responses={400: _ERRORS[400], 503: _ERRORS[503]})
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        """The text of token ids."""
        if any(token >= clerk.hello.vocab_size for token in body.tokens):
            raise invalid(
                f"a token is outside the vocabulary of {clerk.hello.vocab_size}", "tokens"
            )
        return {"prompt": clerk.tokenizer.decode(body.tokens, skip_special=False)}


def _state(app: FastAPI, service: Service) -> None:
    async def gauges(timeout: float) -> Gauges | None:
        try:
            return await service.link.ping(timeout)
        except (EngineDown, TimeoutError):
            return None

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether this process answers."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: _ERRORS[503]})
    async def ready() -> dict[str, str]:
        """Whether the model answers."""
        if service.draining or await gauges(5.0) is None:
            raise service.down()
        return {"status": "ready"}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.text(await gauges(2.0)), media_type=CONTENT_TYPE)


def _page(app: FastAPI) -> None:
    """The page, if its files are there."""

    def file(name: str) -> Response:
        path = PAGE / name
        if not path.is_file():
            raise Refusal(404, "this build has no page; the API is under /v1")
        headers = {"cache-control": "no-cache"}  # a newer build has newer files under these names
        return Response(path.read_bytes(), media_type=PAGE_FILES[name], headers=headers)

    async def part(request: Request) -> Response:
        return file(request.url.path.lstrip("/") or "index.html")

    for path in ("", *PAGE_FILES):
        app.add_api_route(f"/{path}", part, include_in_schema=False, response_model=None)
