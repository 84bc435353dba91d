"""What every engine in a comparison looks like, ours among them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from outstride.bench import clock
from outstride.errors import OutstrideError


@dataclass(frozen=True, slots=True)
class Ground:
    """What all engines are given alike."""

    path: Path
    """The model: a GGUF file or a folder of a checkpoint."""
    vocabulary: int
    threads: int
    longest: int
    """Tokens of the longest sequence, answer included."""
    crowd: int
    """Sequences at once, at the most."""
    environments: Path | None = None
    """Where environments of engines are that run in their own."""


class Peer(Protocol):
    """An engine with its best documented settings. Tokens go in and come out."""

    name: str
    settings: dict[str, Any]
    """How it was set up, for the reader."""

    def generate(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        """Continues all prompts at once, greedily, each by exactly `output` tokens."""
        ...

    def once(self, nodes: int, cached: int) -> clock.Case | None:
        """A pass over so many tokens behind cached ones, to be timed; None if it has no such call."""
        ...

    def fits(self, count: int) -> bool:
        """Whether it takes so many prompts at once in this setting."""
        ...

    def close(self) -> None: ...


def library(package: str, how: str) -> Any:
    """A package that is no dependency of this project, if it is there."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise OutstrideError(f"{package} cannot be imported ({error}); {how}") from error
