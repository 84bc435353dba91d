"""What stands before every route: keys, the size of bodies, safe headers, and the log."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Iterable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outstride.serve.answers import dumps
from outstride.serve.metrics import Metrics
from outstride.serve.settings import PAGE_FILES, Refusal, ServeSettings

OPEN = frozenset({"/health"})
QUIET = frozenset({"/health", "/ready", "/metrics"})
"""Asked for all the time: counted, not logged."""
PAGES = frozenset({"/", *(f"/{name}" for name in PAGE_FILES)})
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Gate:
    """An ASGI application around another."""

    def __init__(self, inner: ASGIApp, settings: ServeSettings, metrics: Metrics) -> None:
        self._inner = inner
        self._settings = settings
        self._metrics = metrics
        # Digests have one length, so comparing them tells nothing of a key, not even how long it is.
        self._keys = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        started, status = time.monotonic(), 0
        about: dict[str, Any] = {}
        scope["outstride"] = about

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._harden(scope["path"], message)
            await send(message)

        try:
            about["tenant"] = self._tenant(scope)
            await self._inner(scope, self._bounded(scope, receive), noting)
        except Refusal as refusal:
            if not status:
                await refuse(refusal, noting)
        finally:
            self._note(scope, about.get("status", status), started, about)

    def _tenant(self, scope: Scope) -> str:
        """Who is asking, as a salt that keeps keys apart; raises if nobody with a key."""
        if not self._keys or scope["path"] in OPEN:
            return ""
        given = _credential(scope["headers"])
        digest = hashlib.sha256(given.encode()).digest()
        known = [hmac.compare_digest(digest, key) for key in self._keys]  # all of them, always
        if not any(known):
            scheme = "Basic" if scope["path"] in PAGES else "Bearer"
            raise Refusal(
                401,
                "this server wants an API key: send the header 'Authorization: Bearer KEY'",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": f'{scheme} realm="outstride"'},
            )
        return f"{digest.hex()[:16]} " if len(self._keys) > 1 else ""

    def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        """The body, refused as soon as it is known to be too long."""
        most, read = self._settings.bounds.body_bytes, 0
        refusal = Refusal(413, f"a body may have {most} bytes", code="body_too_large")
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > most:
                raise refusal

        async def bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > most:
                raise refusal
            return message

        return bounded

    @staticmethod
    def _harden(path: str, message: Message) -> None:
        headers = [*message.get("headers", []), (b"x-content-type-options", b"nosniff")]
        headers.append((b"referrer-policy", b"no-referrer"))
        if path in PAGES:
            headers.append((b"content-security-policy", CSP.encode()))
        message["headers"] = headers

    def _note(self, scope: Scope, status: int, started: float, about: dict[str, Any]) -> None:
        route = getattr(scope.get("route"), "path", None) or "other"
        self._metrics.requests.labels(route, str(status)).inc()
        if self._settings.log and route not in QUIET:
            line = {
                "time": round(time.time(), 3),
                "route": route,
                "verb": scope["method"],
                "status": status,
                "seconds": round(time.monotonic() - started, 4),
            }
            about.pop("tenant", None)
            self._metrics.line(line | about)


def _credential(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """A bearer token, or the password that a browser asks for."""
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


async def refuse(refusal: Refusal, send: Send) -> None:
    """Answers with an error."""
    body = dumps(refusal.body()).encode("utf-8", "replace")
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(k.encode(), v.encode()) for k, v in refusal.headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
