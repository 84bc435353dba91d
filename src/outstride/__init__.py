"""Outstride: parallel text generation. Same model, same seed, same text, fewer passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outstride.core.contracts import Exactness
from outstride.core.params import SamplingParams
from outstride.core.structured_output import OutputFormat
from outstride.errors import OutstrideError
from outstride.results import Chunk, Completion, Result, Stats

if TYPE_CHECKING:
    from outstride.llm import LLM, AsyncLLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "Chunk",
    "Completion",
    "Exactness",
    "OutputFormat",
    "OutstrideError",
    "Result",
    "SamplingParams",
    "Stats",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """`LLM` and `AsyncLLM` are imported when first used: they bring torch with them."""
    if name in ("LLM", "AsyncLLM"):
        from outstride import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'outstride' has no attribute {name!r}")
