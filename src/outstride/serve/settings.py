"""What a server is configured with, and the errors that it answers with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outstride.serve.ipc import EngineSettings

PAGE = Path(__file__).parent / "page"
PAGE_FILES = {
    "index.html": "text/html",
    "style.css": "text/css",
    "app.js": "text/javascript",
    "chart.js": "text/javascript",
    "messages.js": "text/javascript",
    "pane.js": "text/javascript",
    "passview.js": "text/javascript",
    "score.js": "text/javascript",
    "settings.js": "text/javascript",
    "stream.js": "text/javascript",
}
"""The files of the page; nothing else in its folder is served."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much one request may ask for."""

    body_bytes: int = 4 << 20
    prompt_tokens: int = 1 << 20
    samples: int = 16
    prompts: int = 256
    stops: int = 16
    stop_length: int = 256
    bad_words: int = 256
    biases: int = 1024
    logprobs: int = 20
    schema_bytes: int = 64 << 10
    deadline: float = 600.0


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Everything about a server except its address."""

    engine: EngineSettings = field(default_factory=EngineSettings)
    bounds: Bounds = field(default_factory=Bounds)
    names: tuple[str, ...] = ()
    """Names of the model that requests may use; by default the name that it was loaded by."""
    method: str = "auto"
    """For requests that do not name one."""
    tool_parser: str = "auto"
    """How tool calls are written in answers; auto: by the chat template."""
    reasoning_parser: str = "auto"
    """How reasoning is marked in answers; auto: by the chat template."""
    queue: int = 256
    """How many answers may wait, in addition to those that run."""
    max_tokens: int = 1024
    """For chat requests that set no limit."""
    api_keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    """Web origins whose pages may call this server from a browser; none by default."""
    grace: float = 30.0
    """Seconds that running requests get when the server stops."""
    log: bool = True


class APIError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's format."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(message: str, param: str | None = None) -> APIError:
    """The request itself is wrong: status 400."""
    return APIError(400, message, param=param)
