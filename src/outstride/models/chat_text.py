"""Chat prompts in which control tokens come from the template only, never from a message.

A user or a tool may write `<|im_end|>`. If it became the control token of that name, the message could
end its own turn and begin another one. So special tokens that are written out in messages are replaced
by random placeholders before the template is rendered, and put back afterwards. The sections of the
prompt that contain them are encoded as plain text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any


class ChatText(str):
    """A rendered chat prompt. `plain` lists the sections (start, end) to be encoded as plain text."""

    __slots__ = ("plain",)
    plain: tuple[tuple[int, int], ...]

    def __new__(cls, text: str, plain: Sequence[tuple[int, int]] = ()) -> ChatText:
        found = super().__new__(cls, text)
        found.plain = tuple(plain)
        return found

    def sections(self) -> list[tuple[str, bool]]:
        """The prompt in order, as parts to be encoded one by one: text, and whether it is plain."""
        found, end = [], 0
        for start, stop in self.plain:
            found += [(self[end:start], False), (self[start:stop], True)]
            end = stop
        return [part for part in [*found, (self[end:], False)] if part[0]]


class Placeholders:
    """Takes special tokens out of messages and puts their text back into the rendered prompt."""

    def __init__(self, special: Collection[str]) -> None:
        words = sorted(filter(None, special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, words))) if words else None
        # Random, so that no message can contain one; letters only, so that no template changes it.
        self._mark = "".join(secrets.choice("abcdefghijklmnop") for _ in range(24))
        self._taken: list[str] = []

    def take(self, value: Any) -> Any:
        """A copy of messages or tools in which placeholders stand for special tokens."""
        if isinstance(value, str):
            return self._special.sub(self._replace, value) if self._special else value
        if isinstance(value, Mapping):
            taken = {key: self.take(item) for key, item in value.items()}
            return type(value)(taken) if isinstance(value, dict) else taken
        if isinstance(value, list | tuple):
            return [self.take(item) for item in value]
        return value

    def _replace(self, found: re.Match[str]) -> str:
        self._taken.append(found.group())
        return f"{self._mark}{len(self._taken) - 1}x"

    def put_back(self, text: str) -> ChatText:
        """The rendered prompt with the original text of its messages."""
        if not self._taken or self._special is None:
            return ChatText(text)
        mark, parts, plain, size = re.compile(rf"{self._mark}(\d+)x"), list[str](), [], 0
        ends = [found.span() for found in self._special.finditer(text)]  # the template's own
        bounds = [0, *(at for span in ends for at in span), len(text)]
        for start, stop in pairwise(bounds):
            part = mark.sub(lambda found: self._taken[int(found.group(1))], text[start:stop])
            if mark.search(text, start, stop):
                plain.append((size, size + len(part)))
            parts.append(part)
            size += len(part)
        return ChatText("".join(parts), plain)
