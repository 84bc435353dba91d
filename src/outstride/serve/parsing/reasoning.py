"""Reasoning that a model writes before its answer, between markers."""

from __future__ import annotations

from dataclasses import dataclass

from outstride.serve.parsing.tool_format import CONTENT, REASONING, Part, overlap


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around a model's reasoning."""

    name: str
    opener: str
    closer: str


FORMATS = {
    found.name: found
    for found in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
        ReasoningFormat("gemma", "<|channel>thought\n", "<channel|>"),
    )
}


def opened_in_prompt(prompt: str, wanted: ReasoningFormat) -> bool:
    """Whether the chat template has opened the reasoning already, so that the answer goes on in it."""
    return prompt.rstrip().endswith(wanted.opener.rstrip())


class ReasoningSplitter:
    """Splits an answer into reasoning and content, however its text is cut.

    White space at both ends of the reasoning, and before the content, is dropped. An answer that does
    not begin with the opening marker has no reasoning, unless the prompt ends with that marker.
    """

    def __init__(self, wanted: ReasoningFormat, opened: bool) -> None:
        self._format = wanted
        self._buffer = ""
        self._opened = opened
        self._inside: bool | None = None
        """None until it is known whether the answer begins with the opening marker."""
        self._space = ""
        """White space of the reasoning that is dropped if the reasoning ends after it."""
        self._begun = False
        """Whether some text of the present section has been returned."""
        self._trimmed = opened
        """Whether white space at the beginning of the present section is dropped."""

    def feed(self, text: str, final: bool = False) -> list[Part]:
        """Takes more text; returns the parts that are certain now."""
        self._buffer += text
        parts: list[Part] = []
        if self._inside is None:
            self._decide(final)
        if self._inside:
            self._reason(parts, final)
        if self._inside is False:
            self._content(parts)
        return parts

    def _decide(self, final: bool) -> None:
        stripped, opener = self._buffer.lstrip(), self._format.opener
        if stripped.startswith(opener):
            self._buffer = stripped[len(opener) :]
            self._inside, self._trimmed = True, True
        elif final or not opener.startswith(stripped):
            self._inside = self._opened

    def _reason(self, parts: list[Part], final: bool) -> None:
        closer = self._format.closer
        end = self._buffer.find(closer)
        if end >= 0:
            body, rest = self._buffer[:end], self._buffer[end + len(closer) :]
        else:
            held = 0 if final else overlap(self._buffer, closer)
            body, rest = self._buffer[: len(self._buffer) - held], ""
        text = self._space + (body if self._begun else body.lstrip())
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._begun = True
            parts.append(Part(REASONING, shown))
        if end >= 0:
            self._inside, self._begun, self._trimmed, self._space = False, False, True, ""
            self._buffer = rest
        else:
            self._buffer = self._buffer[len(body) :]

    def _content(self, parts: list[Part]) -> None:
        text, self._buffer = self._buffer, ""
        if self._trimmed and not self._begun:
            text = text.lstrip()
        if text:
            self._begun = True
            parts.append(Part(CONTENT, text))
