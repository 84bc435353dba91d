"""What commands are given: the way to a model. Tests give them another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outstride import registry
from outstride.cli import screen

if TYPE_CHECKING:
    from outstride.llm import LLM

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class Context:
    """The seam between commands and models."""

    load: Callable[[str], LLM]


def usual() -> Context:
    """The context of the real program."""
    return Context(load=_load)


def _load(name: str) -> LLM:
    from outstride.models.load import locate

    locate(name)  # a download shows its own progress, which a spinner would garble
    with screen.waiting(f"loading {name}"):
        from outstride.llm import LLM

        return LLM(name)


def check_method(spec: str) -> None:
    """Refuses a method that does not exist before a model is loaded for it."""
    registry.discover()
    registry.parse(spec)
