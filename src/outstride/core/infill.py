"""Infilling: text with gaps, such as `The <mask:8> sat on the <mask:4>.`"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from outstride.errors import InvalidPrompt

GAP = re.compile(r"<mask:(\d+)>")
MAX_GAP = 4096
"""The largest number of tokens in one gap."""


@dataclass(slots=True)
class InfillTemplate:
    """The prompt before the first gap, and the known tokens after it.

    fixed: known tokens after the first gap, by position.
    length: the number of tokens of the whole text, gaps included.
    spans: the positions of each gap.
    """

    prompt: list[int]
    fixed: dict[int, int] = field(default_factory=dict)
    length: int = 0
    spans: list[range] = field(default_factory=list)


def parse(text: str, encode: Callable[[str, bool], list[int]]) -> InfillTemplate:
    """The tokens and gaps of a text; `encode` takes a piece of text and whether it is the first."""
    parts = GAP.split(text)
    if len(parts) == 1:
        raise InvalidPrompt("the text has no gaps; write a gap of eight tokens as <mask:8>")
    found = InfillTemplate(encode(parts[0], True))
    found.length = len(found.prompt)
    for size, part in zip(parts[1::2], parts[2::2], strict=True):
        if not 1 <= int(size) <= MAX_GAP:
            raise InvalidPrompt(f"a gap has 1 to {MAX_GAP} tokens, not {size}")
        found.spans.append(range(found.length, found.length + int(size)))
        found.length += int(size)
        for token in encode(part, False) if part else ():
            found.fixed[found.length] = token
            found.length += 1
    return found
