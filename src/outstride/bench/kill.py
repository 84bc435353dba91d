"""Kills a server's engine under load: which clients get a response, and when the server is ready
again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from outstride.bench.serve import Client, StreamedResponse
from outstride.errors import OutstrideError

PATH = "/v1/chat/completions"
ENGINE = b"outstride.serve.worker"
READY_TIMEOUT = 60.0
"""Seconds after which a server that is not ready again has failed."""


def engine_of(server: int) -> int:
    """Process id of a server's engine; the server must run on this machine."""
    try:
        children = Path(f"/proc/{server}/task/{server}/children").read_text(encoding="ascii")
        for child in children.split():
            if ENGINE in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    except OSError as error:
        raise OutstrideError(f"process {server} cannot be inspected: {error}") from error
    raise OutstrideError(
        f"process {server} has no engine process; give the process id of `outstride serve`"
    )


async def kill(
    client: Client,
    model: str,
    server: int,
    *,
    clients: int = 16,
    tokens: int = 600,
    warm: float = 0.5,
) -> dict[str, Any]:
    """Kills the engine while clients wait, half of them streaming."""
    requests = [
        asyncio.create_task(client.send(PATH, _body(model, number, tokens)))
        for number in range(clients)
    ]
    await asyncio.sleep(warm)
    os.kill(engine_of(server), signal.SIGKILL)
    killed = time.perf_counter()
    done, silent = await asyncio.wait(requests, timeout=READY_TIMEOUT)
    answered = time.perf_counter() - killed
    for request in silent:
        request.cancel()
    await _ready(client, killed + READY_TIMEOUT)
    again = time.perf_counter() - killed
    after = await client.send(PATH, _body(model, 0, 4))
    return {
        "clients": clients,
        "outcomes": dict(Counter(_outcome(request.result()) for request in done)),
        "silent": len(silent),
        "all_answered_s": round(answered, 2),
        "ready_again_s": round(again, 2),
        "serves_again": after.status == 200 and not after.error,
    }


def _body(model: str, number: int, tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"Tell me about the number {number}."}],
        "max_tokens": tokens,
        "stream": number % 2 == 1,
        "ignore_eos": True,
    }


def _outcome(found: StreamedResponse) -> str:
    if found.status == 200 and found.finish and not found.error:
        return "answered"
    return "error" if found.status >= 500 or found.error else f"status {found.status}"


async def _ready(client: Client, until: float) -> None:
    while (await client.send("/ready")).status != 200:
        if time.perf_counter() > until:
            raise OutstrideError(f"the server is not ready again within {READY_TIMEOUT:g} s")
        await asyncio.sleep(0.05)
