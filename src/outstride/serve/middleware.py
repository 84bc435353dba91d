"""Middleware around every route: API keys, the size of bodies, security headers, and the log."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Iterable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outstride.serve.metrics import Metrics
from outstride.serve.responses import dumps
from outstride.serve.settings import PAGE_FILES, APIError, ServeSettings

OPEN = frozenset({"/health"})
QUIET = frozenset({"/health", "/ready", "/metrics"})
"""Polled all the time: counted, not logged."""
PAGES = frozenset({"/", *(f"/{name}" for name in PAGE_FILES)})
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
"""Ids of requests that clients may choose: no white space and no control characters."""


class AccessMiddleware:
    """An ASGI application around another: checks keys and body sizes, and logs requests."""

    def __init__(self, inner: ASGIApp, settings: ServeSettings, metrics: Metrics) -> None:
        self._inner = inner
        self._settings = settings
        self._metrics = metrics
        # Digests have one length, so comparing them reveals nothing about a key, not even its length.
        self._keys = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        started, status = time.monotonic(), 0
        fields: dict[str, Any] = {}
        scope["outstride"] = fields
        request_id = fields["request_id"] = _request_id(scope["headers"])

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._add_headers(scope["path"], message, request_id)
            await send(message)

        try:
            fields["tenant"] = self._tenant(scope)
            await self._inner(scope, self._bounded(scope, receive), send_with_headers)
        except APIError as refusal:
            if not status:
                await refuse(refusal, send_with_headers)
        finally:
            self._log(scope, fields.get("status", status), started, fields)

    def _tenant(self, scope: Scope) -> str:
        """A cache salt per API key, so that tenants share nothing; raises if the key is wrong."""
        if not self._keys or scope["path"] in OPEN:
            return ""
        given = _credential(scope["headers"])
        digest = hashlib.sha256(given.encode()).digest()
        known = [
            hmac.compare_digest(digest, key) for key in self._keys
        ]  # compares with all of them, always
        if not any(known):
            scheme = "Basic" if scope["path"] in PAGES else "Bearer"
            raise APIError(
                401,
                "this server needs an API key: send the header 'Authorization: Bearer KEY'",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": f'{scheme} realm="outstride"'},
            )
        return f"{digest.hex()[:16]} " if len(self._keys) > 1 else ""

    def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        """The body; raises as soon as it is known to be too long."""
        limit, read = self._settings.bounds.body_bytes, 0
        refusal = APIError(
            413, f"the body is too long: the limit is {limit} bytes", code="body_too_large"
        )
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                raise refusal

        async def bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > limit:
                raise refusal
            return message

        return bounded

    @staticmethod
    def _add_headers(path: str, message: Message, request_id: str) -> None:
        headers = [*message.get("headers", []), (b"x-content-type-options", b"nosniff")]
        headers.append((b"x-request-id", request_id.encode("ascii")))
        headers.append((b"referrer-policy", b"no-referrer"))
        if path in PAGES:
            headers.append((b"content-security-policy", CSP.encode()))
        message["headers"] = headers

    def _log(self, scope: Scope, status: int, started: float, fields: dict[str, Any]) -> None:
        route = getattr(scope.get("route"), "path", None) or "other"
        self._metrics.http_requests.labels(route, str(status)).inc()
        if self._settings.log and route not in QUIET:
            line = {
                "time": round(time.time(), 3),
                "route": route,
                "verb": scope["method"],
                "status": status,
                "seconds": round(time.monotonic() - started, 4),
            }
            fields.pop("tenant", None)
            self._metrics.log_request(line | fields)


def _request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The id that the client gave its request, or a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode("ascii")
    return f"req_{secrets.token_hex(12)}"


def _credential(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """A bearer token, or the password of basic authentication, which browsers ask the user for."""
    for name, value in headers:
        if name != b"authorization":
            continue
        scheme, _, rest = value.decode("latin-1").partition(" ")
        if scheme.lower() == "bearer":
            return rest.strip()
        if scheme.lower() == "basic":
            try:
                return base64.b64decode(rest, validate=True).decode().partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                return ""
    return ""


async def refuse(refusal: APIError, send: Send) -> None:
    """Answers with an error."""
    body = dumps(refusal.body()).encode("utf-8", "replace")
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(k.encode(), v.encode()) for k, v in refusal.headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
