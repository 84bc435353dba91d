"""The HTTP application: routes, errors, CORS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import outstride
from outstride import registry
from outstride.serve import embeddings, prove, responses_api
from outstride.serve.chat_prompts import chat_text
from outstride.serve.engine_client import EngineDown
from outstride.serve.ipc import Gauges
from outstride.serve.metrics import CONTENT_TYPE
from outstride.serve.middleware import AccessMiddleware
from outstride.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from outstride.serve.responses import dumps
from outstride.serve.service import Service
from outstride.serve.settings import PAGE, PAGE_FILES, APIError, ServeSettings, invalid
from outstride.serve.streaming import StreamingReply
from outstride.serve.validation import StrictJSONRoute

_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request is wrong; `param` names the field"},
    404: {"description": "No such model"},
    408: {"description": "The deadline passed"},
    429: {"description": "The queue is full; Retry-After says when to try again"},
    500: {"description": "This request failed, and no other; the message has an id"},
    503: {"description": "The engine is not ready"},
}


SPECIAL_NAMES = ("bos", "eos", "pad", "unk", "mask")
"""Special tokens that `/tokenizer_info` names."""


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
    app.router.route_class = StrictJSONRoute
    _errors(app)
    _generation(app, service)
    prove.add(app, service, _ERRORS)
    embeddings.add(app, service, _ERRORS)
    responses_api.add(app, service, _ERRORS)
    _tokens(app, service)
    _state(app, service)
    _page(app)
    guarded = AccessMiddleware(app, settings, service.metrics)
    if not settings.origins:
        return guarded, service
    # Outermost: a preflight carries no API key, and a page may read an error only with CORS headers.
    cors = CORSMiddleware(
        guarded,
        allow_origins=list(settings.origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["retry-after", "www-authenticate", "x-request-id"],
    )
    return cors, service


def _errors(app: FastAPI) -> None:
    def answer(error: APIError) -> Response:
        body = dumps(error.body()).encode("utf-8", "replace")
        return Response(body, error.status, error.headers, media_type="application/json")

    @app.exception_handler(APIError)
    async def refused(_: Request, error: APIError) -> Response:
        return answer(error)

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, APIError):  # raised while the body was read
            return answer(error.__cause__)
        return answer(
            APIError(error.status_code, str(error.detail), headers=dict(error.headers or {}))
        )


def _tenant(request: Request) -> str:
    found: str = request.scope["outstride"]["tenant"]
    return found


def _generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", response_model=None, responses=_ERRORS)
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answers a conversation."""
        return StreamingReply(service.admit(await service.parser.chat(body, _tenant(request))))

    @app.post("/v1/completions", response_model=None, responses=_ERRORS)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continues texts."""
        return StreamingReply(
            service.admit(await service.parser.completion(body, _tenant(request)))
        )

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model, once per name, and its LoRA adapters."""
        names = (*service.parser.names, *service.parser.adapters)
        return {"object": "list", "data": [_model(name, service) for name in names]}

    @app.get("/v1/models/{name:path}", responses={404: _ERRORS[404]})
    async def model(name: str) -> dict[str, Any]:
        """The model, or the LoRA adapter, of this name."""
        if name not in (*service.parser.names, *service.parser.adapters):
            raise APIError(404, f"this server has no model {name!r}", code="model_not_found")
        return _model(name, service)

    @app.get("/v1/methods")
    async def methods() -> dict[str, Any]:
        """The methods that a request may choose from."""
        return {"object": "list", "data": [_method(entry) for entry in registry.entries()]}


def _model(name: str, service: Service) -> dict[str, Any]:
    handshake, parser = service.engine.handshake, service.parser
    adapter = name if name in parser.adapters else ""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "outstride",
        "parent": parser.names[0] if adapter else None,
        "context_length": handshake.context if handshake else None,
        "system_fingerprint": parser.fingerprint_of(adapter) if handshake else None,
        "operations": handshake.operations if handshake else None,
        "device": handshake.device if handshake else None,
        "weights": handshake.weights if handshake else None,
    }


def _method(entry: registry.MethodEntry) -> dict[str, Any]:
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
    parser = service.parser

    @app.post("/tokenize", responses={400: _ERRORS[400], 503: _ERRORS[503]})
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """Token ids of a text or a conversation."""
        if (body.prompt is None) == (body.messages is None):
            raise invalid("give either prompt or messages")
        if body.messages is not None:
            text = chat_text(
                parser.tokenizer,
                body.messages,
                body.tools or (),
                generation=body.add_generation_prompt,
                continue_final=bool(body.continue_final_message),
                variables=body.chat_template_kwargs,
            )
            tokens = await parser.encode(text, add_special=False)
        else:
            tokens = await parser.encode(body.prompt or "", body.add_special_tokens)
        found: dict[str, Any] = {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": parser.handshake.context,
        }
        if body.return_token_strs:
            found["token_strs"] = [parser.tokenizer.decode([t], skip_special=False) for t in tokens]
        return found

    @app.get("/tokenizer_info", responses={503: _ERRORS[503]})
    async def tokenizer_info() -> dict[str, Any]:
        """The special tokens and the chat template, as remote tokenizers ask for them."""
        tokenizer = parser.tokenizer
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{name}_token": tokenizer.named.get(f"{name}_token") for name in SPECIAL_NAMES},
            "eos_token_ids": sorted(tokenizer.eos_ids),
            "chat_template": tokenizer.chat_template,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": parser.handshake.context,
        }

    @app.post("/detokenize", responses={400: _ERRORS[400], 503: _ERRORS[503]})
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        """The text of token ids."""
        if any(token >= parser.handshake.vocab_size for token in body.tokens):
            raise invalid(
                f"a token is outside the vocabulary of {parser.handshake.vocab_size}", "tokens"
            )
        return {"prompt": parser.tokenizer.decode(body.tokens, skip_special=False)}


def _state(app: FastAPI, service: Service) -> None:
    async def gauges(timeout: float) -> Gauges | None:
        try:
            return await service.engine.ping(timeout)
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

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The version of this package."""
        return {"version": outstride.__version__}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(service.metrics.text(await gauges(2.0)), media_type=CONTENT_TYPE)


def _page(app: FastAPI) -> None:
    """The page, if its files are there."""

    def file(name: str) -> Response:
        path = PAGE / name
        if not path.is_file():
            raise APIError(404, "this build has no page; the API is under /v1")
        headers = {
            "cache-control": "no-cache"
        }  # a newer build has other files under the same names
        return Response(path.read_bytes(), media_type=PAGE_FILES[name], headers=headers)

    async def part(request: Request) -> Response:
        return file(request.url.path.lstrip("/") or "index.html")

    for path in ("", *PAGE_FILES):
        app.add_api_route(f"/{path}", part, include_in_schema=False, response_model=None)
