"""Stop rules. They look at tokens one by one, however many of them a pass settled."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from outstride.core.params import SamplingParams

TokenToBytes = Callable[[int], bytes]
"""The bytes that a token adds to a text."""


@dataclass(slots=True)
class IncrementalText:
    """The text of an output, detokenized as tokens arrive: a token may end within a character."""

    token_to_bytes: TokenToBytes
    stop: tuple[str, ...] = ()
    text: str = ""
    sent: int = 0
    _pending: list[int] = field(default_factory=list)
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def append(self, token: int) -> None:
        """Takes a token. Without stop strings it is detokenized only when the text is needed."""
        self._pending.append(token)
        if self.stop:
            self._decode()

    def _decode(self) -> None:
        for token in self._pending:
            self.text += self._decoder.decode(self.token_to_bytes(token))
        self._pending.clear()

    def finish(self) -> None:
        """Ends the text: an incomplete character becomes U+FFFD."""
        self._decode()
        self.text += self._decoder.decode(b"", final=True)

    def find_stop(self, since: int) -> tuple[int, int] | None:
        """Start and end of the first stop string that was completed after `since` characters."""
        found = [
            (at, at + len(s))
            for s in self.stop
            if (at := self.text.find(s, max(0, since - len(s) + 1))) >= 0
        ]
        return min(found) if found else None

    def cut(self, end: int) -> None:
        """Cuts the text at this character."""
        self.text = self.text[:end]
        self._decoder.reset()

    def take_new(self, *, final: bool) -> str:
        """The text since the last call; until `final`, a possible stop string is held back."""
        self._decode()
        hold = 0
        if not final:
            for s in self.stop:
                for size in range(min(len(s) - 1, len(self.text)), hold, -1):
                    if self.text.endswith(s[:size]):
                        hold = size
                        break
        end = max(self.sent, len(self.text) - hold)
        fresh, self.sent = self.text[self.sent : end], end
        return fresh


@dataclass(slots=True)
class Stopper:
    """The stop rules of one sequence."""

    params: SamplingParams
    end_tokens: Collection[int]
    prompt_length: int
    limit: int
    text: IncrementalText | None

    def push(self, token: int, length: int) -> str | None:
        """Takes the token that makes the sequence `length` long; returns the finish reason, if any."""
        free = length - self.prompt_length >= self.params.min_tokens
        ends = token in self.end_tokens and not self.params.ignore_eos
        included = self.params.include_stop_str_in_output
        if free and (ends or token in self.params.stop_token_ids):
            if included and self.text is not None:
                self.text.append(token)
            return "stop"
        if self.text is not None:
            before = len(self.text.text)
            self.text.append(token)
            if free and (at := self.text.find_stop(before)) is not None:
                self.text.cut(at[included])
                return "stop"
        return "length" if length >= self.limit else None
