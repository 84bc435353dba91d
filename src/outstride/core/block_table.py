"""`BlockTable`: which KV one model has cached for one sequence, and in which pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from outstride.core.recurrent import SequenceState

_table_versions = count(1)


class StepToken(NamedTuple):
    """The state of a sequence in one model's KV cache; a backend may prepare its next step by it.

    Two tokens with the same `version` mean: between them the block table has only grown at its end.
    The KV that the earlier one counts is in the same slots and at the same positions, in order. So
    `on(1)` is the token of the same sequence one decoded token later. Any other change of the table
    (KV dropped, moved or kept out of order, a page replaced, a fork, preemption) takes a new version.
    """

    version: int
    num_cached: int

    def on(self, tokens: int) -> StepToken:
        """The token of the same sequence when `tokens` more of its tokens have their KV."""
        return StepToken(self.version, self.num_cached + tokens)


@dataclass(slots=True)
class BlockTable:
    """The cached KV of one sequence: KV lies in slots, slots lie in pages.

    `positions[i]` is the logical position of the token whose KV lies in slot i of the table. The last
    `stale` ones are reused although they are stale: no other sequence shares them, and a node at the
    same position replaces them.
    """

    pages: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    stale: int = 0
    shared: int = 0
    """How many leading pages are in the prefix tree."""
    ordered: bool = True
    """Whether slot i holds position i. This fails only after tokens were kept out of order."""
    state: SequenceState | None = None
    """The recurrent state after the cached tokens, if the model has recurrent layers."""
    version: int = field(default_factory=lambda: next(_table_versions), compare=False)
    """Unique among all tables; see `StepToken`."""

    @property
    def step_token(self) -> StepToken:
        """Names the state of this table: what it holds, and where."""
        return StepToken(self.version, len(self.positions))

    def renew(self) -> None:
        """Takes a new version: the table was changed other than by growing at its end."""
        self.version = next(_table_versions)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def valid(self) -> int:
        """How many cached tokens are valid for good: all but the stale ones."""
        return len(self.positions) - self.stale

    def num_uncomputed(self, length: int, block: int | None) -> int:
        """How many positions below `length` have no valid KV."""
        if self.ordered and block is None:
            return length - len(self.positions) + self.stale
        return len(self.uncomputed(length, block))

    def uncomputed(self, length: int, block: int | None) -> range | list[int]:
        """The positions below `length` that have no valid KV.

        A model with block attention prefills whole blocks only: the method that fills in the last,
        incomplete block runs it itself.
        """
        end = length if block is None else length // block * block
        if self.ordered:
            return range(self.valid, max(end, self.valid))
        kept = set(self.positions[: self.valid])
        return [position for position in range(end) if position not in kept]
