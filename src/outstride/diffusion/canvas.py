"""The canvas of a masked sequence: which positions are settled, which are open, which block is next.

Everything here is a function of what is settled (and, for drafts, of what is assumed). So a sequence
takes the same course in every batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outstride.core.contracts import FULL, MaskedSpec
from outstride.core.proposal import Verdict
from outstride.core.sampling import Purpose, SamplingSpec, uniform
from outstride.core.sequence import View

DEFAULT_WINDOW = 16
"""How many masks a causal model gets ahead, if neither the model nor the method says."""


class CanvasState:
    """A canvas as it is, or as it would be with some more tokens settled."""

    def __init__(self, view: View, assumed: Mapping[int, int] | None = None) -> None:
        self._view = view
        self._settled: Mapping[int, int] = view.canvas
        if assumed:
            self._settled = {**view.canvas, **assumed}
        end = int(view.end)
        while end in self._settled:
            end += 1
        self.end = end
        """The first open position."""
        ends = set(view.endings(1 << 30))  # as if beyond any `min_tokens`, which few requests set
        closing = [p for p, t in self._settled.items() if t in ends and view.closing(p, t)]
        self.stop = min([view.limit, *(p + 1 for p in closing)])
        """Where the text ends: after a settled end of text nothing needs to be computed."""
        self._cut = min((p + 1 for p in closing), default=1 << 30)

    def with_tokens(self, tokens: Mapping[int, int]) -> CanvasState:
        """This canvas with more tokens settled."""
        return CanvasState(self._view, {**self._settled, **tokens})

    def token(self, position: int) -> int | None:
        """The token that is settled at a position; None for an open one."""
        if position < self._view.end:
            return self._view.tokens[position]
        return self._settled.get(position)

    @property
    def done(self) -> bool:
        """Whether no position is open."""
        return self.end >= self.stop

    @property
    def num_settled(self) -> int:
        """How many tokens of the answer are settled. Random orders are keyed by it."""
        before = self._view.end - self._view.prompt_length
        return before + sum(p >= self._view.end for p in self._settled)

    @property
    def full(self) -> bool:
        """Whether the model attends to the whole canvas at once."""
        return block_of(self._view) == FULL.block

    def block(self, size: int = 0) -> range:
        """The positions that are filled in together: one block of the model, or `size` positions.

        On a full canvas blocks are counted from the end of the prompt. A causal model gets a window
        that begins with the first open position.
        """
        own, masked = block_of(self._view), spec_of(self._view)
        if own is None:
            width = size or (masked.block if masked else None) or DEFAULT_WINDOW
            return range(self.end, min(self.end + width, self.stop))
        if self.full:
            first = self._view.prompt_length
            size = size or self._view.limit - first
            start = first + (self.end - first) // size * size
            return range(start, min(start + size, self.stop))
        size = min(size or own, own)
        start = self.end // size * size
        return range(start, min(start + size, (self.end // own + 1) * own, self.stop))

    def open(self, positions: Sequence[int]) -> list[int]:
        """Those of the positions that are not settled and lie before the end of the text."""
        return [p for p in positions if self.end <= p < self.stop and p not in self._settled]

    def window(self) -> range:
        """The positions that a pass has to compute when it reuses no stale KV."""
        own = block_of(self._view)
        if own is None:
            return self.block()
        if self.full:
            return range(self.stop)
        start = self.end // own * own
        return range(start, min(start + own, self._cut))

    def blocks(self, size: int, depth: int, start: float) -> list[range]:
        """Up to `depth` active blocks: one begins when the share `start` of the last is settled."""
        own = block_of(self._view) or 0
        step = size if self.full and size else own
        found = [self.block(size) if self.full else self.window()]
        while block_of(self._view) is not None and len(found) < depth:
            last = found[-1]
            here = [p for p in last if p >= self._view.prompt_length]
            settled = len(here) - len(self.open(here))
            if last.stop >= self.stop or settled < start * len(here):
                break
            stop = self.stop if self.full else self._cut
            found.append(range(last.stop, min(last.stop + step, stop)))
        return found


@dataclass(frozen=True, slots=True)
class CanvasMemory:
    """The state that a masked method keeps of a sequence from step to step."""

    note: Any = None
    """What the method's own `accept` returned as the note of its last verdict."""
    front: int = -1
    """Where the block of the last pass began."""
    age: int = 0
    """Passes since the whole canvas was computed."""
    recent: tuple[int, ...] = ()
    """Positions settled by the last pass: their KV was computed while they were masks."""

    def after(self, verdict: Verdict, front: int, *, whole: bool) -> CanvasMemory:
        """The memory after a pass; `whole` says whether it computed the whole canvas."""
        recent = tuple(int(p) for p in verdict.settled)
        return CanvasMemory(verdict.note, front, 1 if whole else self.age + 1, recent)


def recall(view: View) -> CanvasMemory:
    """The memory of a sequence, or an empty one."""
    return view.state if isinstance(view.state, CanvasMemory) else CanvasMemory()


def random_priority(view: View, num_settled: int, position: int) -> float:
    """A number in (0, 1) by which random orders rank a position at one point of the answer."""
    return uniform(
        SamplingSpec(seed=view.seed, index=view.index, purpose=Purpose.ORDER), num_settled, position
    )


def spec_of(view: View) -> MaskedSpec | None:
    """How the target fills in masks."""
    return view.masked_spec()


def block_of(view: View) -> int | None:
    """The block size of the target's attention; None: causal."""
    return view.block()
