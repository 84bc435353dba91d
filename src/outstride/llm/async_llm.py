"""`AsyncLLM`: the API for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from types import TracebackType
from typing import Self

from outstride.core.contracts import Method
from outstride.core.params import SamplingParams
from outstride.engine.engine_thread import OutputEvent
from outstride.errors import OutstrideError
from outstride.llm.base import FormatLike, LLMBase, Message, Prompt, raise_single_error
from outstride.llm.pending import PendingRequest
from outstride.results import Chunk, Filled, Result


class AsyncLLM(LLMBase):
    """`LLM` for asyncio. Cancelling a task or leaving a stream cancels the request."""

    async def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        method: str | Method | Seq[str | Method] | None = None,
        shape: FormatLike | Seq[FormatLike | None] | None = None,
        trace: bool = False,
        salt: str = "",
    ) -> list[Result]:
        """Continues prompts as they are, without a chat template."""
        pending = self._requests(prompts, params, method, shape, trace=trace, salt=salt)
        return raise_single_error(await asyncio.gather(*map(self._finish, pending)))

    async def chat(
        self,
        messages: str | Seq[Message] | Seq[Seq[Message]] | Seq[str],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        method: str | Method | Seq[str | Method] | None = None,
        shape: FormatLike | Seq[FormatLike | None] | None = None,
        trace: bool = False,
        salt: str = "",
    ) -> list[Result]:
        """Answers a conversation, or a list of them; plain text is one user message."""
        pending = self._requests(messages, params, method, shape, chat=True, trace=trace, salt=salt)
        return raise_single_error(await asyncio.gather(*map(self._finish, pending)))

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        method: str | Method | None = None,
        shape: FormatLike | None = None,
        trace: bool = False,
        salt: str = "",
        canvas: bool = False,
    ) -> AsyncIterator[Chunk]:
        """Streams the answer to one prompt, a chunk per pass; messages use the chat template.

        With `canvas`, every pass has a chunk, with the tokens that a masked model settled beyond gaps.
        """
        pending = self._request(
            prompt, params, method, shape, trace=trace, salt=salt, streaming=True, canvas=canvas
        )
        async for event in self._events(pending):
            if (chunk := pending.take_chunk(event)) is not None:
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
        """Fills in the gaps of a text, written as `<mask:8>`: one `Filled` for each of n samples."""
        pending = self._infill_request(text, params, method, trace=trace, salt=salt)
        async for event in self._events(pending):
            pending.take(event)
        return self._filled(pending)

    async def _finish(self, pending: PendingRequest | OutstrideError) -> Result:
        if not isinstance(pending, PendingRequest):
            return Result([], error=pending)
        async for event in self._events(pending):
            pending.take(event)
        return pending.result()

    async def _events(self, pending: PendingRequest) -> AsyncIterator[OutputEvent]:
        """The events of a request until it is done. Leaving the iteration early cancels it."""
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[OutputEvent] = asyncio.Queue()

        def callback(event: OutputEvent) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, event)

        pending.handle.callback = callback
        self.engine_thread.submit(pending.handle)
        try:
            while not pending.done:
                yield await inbox.get()
        finally:
            if not pending.done:
                self.engine_thread.cancel(pending.handle)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)
