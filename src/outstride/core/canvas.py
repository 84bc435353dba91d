"""Where a masked sequence stands: which positions are settled, which are open, which pass next.

All of it is a function of what is settled (and, for drafts, of what is assumed), so that a sequence
takes the same course whatever its company.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outstride.core.contracts import FULL
from outstride.core.proposal import Verdict
from outstride.core.sampling import Draw, Purpose, uniform
from outstride.core.sequence import View

WIDTH = 16
"""How many masks a causal model is given ahead, if neither it nor the method says."""


class Sheet:
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
        ends = set(view.endings(1 << 30))  # but for a least length, which few requests have
        closing = [p for p, t in self._settled.items() if t in ends and view.closing(p, t)]
        self.stop = min([view.limit, *(p + 1 for p in closing)])
        """Where the text ends: behind a settled end of text nothing needs to be computed."""
        self._cut = min((p + 1 for p in closing), default=1 << 30)

    def with_tokens(self, tokens: Mapping[int, int]) -> Sheet:
        """The same with more tokens settled."""
        return Sheet(self._view, {**self._settled, **tokens})

    def token(self, position: int) -> int | None:
        """What is settled there, if anything."""
        if position < self._view.end:
            return self._view.tokens[position]
        return self._settled.get(position)

    @property
    def done(self) -> bool:
        """Whether nothing is open any more."""
        return self.end >= self.stop

    @property
    def clock(self) -> int:
        """How many tokens of the answer are settled: the time that random orders go by."""
        before = self._view.end - self._view.prompt_length
        return before + sum(p >= self._view.end for p in self._settled)

    @property
    def full(self) -> bool:
        """Whether the model sees the whole canvas at once."""
        return self._view.block() == FULL.block

    def block(self, size: int = 0) -> range:
        """The positions that are filled in together: a block of the model's, or `size` of them.

        On a full canvas blocks are counted from the prompt on; a causal model takes a window that
        begins with the first open position.
        """
        own, masking = self._view.block(), self._view.masking()
        if own is None:
            width = size or (masking.block if masking else None) or WIDTH
            return range(self.end, min(self.end + width, self.stop))
        if self.full:
            first = self._view.prompt_length
            size = size or self._view.limit - first
            start = first + (self.end - first) // size * size
            return range(start, min(start + size, self.stop))
        size = min(size or own, own)
        start = self.end // size * size
        return range(start, min(start + size, (self.end // own + 1) * own, self.stop))

    def open(self, places: Sequence[int]) -> list[int]:
        """Those of the positions that are not settled and not behind the end."""
        return [p for p in places if self.end <= p < self.stop and p not in self._settled]

    def window(self) -> range:
        """The positions that a pass has to compute, unless it reuses something."""
        own = self._view.block()
        if own is None:
            return self.block()
        if self.full:
            return range(self.stop)
        start = self.end // own * own
        return range(start, min(start + own, self._cut))

    def blocks(self, size: int, depth: int, start: float) -> list[range]:
        """The blocks in work: a later one is begun once enough of the one before it is settled."""
        own = self._view.block() or 0
        step = size if self.full and size else own
        found = [self.block(size) if self.full else self.window()]
        while self._view.block() is not None and len(found) < depth:
            last = found[-1]
            here = [p for p in last if p >= self._view.prompt_length]
            settled = len(here) - len(self.open(here))
            if last.stop >= self.stop or settled < start * len(here):
                break
            stop = self.stop if self.full else self._cut
            found.append(range(last.stop, min(last.stop + step, stop)))
        return found


@dataclass(frozen=True, slots=True)
class Memory:
    """What a drafter of canvases remembers from step to step."""

    note: Any = None
    """What the acceptor wants to be told again."""
    front: int = -1
    """Where the block of the last pass began."""
    age: int = 0
    """Passes since all of the canvas was computed."""
    recent: tuple[int, ...] = ()
    """Positions settled by the last pass: their entries were computed while they were masks."""

    def after(self, verdict: Verdict, front: int, *, whole: bool) -> Memory:
        """What is remembered after a pass."""
        recent = tuple(int(p) for p in verdict.settled)
        return Memory(verdict.note, front, 1 if whole else self.age + 1, recent)


def recall(view: View) -> Memory:
    """The memory of a sequence, or the empty one."""
    return view.state if isinstance(view.state, Memory) else Memory()


def chance_at(view: View, clock: int, position: int) -> float:
    """A number in (0, 1) for a position at a time: what random orders go by."""
    return uniform(Draw(seed=view.seed, index=view.index, purpose=Purpose.ORDER), clock, position)
