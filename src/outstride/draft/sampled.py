"""Drafts for rejection sampling: sampled with noise of their own, with their distributions."""

from __future__ import annotations

import numpy as np

from outstride.core.contracts import Rounds
from outstride.core.graph import FloatArray, IntArray, tree
from outstride.core.proposal import Proposal, Wants
from outstride.core.sampling import Purpose, SamplingSpec, best, independent
from outstride.core.sequence import View
from outstride.draft.tree_expansion import Branch, DraftModelExpansion, noise_of


def sample_top(
    row: FloatArray, sampling: SamplingSpec, at: int, count: int
) -> tuple[IntArray, FloatArray]:
    """Tokens sampled without replacement from a distribution, in order, and their perturbed values.

    The largest `count` sums of log-probability and noise (Gumbel top-k); the first is a plain sample.
    """
    with np.errstate(divide="ignore"):
        logs = np.log(row)
    tokens = best(logs, sampling, at, min(count, len(row)))
    tokens = tokens[row[tokens] > 0]
    return tokens, logs[tokens] + noise_of(sampling, at, tokens)


class SampledDrafter(DraftModelExpansion):
    """Proposes samples of a draft model.

    Their noise is keyed by step and branch, not by position: an acceptor may look at the whole draft
    before it decides on its first token, and noise that was looked at must not be used again.
    """

    purpose = Purpose.DRAFT
    asks = Wants(rows=True)
    wants = Wants(rows=True)

    def noise(self, view: View, branch: int) -> SamplingSpec:
        """The noise for samples at one place of this step's draft."""
        own = SamplingSpec(temperature=1.0, seed=view.seed, index=view.index, purpose=self.purpose)
        return independent(own, view.steps, branch)

    def chosen(self, drafted: list[Branch], budget: int) -> list[Branch]:
        """The branches that are proposed. The choice may depend on values, never on tokens."""
        return drafted

    def propose(self, view: View, budget: int) -> Rounds:
        given = view.given()
        sent = self.chosen((yield from self.expand(view, budget)), budget)
        drafted = tree([b.token for b in sent], [b.parent for b in sent], view.end)
        return Proposal(
            given.grow(drafted),
            len(given),
            drafted={len(given) + i: b.row for i, b in enumerate(sent) if b.row is not None},
            wants=self.wants,
        )
