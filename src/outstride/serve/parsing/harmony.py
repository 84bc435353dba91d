"""Harmony, the format of gpt-oss: messages with a channel each.

`analysis` is reasoning, `final` is content, and a message to a function is a call; what `commentary`
says to nobody in particular is content.
"""

from __future__ import annotations

import json
import re

from outstride.serve.parsing.tool_format import CALL, CONTENT, REASONING, Part, Schemas, overlap

MARKERS: tuple[str, ...] = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
MARKERS = (*MARKERS, "<|constrain|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_HEADS = ("<|start|>", "<|channel|>")


class HarmonyParser:
    """Splits an answer in the harmony format into parts, however its text is cut."""

    def __init__(self, tools: Schemas) -> None:
        self._tools = tools
        self._buffer = ""
        self._header: str | None = None
        """The header of the present message; None before the first one."""
        self._in_header = False
        self._body = ""
        """The text of a call so far."""
        self._spoken: set[str] = set()
        """Kinds of parts that have been returned."""
        self._fresh = False
        """Whether a further message of a kind begins."""

    def feed(self, text: str, final: bool = False) -> list[Part]:
        """Takes more text; returns the parts that are certain now."""
        self._buffer += text
        parts: list[Part] = []
        while self._buffer:
            if self._in_header:
                if not self._read_header(final):
                    break
                continue
            ends = _ENDS if self._header is not None else _HEADS
            found = [(at, m) for m in ends if (at := self._buffer.find(m)) >= 0]
            if not found:
                held = 0 if final else max(overlap(self._buffer, m) for m in ends)
                self._say(self._buffer[: len(self._buffer) - held], parts)
                self._buffer = self._buffer[len(self._buffer) - held :]
                break
            at, marker = min(found)
            self._say(self._buffer[:at], parts)
            self._finish_message(parts)
            self._buffer = self._buffer[at + len(marker) :]
            self._in_header = True
        if final:
            self._finish_message(parts)
        return parts

    def _read_header(self, final: bool) -> bool:
        """Reads up to the body of the next message; False if more text is needed."""
        head, marker, rest = self._buffer.partition("<|message|>")
        if not marker:
            self._buffer = "" if final else self._buffer
            return False
        self._header, self._buffer, self._in_header = head, rest, False
        self._fresh = True
        return True

    def _call(self) -> str:
        """The function that the present message is addressed to, if it is one."""
        found = re.search(r"to=functions\.([\w.-]+)", self._header or "")
        return found[1] if found and found[1] in self._tools else ""

    def _say(self, text: str, parts: list[Part]) -> None:
        if self._call():
            self._body += text
            return
        kind = REASONING if "analysis" in (self._header or "") else CONTENT
        if text:
            again = self._fresh and kind in self._spoken
            parts.append(Part(kind, f"\n{text}" if again else text))
            self._spoken.add(kind)
            self._fresh = False

    def _finish_message(self, parts: list[Part]) -> None:
        name = self._call()
        if name:
            body, self._body = self._body.strip() or "{}", ""
            try:
                arguments = json.dumps(json.loads(body), ensure_ascii=False)
            except (ValueError, RecursionError):
                arguments = body  # cut by max_tokens, or wrong: the client sees what there is
            parts.append(Part(CALL, arguments, name))
        self._header = None if name else self._header
