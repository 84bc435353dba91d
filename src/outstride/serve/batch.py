"""OpenAI's batch files without a server: requests in, answers out, line by line.

Answers are written as they come, each in one piece, so that a run that broke off goes on where it was:
what has its answer in the output is not asked again, except for what failed by no fault of its own.
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

from pydantic import ValidationError

from outstride.errors import InvalidParams
from outstride.serve.answers import dumps
from outstride.serve.bodies import ChatBody, CompletionBody
from outstride.serve.orders import Order
from outstride.serve.service import Service
from outstride.serve.settings import Refusal, ServeSettings, invalid

URLS = ("/v1/chat/completions", "/v1/completions")
ATTEMPTS = 3
"""How often a request is tried whose engine died."""


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch file."""

    id: str
    url: str
    body: dict[str, Any]


def read(path: Path) -> list[Line]:
    """The requests of a file; what is wrong with it is said before anything runs."""
    found: dict[str, Line] = {}
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
            raise InvalidParams(f"{where}: custom_id {name!r} is there twice")
        if value.get("method", "POST") != "POST" or url not in URLS:
            raise InvalidParams(f"{where}: the url must be one of {', '.join(URLS)}, with POST")
        found[name] = Line(name, url, value["body"])
    return list(found.values())


def resume(path: Path) -> dict[str, int]:
    """The requests that have their answer, by status; whatever else is in the file is taken out."""
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
    lines: list[Line],
    out: Path,
    progress: Callable[[int, int, int], None],
) -> int:
    """Answers what has no answer yet; how many of all requests failed.

    `progress` hears of every answer: how many are there, of how many, and tokens so far.
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
        if not await service.link.wait(600):
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

            places = settings.engine.max_sequences + min(settings.queue, 16)
            async with asyncio.TaskGroup() as group:
                for _ in range(min(places, len(waiting))):
                    group.create_task(work())
    finally:
        await service.close()
    return failed


async def _answer(service: Service, line: Line) -> tuple[int, dict[str, Any]]:
    refusal = Refusal(500, "not tried")
    for _ in range(ATTEMPTS):
        try:
            call = service.admit(await _order(service, line))
            return 200, (await call.whole()).whole()
        except Refusal as error:
            refusal = error
            if refusal.status == 429:
                await asyncio.sleep(0.2)
            elif refusal.status == 503:
                await service.link.wait(60)
            else:
                break
    return refusal.status, refusal.body()


async def _order(service: Service, line: Line) -> Order:
    body = {**line.body, "stream": False}
    body.pop("stream_options", None)
    try:
        if line.url == URLS[0]:
            return await service.clerk.chat(ChatBody.model_validate(body), "")
        return await service.clerk.completion(CompletionBody.model_validate(body), "")
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise invalid(f"{place}: {first['msg']}", place) from error


def _result(line: Line, status: int, body: dict[str, Any]) -> dict[str, Any]:
    name = f"batch_req_{secrets.token_hex(12)}"
    return {
        "id": name,
        "custom_id": line.id,
        "response": {"status_code": status, "request_id": name, "body": body},
        "error": None,
    }
