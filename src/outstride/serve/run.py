"""`serve`: the server as a program, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Generator
from types import FrameType

import uvicorn

from outstride.serve.app import make_app
from outstride.serve.service import Service
from outstride.serve.settings import ServeSettings

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LATE = 5.0
"""Seconds after the grace period for what was cut off to be told so."""


class _Server(uvicorn.Server):
    """Stops as it is told: once to finish what runs, twice to drop it. Either way it ends with 0."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        self._service.on_hopeless = self._give_up
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            self._service.cut()
            return
        self.should_exit = True
        self._service.draining = True
        asyncio.get_running_loop().call_later(self._service.settings.grace, self._service.cut)

    def _give_up(self) -> None:
        self.should_exit = True


def serve(settings: ServeSettings, host: str, port: int) -> int:
    """Runs until a signal comes; the exit code."""
    app, service = make_app(settings)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.grace + _LATE),
        timeout_keep_alive=30,
        limit_concurrency=None,
        backlog=1024,
    )
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _Server(config, service).run()
    return 1 if service.link.hopeless else 0
