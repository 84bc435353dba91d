"""Text with holes: `The <mask:8> sat on the <mask:4>.`"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from outstride.errors import InvalidPrompt

HOLE = re.compile(r"<mask:(\d+)>")
MOST = 4096


@dataclass(slots=True)
class Holes:
    """What is known before the first hole, and what stands at which position behind it."""

    prompt: list[int]
    fixed: dict[int, int] = field(default_factory=dict)
    length: int = 0
    spans: list[range] = field(default_factory=list)


def parse(text: str, encode: Callable[[str, bool], list[int]]) -> Holes:
    """Tokens and holes of a text; `encode` takes a piece and whether it is the first."""
    pieces = HOLE.split(text)
    if len(pieces) == 1:
        raise InvalidPrompt("the text has no holes; write them as <mask:8>, for eight tokens")
    found = Holes(encode(pieces[0], True))
    found.length = len(found.prompt)
    for size, piece in zip(pieces[1::2], pieces[2::2], strict=True):
        if not 1 <= int(size) <= MOST:
            raise InvalidPrompt(f"a hole takes 1 to {MOST} tokens, not {size}")
        found.spans.append(range(found.length, found.length + int(size)))
        found.length += int(size)
        for token in encode(piece, False) if piece else ():
            found.fixed[found.length] = token
            found.length += 1
    return found
