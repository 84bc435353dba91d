"""The Python surface: `LLM` for scripts, `AsyncLLM` for programs that await."""

from outstride.llm.awaiting import AsyncLLM
from outstride.llm.base import Message, Prompt
from outstride.llm.blocking import LLM

__all__ = ["LLM", "AsyncLLM", "Message", "Prompt"]
