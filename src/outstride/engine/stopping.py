"""When an answer ends: tokens one by one, whatever number of them a pass settled."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from outstride.core.params import SamplingParams

Spell = Callable[[int], bytes]
"""The bytes that a token adds to a text."""


@dataclass(slots=True)
class Text:
    """The text of an output, decoded as tokens arrive: a token may end within a character."""

    spell: Spell
    stop: tuple[str, ...] = ()
    text: str = ""
    sent: int = 0
    _unread: list[int] = field(default_factory=list)
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def append(self, token: int) -> None:
        """Takes a token; without stop strings nobody needs its text before it is asked for."""
        self._unread.append(token)
        if self.stop:
            self._read()

    def _read(self) -> None:
        for token in self._unread:
            self.text += self._decoder.decode(self.spell(token))
        self._unread.clear()

    def finish(self) -> None:
        """No more tokens: whatever is incomplete is shown as it is."""
        self._read()
        self.text += self._decoder.decode(b"", final=True)

    def find_stop(self, since: int) -> int | None:
        """Where the first stop string begins, if one was completed after `since` characters."""
        found = [
            at for s in self.stop if (at := self.text.find(s, max(0, since - len(s) + 1))) >= 0
        ]
        return min(found) if found else None

    def cut(self, end: int) -> None:
        """The text ends here."""
        self.text = self.text[:end]
        self._decoder.reset()

    def ready(self, *, final: bool) -> str:
        """Text not handed out yet; the possible beginning of a stop string is held back."""
        self._read()
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
    text: Text | None

    def push(self, token: int, length: int) -> str | None:
        """Takes a token that makes the sequence `length` long; says why it ends, if it ends."""
        free = length - self.prompt_length >= self.params.min_tokens
        ends = token in self.end_tokens and not self.params.ignore_eos
        if free and (ends or token in self.params.stop_token_ids):
            return "stop"
        if self.text is not None:
            before = len(self.text.text)
            self.text.append(token)
            if free and (at := self.text.find_stop(before)) is not None:
                self.text.cut(at)
                return "stop"
        return "length" if length >= self.limit else None
