"""A whole `LLM` around the toy model: for tests of everything that needs one and no weights."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outstride.cli.context import Context
from outstride.core.contracts import PassInput, PendingPass
from outstride.llm import LLM
from outstride.models.load import Loaded
from outstride.models.toy import Toy

ALPHABET = "\x00 abcdefghijklmnopqrstuvwxyz.,?!:<>\n0123456789"
END = 0


class FakeTokenizer:
    """One token per character; what is not in the alphabet becomes some character that is."""

    digest = "these letters"

    vocab_size = len(ALPHABET)
    eos_ids = frozenset({END})

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        del add_special
        return [
            ALPHABET.index(c) if c in ALPHABET[1:] else 1 + ord(c) % (len(ALPHABET) - 1)
            for c in text.lower()
        ]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        return "".join(ALPHABET[i] for i in ids if not (skip_special and i == END))

    def token_bytes(self, token: int) -> bytes:
        return ALPHABET[token].encode()

    def is_special(self, token: int) -> bool:
        return token == END

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        turns = [f"<{m['role']}>{m['content']}\n" for m in messages]
        return "".join(turns) + "<assistant>"

    def same_vocabulary(self, other: object) -> bool:
        return isinstance(other, FakeTokenizer)


class SlowToy(Toy):
    """A toy that takes its time, so that somebody can interrupt it."""

    def __init__(self, *, pause: float, **options: Any) -> None:
        super().__init__(**options)
        self._pause = pause

    def forward(self, work: Sequence[PassInput]) -> PendingPass:
        time.sleep(self._pause)
        return super().forward(work)


def make_llm(*, pages: int = 256, context: int = 512, pause: float = 0.0, name: str = "toy") -> LLM:
    """An engine on the toy, quick and with a text that repeats itself."""
    model = SlowToy(
        pause=pause, vocab_size=len(ALPHABET), pages=pages, page_size=4, context=context, habit=6.0
    )
    fields: dict[str, Any] = {
        "model": model,
        "tokenizer": FakeTokenizer(),
        "name": name,
        "context": context,
        "path": Path(name),
    }
    return LLM(Loaded(**fields))


def context(**options: Any) -> Context:
    """What commands are given in tests: whatever model they ask for, they get the toy."""
    return Context(load=lambda name, _device, _weights: make_llm(name=name, **options))
