"""How a model family writes tool calls: `ToolFormat`, and `ToolScanner`, which finds calls in a text.

The result never depends on how the text is cut: a scanner that gets it character by character returns
the same parts, joined, as one that gets it at once. So `parse` must be stable: what it decides about a
text holds for every continuation of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

Schemas = Mapping[str, Mapping[str, Any]]
"""The offered tools: JSON schemas of their arguments, by name."""
REASONING, CONTENT, CALL = "reasoning", "content", "call"


class Part(NamedTuple):
    """A part of an answer: some reasoning, some content, or one whole call."""

    kind: str
    text: str
    """Of a call: its arguments as JSON."""
    name: str = ""
    """Of a call: the function."""


class NotACall(Exception):
    """A text that began like a call is none."""


class Block(NamedTuple):
    """The text of one or several calls at the beginning of a longer text."""

    length: int
    calls: Sequence[tuple[str, Any]]
    """Name and arguments of each."""


class ToolFormat:
    """The notation of one family."""

    name: ClassVar[str]
    openers: tuple[str, ...] = ()
    """Texts that begin a call, anywhere in an answer."""
    first_openers: tuple[str, ...] = ()
    """Texts that begin a call at the beginning of an answer only."""
    markers: tuple[str, ...] = ()
    """All texts of the notation that may be special tokens; they must stay in the text."""

    def parse(self, text: str, opener: str, tools: Schemas, final: bool) -> Block | None:
        """The calls at the beginning of a text that begins with `opener`.

        None: more text is needed. final: no more text comes. Raises `NotACall`.
        """
        raise NotImplementedError


class ToolScanner:
    """Splits the content of an answer into text and calls.

    White space around calls is dropped. What cannot be parsed as a call of an offered tool stays text.
    """

    def __init__(self, tool_format: ToolFormat, tools: Schemas) -> None:
        self._format = tool_format
        self._tools = tools
        self._buffer = ""
        self._space = ""
        """White space that is dropped if a call follows."""
        self._started = False
        """Whether some text or a call has been found."""
        self._after_call = False

    def feed(self, text: str, final: bool = False) -> list[Part]:
        """Takes more text; returns the parts that are certain now."""
        self._buffer += text
        parts: list[Part] = []
        while self._buffer:
            found = self._find()
            if found is None:
                held = 0 if final else self._held()
                self._emit(self._buffer[: len(self._buffer) - held], parts)
                self._buffer = self._buffer[len(self._buffer) - held :]
                break
            at, opener = found
            self._emit(self._buffer[:at], parts)
            self._buffer = self._buffer[at:]
            try:
                block = self._format.parse(self._buffer, opener, self._tools, final)
                if block is None and final:
                    raise NotACall
            except NotACall:
                self._emit(opener, parts)
                self._buffer = self._buffer[len(opener) :]
                continue
            if block is None:
                break
            self._buffer = self._buffer[block.length :]
            self._space, self._started, self._after_call = "", True, True
            for name, arguments in block.calls:
                parts.append(Part(CALL, json.dumps(arguments, ensure_ascii=False), name))
        if final and self._space and not self._after_call:
            parts.append(Part(CONTENT, self._space))
            self._space = ""
        return parts

    def _find(self) -> tuple[int, str] | None:
        """The first opener in the buffer, and where it is."""
        buffer = self._buffer
        found = [(at, o) for o in self._format.openers if (at := buffer.find(o)) >= 0]
        if not self._started:
            start = len(buffer) - len(buffer.lstrip())
            found += [(start, o) for o in self._format.first_openers if buffer.startswith(o, start)]
        return min(found, key=lambda place: (place[0], -len(place[1]))) if found else None

    def _held(self) -> int:
        """How many characters at the end may be the beginning of an opener."""
        stripped = self._buffer.lstrip()
        if not self._started and any(o.startswith(stripped) for o in self._format.first_openers):
            return len(self._buffer)
        return max((overlap(self._buffer, opener) for opener in self._format.openers), default=0)

    def _emit(self, text: str, parts: list[Part]) -> None:
        if self._after_call:
            text = text.lstrip()
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._started, self._after_call = True, False
            parts.append(Part(CONTENT, shown))


def overlap(text: str, marker: str) -> int:
    """How many characters at the end of a text are the beginning of a marker, but not all of it."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


def json_end(text: str, start: int) -> int | None:
    """The end of the object or array that begins at `start`; None if it is not complete."""
    depth, quoted, escaped = 0, False, False
    for at in range(start, len(text)):
        c = text[at]
        if quoted:
            if escaped:
                escaped = False
            elif c == "\\":
                escaped = True
            elif c == '"':
                quoted = False
        elif c == '"':
            quoted = True
        elif c in "{[":
            depth += 1
        elif c in "}]":
            depth -= 1
            if depth == 0:
                return at + 1
    return None


def read_json(text: str) -> Any:
    """The value of a JSON text; raises `NotACall`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotACall from error


def json_calls(value: Any, tools: Schemas) -> list[tuple[str, Any]]:
    """The calls that a JSON object or a list of them describes; raises `NotACall`."""
    calls = []
    for call in value if isinstance(value, list) else [value]:
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            call = call["function"]
        if not isinstance(call, dict) or call.get("name") not in tools:
            raise NotACall
        arguments = call.get("arguments", call.get("parameters", call.get("args")))
        if isinstance(arguments, str):
            arguments = read_json(arguments)
        if not isinstance(arguments, dict):
            raise NotACall
        calls.append((str(call["name"]), arguments))
    if not calls:
        raise NotACall
    return calls


def known(name: str, tools: Schemas) -> str:
    """The name of an offered tool; raises `NotACall` for any other."""
    if name not in tools:
        raise NotACall
    return name


def skip_space(text: str, at: int) -> int:
    """The place of the next character that is no white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def skip_closer(text: str, at: int, closer: str, final: bool) -> int | None:
    """The place after an optional closing marker; None if more text is needed to tell."""
    if not closer:
        return at
    rest = text[skip_space(text, at) :]
    if rest.startswith(closer):
        return len(text) - len(rest) + len(closer)
    return None if not final and closer.startswith(rest) else at
