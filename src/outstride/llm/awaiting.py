"""`AsyncLLM`: the surface for programs that await."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from types import TracebackType
from typing import Self

from outstride.core.contracts import Method
from outstride.core.params import SamplingParams
from outstride.engine.runner import Event
from outstride.errors import OutstrideError
from outstride.llm.base import Asked, Base, Message, Prompt, Shaped
from outstride.results import Chunk, Filled, Result


class AsyncLLM(Base):
    """`LLM` for programs that await. Cancelling a task or leaving a stream frees its pages."""

    async def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        method: str | Method | Seq[str | Method] | None = None,
        shape: Shaped | Seq[Shaped | None] | None = None,
        trace: bool = False,
        salt: str = "",
    ) -> list[Result]:
        """Continues prompts as they stand."""
        asked = self._ask_all(prompts, params, method, shape, trace=trace, salt=salt)
        return self._alone(await asyncio.gather(*map(self._whole, asked)))

    async def chat(
        self,
        messages: str | Seq[Message] | Seq[Seq[Message]] | Seq[str],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        method: str | Method | Seq[str | Method] | None = None,
        shape: Shaped | Seq[Shaped | None] | None = None,
        trace: bool = False,
        salt: str = "",
    ) -> list[Result]:
        """Answers a conversation, or a list of them; plain text counts as one user message."""
        asked = self._ask_all(messages, params, method, shape, chat=True, trace=trace, salt=salt)
        return self._alone(await asyncio.gather(*map(self._whole, asked)))

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        method: str | Method | None = None,
        shape: Shaped | None = None,
        trace: bool = False,
        salt: str = "",
        canvas: bool = False,
    ) -> AsyncIterator[Chunk]:
        """Answers one prompt (messages: by the chat template) piece by piece, one per pass.

        With `canvas`, each pass is reported, with what a masked model has settled beyond gaps.
        """
        asked = self._ask(
            prompt, params, method, shape, trace=trace, salt=salt, watched=True, canvas=canvas
        )
        async for event in self._events(asked):
            if (chunk := asked.piece(event)) is not None:
                yield chunk

    async def fill(
        self,
        text: str,
        params: SamplingParams | None = None,
        *,
        method: str | Method | None = None,
        trace: bool = False,
        salt: str = "",
    ) -> list[Filled]:
        """Fills in the holes of a text, written as `<mask:8>`: one `Filled` for each of n samples."""
        asked = self._ask_filling(text, params, method, trace=trace, salt=salt)
        async for event in self._events(asked):
            asked.take(event)
        return self._filled(asked)

    async def _whole(self, asked: Asked | OutstrideError) -> Result:
        if not isinstance(asked, Asked):
            return Result([], error=asked)
        async for event in self._events(asked):
            asked.take(event)
        return asked.result()

    async def _events(self, asked: Asked) -> AsyncIterator[Event]:
        """What happens to a request, until it is done; one that is left behind is cancelled."""
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Event] = asyncio.Queue()

        def sink(event: Event) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, event)

        asked.ticket.sink = sink
        self._runner.submit(asked.ticket)
        try:
            while not asked.done:
                yield await inbox.get()
        finally:
            if not asked.done:
                self._runner.cancel(asked.ticket)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)
