"""`PendingRequest`: collects the events of a request into chunks and a result."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from outstride.core.infill import InfillTemplate
from outstride.core.sequence import Sequence
from outstride.engine.engine_thread import OutputEvent, RequestHandle
from outstride.results import Chunk, Completion, Result, completion_of, prompt_logprobs_of


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A request that is ready to run, or that runs."""

    handle: RequestHandle
    trace: bool
    template: InfillTemplate | None = None
    """The text with gaps, for requests that fill them in."""
    done: bool = False
    started: float = field(default_factory=time.perf_counter)
    texts: dict[int, str] = field(default_factory=dict)
    num_traced: dict[int, int] = field(default_factory=dict)
    """By sample, how many lines of the trace earlier chunks contain."""
    outputs: dict[int, Completion] = field(default_factory=dict)
    leader: Sequence | None = None
    error: Exception | None = None

    def take(self, event: OutputEvent) -> Chunk | None:
        """Adds an event and returns its chunk; None for an event without progress."""
        self.done = event.done
        if event.error is not None:
            self.error = event.error
        if event.progress is None:
            return None
        sequence, now = event.progress.sequence, time.perf_counter()
        index = sequence.index
        if index == 0:
            self.leader = sequence
        if sequence.error is not None:
            self.error = sequence.error
        self.texts[index] = self.texts.get(index, "") + event.progress.text
        trace = None
        if self.trace:
            before = self.num_traced.get(index, 0)
            trace = sequence.trace[before:]
            self.num_traced[index] = before + len(trace)
        chunk = Chunk(event.progress.text, event.progress.tokens, index, trace)
        if sequence.stream_canvas:
            start = sequence.prompt_length
            chunk.canvas = {p - start: token for p, token in event.progress.canvas.items()}
        if event.progress.finished:
            chunk.completion = self.outputs[index] = completion_of(
                sequence,
                self.texts[index],
                now - self.started,
                (sequence.first_token_time or now) - self.started,
                trace=self.trace,
            )
        return chunk

    def take_chunk(self, event: OutputEvent) -> Chunk | None:
        """Adds an event of a stream: raises its error; None if there is nothing to show."""
        chunk = self.take(event)
        if self.error is not None:
            raise self.error
        return chunk if chunk is not None and (self.handle.stream_canvas or chunk) else None

    def result(self) -> Result:
        """The result so far; complete once `done` is set."""
        return Result(
            prompt_token_ids=self.handle.tokens,
            outputs=[self.outputs[i] for i in sorted(self.outputs)],
            prompt_logprobs=prompt_logprobs_of(self.leader) if self.leader else None,
            error=self.error,
        )
