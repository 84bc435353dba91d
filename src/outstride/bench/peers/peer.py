"""The interface of every engine in a comparison, ours included."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from outstride.bench import clock
from outstride.errors import OutstrideError


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """The setup that all engines share."""

    path: Path
    """The model: a GGUF file or a checkpoint folder."""
    vocabulary: int
    threads: int
    max_length: int
    """Tokens of the longest sequence, answer included."""
    max_batch: int
    """Largest number of sequences at once."""
    environments: Path | None = None
    """Folder of the virtual environments of engines that have their own."""


class Peer(Protocol):
    """An engine with its best documented settings. Token ids go in and come out."""

    name: str
    settings: dict[str, Any]
    """How it was set up, for the report."""

    def generate(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        """Continues all prompts in one batch, greedily, each by exactly `output` tokens."""
        ...

    def once(self, nodes: int, cached: int) -> clock.Case | None:
        """A pass over `nodes` tokens after `cached` ones, to time; None if the engine has no such
        call.
        """
        ...

    def fits(self, count: int) -> bool:
        """Whether it takes `count` prompts at once in this setting."""
        ...

    def close(self) -> None: ...


def library(package: str, hint: str) -> Any:
    """Imports a package that is no dependency of this project; raises an error with the hint if it
    is missing.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise OutstrideError(f"{package} cannot be imported ({error}); {hint}") from error
