"""The Python API: `LLM`, and `AsyncLLM` for asyncio."""

from outstride.llm.async_llm import AsyncLLM
from outstride.llm.base import Message, Prompt
from outstride.llm.sync_llm import LLM

__all__ = ["LLM", "AsyncLLM", "Message", "Prompt"]
