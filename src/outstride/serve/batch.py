"""OpenAI's batch files without a server: a request per line in, an answer per line out.

Answers are appended as they come, a line at a time. A run that was interrupted continues: requests that
have an answer in the output are not run again, unless the answer is a server error.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outstride.errors import InvalidParams
from outstride.serve.protocol import ChatBody, CompletionBody
from outstride.serve.requests import ParsedRequest
from outstride.serve.responses import dumps
from outstride.serve.service import Service
from outstride.serve.settings import APIError, ServeSettings
from outstride.serve.validation import validated

URLS = ("/v1/chat/completions", "/v1/completions")
ATTEMPTS = 3
"""How often a request is tried when its engine dies."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request of a batch file."""

    id: str
    url: str
    body: dict[str, Any]


def read(path: Path) -> list[BatchRequest]:
    """The requests of a file; raises `InvalidParams` with the line if one is wrong."""
    found: dict[str, BatchRequest] = {}
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not text.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(text)
        except ValueError as error:
            raise InvalidParams(f"{where}: not JSON: {error}") from error
        if not isinstance(value, dict) or not isinstance(value.get("body"), dict):
            raise InvalidParams(f"{where}: an object with custom_id, url and body is needed")
        name, url = value.get("custom_id"), value.get("url")
        if not isinstance(name, str) or not name:
            raise InvalidParams(f"{where}: custom_id is missing")
        if name in found:
            raise InvalidParams(f"{where}: custom_id {name!r} occurs twice")
        if value.get("method", "POST") != "POST" or url not in URLS:
            raise InvalidParams(f"{where}: the url must be one of {', '.join(URLS)}, with POST")
        found[name] = BatchRequest(name, url, value["body"])
    return list(found.values())


def resume(path: Path) -> dict[str, int]:
    """The status of requests that have an answer; removes cut-off lines and server errors."""
    if not path.exists():
        return {}
    done: dict[str, str] = {}
    statuses: dict[str, int] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(text)
            status = value["response"]["status_code"]
            name = value["custom_id"]
        except (ValueError, KeyError, TypeError):
            continue  # cut off in the middle
        if status < 500:
            done[name], statuses[name] = text, status
    part = path.with_name(path.name + ".part")
    part.write_text("".join(f"{text}\n" for text in done.values()), encoding="utf-8")
    os.replace(part, path)  # noqa: PTH105
    return statuses


async def run(
    settings: ServeSettings,
    lines: list[BatchRequest],
    out: Path,
    progress: Callable[[int, int, int], None],
) -> int:
    """Answers the requests that have no answer yet; returns how many of all requests failed.

    `progress` is called after every answer: with how many there are, of how many, and tokens so far.
    """
    done = resume(out)
    waiting = [line for line in lines if line.id not in done]
    total, answered, tokens = len(lines), len(lines) - len(waiting), 0
    failed = sum(done.get(line.id, 200) != 200 for line in lines)
    progress(answered, total, tokens)
    if not waiting:
        return failed
    service = Service(settings)
    await service.start()
    waiting.reverse()
    try:
        if not await service.engine.wait(600):
            raise InvalidParams("the model could not be loaded")
        with out.open("a", encoding="utf-8") as file:

            async def work() -> None:
                nonlocal answered, tokens, failed
                while waiting:
                    line = waiting.pop()
                    status, body = await _answer(service, line)
                    file.write(dumps(_result(line, status, body)) + "\n")
                    file.flush()
                    answered += 1
                    failed += status != 200
                    tokens += (body.get("usage") or {}).get("completion_tokens", 0)
                    progress(answered, total, tokens)

            concurrency = settings.engine.max_sequences + min(settings.queue, 16)
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(waiting))):
                    group.create_task(work())
    finally:
        await service.close()
    return failed


async def _answer(service: Service, line: BatchRequest) -> tuple[int, dict[str, Any]]:
    failure = APIError(500, "not tried")
    for _ in range(ATTEMPTS):
        try:
            request = service.admit(await _parse(service, line))
            return 200, (await request.whole()).whole()
        except APIError as error:
            failure = error
            if failure.status == 429:
                await asyncio.sleep(0.2)
            elif failure.status == 503:
                await service.engine.wait(60)
            else:
                break
    return failure.status, failure.body()


async def _parse(service: Service, line: BatchRequest) -> ParsedRequest:
    body = {**line.body, "stream": False}
    body.pop("stream_options", None)
    if line.url == URLS[0]:
        return await service.parser.chat(validated(ChatBody, body), "")
    return await service.parser.completion(validated(CompletionBody, body), "")


def _result(line: BatchRequest, status: int, body: dict[str, Any]) -> dict[str, Any]:
    name = f"batch_req_{secrets.token_hex(12)}"
    return {
        "id": name,
        "custom_id": line.id,
        "response": {"status_code": status, "request_id": name, "body": body},
        "error": None,
    }
