"""Messages between the HTTP process and the engine process, and how they are sent.

Both ends are this package, on one machine, over a socket pair that no other process can open: a message
is a pickled tuple after its length. The engine sends one message per pass, with the outputs of all
requests.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outstride.core.params import SamplingParams
from outstride.core.structured_output import OutputFormat
from outstride.serve.pass_trace import PassTrace

LENGTH = struct.Struct("!I")

# Sent by the HTTP process.
SUBMIT, CANCEL, PING, SHUTDOWN = range(4)
# Sent by the engine process.
READY, OUTPUTS, PONG = range(4, 7)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine process is started with."""

    model: str = "smollm2"
    device: str = "auto"
    weights: str = "auto"
    adapter: str | None = None
    """The folder of a diffusion adapter."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Folders of LoRA adapters by name; requests name them as their model."""
    pages: int | None = None
    max_nodes: int = 256
    max_sequences: int = 64
    draft_models: tuple[str, ...] = ()
    """Models that requests may name as drafters; they are loaded at the start."""


@dataclass(frozen=True, slots=True)
class Handshake:
    """The first message of an engine: its model is loaded, and this is what it can do."""

    model: str
    fingerprint: str
    operations: str
    context: int
    capacity: int
    vocab_size: int
    tokenizer: bytes
    """Pickled: the HTTP process encodes and decodes tokens itself, without loading the model."""
    device: str = ""
    weights: str = ""
    kv_bytes: int = 0
    """Bytes that the KV cache takes when it is full; `capacity` is its size in tokens."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """The fingerprint of requests with each LoRA adapter, by name."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request for the engine: one prompt, with one or several samples."""

    id: int
    tokens: list[int]
    params: SamplingParams
    method: str
    salt: str = ""
    priority: int = 0
    output_format: OutputFormat | None = None
    trace: bool = False
    graphs: bool = False
    streaming: bool = True
    """Whether each pass is reported, or only the end."""
    return_token_ids: bool = False
    """Whether outputs have the ids of their tokens."""


class RequestEnd(NamedTuple):
    """How one answer ended."""

    reason: str
    counts: dict[str, Any]
    seed: int
    method: str
    saved: float
    """Seconds saved against plain decoding: an estimate."""
    tokens: list[int]
    embedding: Any = None
    """Of the prompt, [hidden_size] float32, if the request asks for it."""


class EngineFault(NamedTuple):
    """Why a request failed."""

    kind: str
    """Where the cause is: `request`, `grammar`, `method` or `engine`."""
    message: str


class EngineOutput(NamedTuple):
    """What a pass did for one answer of one request."""

    request_id: int
    sample: int = 0
    """Which of the request's answers."""
    text: str = ""
    logprobs: list[Any] | None = None
    """Of the new tokens, if the request wants them."""
    trace: list[tuple[int, int, str, str]] | None = None
    end: RequestEnd | None = None
    prompt_logprobs: list[Any] | None = None
    """Of the prompt, with the first answer that ends."""
    fault: EngineFault | None = None
    done: bool = False
    """Nothing follows for this request."""
    pass_trace: PassTrace | None = None
    """The pass itself, if the request wants it."""
    num_tokens: int = 0
    """Tokens of the answer so far."""
    tokens: list[int] | None = None
    """The new tokens, if the request wants them."""


@dataclass(slots=True)
class Gauges:
    """What an engine has done and holds, for /metrics."""

    steps: int = 0
    totals: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of steps by verb: plan, propose, forward, accept, commit."""
    running: int = 0
    waiting: int = 0
    pages: int = 0
    pages_free: int = 0
    cpu_steps: float = 0.0
    cpu_all: float = 0.0
    rss: int = 0
    intact: bool = True
    """Whether every integrity check of the KV cache, done while the engine is idle, has passed."""


def pack(message: tuple[Any, ...]) -> bytes:
    """A message with its length before it."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


def receive(connection: socket.socket) -> tuple[Any, ...] | None:
    """Waits for the next message; None once the other end is closed."""
    head = _receive_bytes(connection, LENGTH.size)
    if head is None:
        return None
    body = _receive_bytes(connection, LENGTH.unpack(head)[0])
    if body is None:
        return None
    message: tuple[Any, ...] = pickle.loads(body)
    return message


def _receive_bytes(connection: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        try:
            part = connection.recv(count - len(received))
        except (ConnectionError, OSError):
            return None
        if not part:
            return None
        received += part
    return bytes(received)
