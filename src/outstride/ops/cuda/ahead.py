"""`Ahead`: the pass behind the last one, and whether it is worth launching before it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outstride.core.contracts import Work
from outstride.core.proposal import Proposal, Wants
from outstride.core.sampling import Draw
from outstride.ops.cuda.head import Kind
from outstride.ops.cuda.layout import Words
from outstride.ops.cuda.steps import Steps
from outstride.ops.cuda.transfer import Reply


@dataclass(frozen=True, slots=True)
class Ask:
    """What a row of a step is asked for, but for its position."""

    draw: Draw
    offset: int
    wants: Wants

    @classmethod
    def of(cls, proposal: Proposal) -> Ask:
        return cls(proposal.draw, proposal.offset, proposal.wants)

    def again(self, proposal: Proposal) -> bool:
        """Whether a step that could be foreseen is asked for just that once more."""
        return (
            (proposal.wants is self.wants or proposal.wants == self.wants)
            and (proposal.draw is self.draw or proposal.draw == self.draw)
            and proposal.offset == self.offset
            and proposal.layers is None
            and not proposal.rules
        )


@dataclass(slots=True)
class Ahead:
    """The pass behind the last one, as it will be if all goes on as it did."""

    steps: Steps
    before: Reply
    """Brings the tokens that it begins with."""
    draws: Words
    asks: list[Ask]
    """By row."""
    kind: Kind
    reply: Reply | None = None
    """There once it is launched."""

    def match(self, work: Sequence[Work], page_size: int) -> list[int] | None:
        """The rows of this pass that the work asks for, if it asks for nothing else."""
        rows = self.steps.match(work, self.before.wait()[:, 0], page_size)
        if rows is None:
            return None
        for row, piece in zip(rows, work, strict=True):
            if not self.asks[row].again(piece.proposal):
                return None
        return rows


class Trust:
    """Whether the next pass should be launched ahead: if the last ones were mostly as foreseen.

    One that nobody asks for holds up the one that is asked for instead. Where drafts come and go that
    happens often; where now and then a prompt comes in between, it does not matter.
    """

    def __init__(self, share: float = 0.5) -> None:
        self._share = share

    @property
    def enough(self) -> bool:
        return self._share > 0.5

    def learn(self, foreseen: bool) -> None:
        """Whether a pass was as foreseen."""
        self._share += (foreseen - self._share) / 4
