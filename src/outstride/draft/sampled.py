"""Drafts for acceptors that keep the distribution: drawn with noise of their own, rows at hand."""

from __future__ import annotations

import numpy as np

from outstride.core.contracts import Rounds
from outstride.core.graph import FloatArray, IntArray, tree
from outstride.core.proposal import Proposal, Wants
from outstride.core.sampling import Draw, Purpose, best, independent
from outstride.core.sequence import View
from outstride.draft.writer import Branch, Writer, noise_of


def drawn(row: FloatArray, draw: Draw, at: int, count: int) -> tuple[IntArray, FloatArray]:
    """Tokens drawn without replacement from a distribution, in order, and their perturbed values.

    The largest `count` sums of log-probability and noise (Gumbel top-k); the first is a plain draw.
    """
    with np.errstate(divide="ignore"):
        logs = np.log(row)
    tokens = best(logs, draw, at, min(count, len(row)))
    tokens = tokens[row[tokens] > 0]
    return tokens, logs[tokens] + noise_of(draw, at, tokens)


class Sampled(Writer):
    """A draft model's own draws.

    Their noise belongs to a step and a branch, not to positions: an acceptor may look at the whole
    draft before it decides on its first token, and what it has looked at must not be used again.
    """

    purpose = Purpose.DRAFT
    asks = Wants(rows=True)
    wants = Wants(rows=True)

    def noise(self, view: View, branch: int) -> Draw:
        """The key for draws at one place of this step's draft."""
        own = Draw(temperature=1.0, seed=view.seed, index=view.index, purpose=self.purpose)
        return independent(own, view.steps, branch)

    def chosen(self, written: list[Branch], room: int) -> list[Branch]:
        """What is sent of what was written. It may depend on values, never on tokens."""
        return written

    def propose(self, view: View, room: int) -> Rounds:
        given = view.given()
        sent = self.chosen((yield from self.write(view, room)), room)
        drafted = tree([b.token for b in sent], [b.parent for b in sent], view.end)
        return Proposal(
            given.grow(drafted),
            len(given),
            drafted={len(given) + i: b.row for i, b in enumerate(sent) if b.row is not None},
            wants=self.wants,
        )
