"""What the HTTP process and the engine process tell each other, and how it travels.

Both ends are this package, on one machine, over a socket that nobody else can open: messages are
pickled tuples behind their length. The engine sends one message per pass, with everybody's news.
"""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outstride.core.params import SamplingParams
from outstride.core.shape import Shape
from outstride.serve.drawing import Drawing

LENGTH = struct.Struct("!I")

# What the HTTP process asks for.
START, CANCEL, PING, QUIT = range(4)
# What the engine tells.
HELLO, NEWS, PONG = range(4, 7)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine process needs to know to start."""

    model: str = "smollm2"
    weights: str = "auto"
    adapter: str | None = None
    """The folder of a diffusion adapter."""
    pages: int | None = None
    max_nodes: int = 256
    max_sequences: int = 64
    draft_models: tuple[str, ...] = ()
    """Models that requests may name as drafters; they are loaded at the start."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What an engine says of itself once its model answers."""

    model: str
    fingerprint: str
    operations: str
    context: int
    capacity: int
    vocab_size: int
    tokenizer: bytes
    """Pickled: the HTTP process encodes and spells tokens itself, without reading the model."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request as the engine sees it."""

    id: int
    tokens: list[int]
    params: SamplingParams
    method: str
    salt: str = ""
    priority: int = 0
    shape: Shape | None = None
    trace: bool = False
    graphs: bool = False
    watched: bool = True


class End(NamedTuple):
    """How one answer ended."""

    reason: str
    counts: dict[str, Any]
    seed: int
    method: str
    saved: float
    """Seconds saved against plain decoding: an estimate."""
    tokens: list[int]


class Fault(NamedTuple):
    """Why a request failed: whose fault it is, and what to say."""

    kind: str
    """request, method or engine."""
    message: str


class News(NamedTuple):
    """What a pass did for one answer of one request."""

    job: int
    sample: int = 0
    """Which of the request's answers."""
    text: str = ""
    rows: list[Any] | None = None
    """Log-probabilities of its new tokens, if they are wanted."""
    trace: list[tuple[int, int, str, str]] | None = None
    end: End | None = None
    prompt: list[Any] | None = None
    """Log-probabilities of the prompt, with the first end."""
    fault: Fault | None = None
    done: bool = False
    """Nothing follows for this request."""
    drawing: Drawing | None = None
    """The pass itself, if it is wanted."""


@dataclass(slots=True)
class Gauges:
    """What an engine has done and holds, for /metrics."""

    steps: int = 0
    totals: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0
    pages: int = 0
    pages_free: int = 0
    cpu_steps: float = 0.0
    cpu_all: float = 0.0
    rss: int = 0
    intact: bool = True
    """What the cache's integrity check said when the engine last had nothing to do."""


def pack(message: tuple[Any, ...]) -> bytes:
    """A message as it travels."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


def receive(link: socket.socket) -> tuple[Any, ...] | None:
    """The next message, waiting for it; None once the other end has gone."""
    head = _exactly(link, LENGTH.size)
    if head is None:
        return None
    body = _exactly(link, LENGTH.unpack(head)[0])
    if body is None:
        return None
    message: tuple[Any, ...] = pickle.loads(body)
    return message


def _exactly(link: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = link.recv(count - len(parts))
        except (ConnectionError, OSError):
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
