"""`serve`: runs the server until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

import uvicorn

from outstride.serve.app import make_app
from outstride.serve.ipc import Handshake
from outstride.serve.service import Service
from outstride.serve.settings import ServeSettings

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOGGED = ("model", "fingerprint", "device", "weights", "context", "capacity", "kv_bytes")
_ABORT_SECONDS = 5.0
"""Seconds after the grace period in which aborted requests get their error."""


class _Server(uvicorn.Server):
    """The first signal lets running requests finish, the second aborts them. The exit code is 0."""

    def __init__(
        self, config: uvicorn.Config, service: Service, on_ready: Callable[[Handshake, str], None]
    ) -> None:
        super().__init__(config)
        self._service = service
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        self._service.on_failed_permanently = self._stop
        self._service.on_ready = self._announce
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            self._service.abort_all()
            return
        self.should_exit = True
        self._service.draining = True
        asyncio.get_running_loop().call_later(self._service.settings.grace, self._service.abort_all)

    def _stop(self) -> None:
        self.should_exit = True

    def _announce(self, handshake: Handshake) -> None:
        """Says that requests are answered from now on, and at which address."""
        sockets = self.servers[0].sockets if self.servers else ()
        port = sockets[0].getsockname()[1] if sockets else self.config.port
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        address = f"http://{host}:{port}"
        self._on_ready(handshake, address)
        if self._service.settings.log:
            line: dict[str, Any] = {"time": round(time.time(), 3), "event": "ready"}
            line |= {name: getattr(handshake, name) for name in _LOGGED}
            self._service.metrics.log_request(
                line | {"address": address, "method": self._service.settings.method}
            )


def serve(
    settings: ServeSettings,
    host: str,
    port: int,
    on_ready: Callable[[Handshake, str], None] = lambda handshake, address: None,
) -> int:
    """Runs until a signal comes; returns the exit code, 1 if no engine could be started.

    on_ready: called when an engine has started, with its handshake and the address of the server.
    """
    app, service = make_app(settings)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.grace + _ABORT_SECONDS),
        timeout_keep_alive=30,
        limit_concurrency=None,
        backlog=1024,
    )
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _Server(config, service, on_ready).run()
    return 1 if service.engine.failed_permanently else 0
