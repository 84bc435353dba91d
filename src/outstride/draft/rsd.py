"""`rsd`: a tree of a draft model's paths, sampled without replacement."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from outstride.core.proposal import Scores
from outstride.core.sequence import View
from outstride.draft.sampled import SampledDrafter, sample_top
from outstride.draft.tree_expansion import Branch, best_branches, best_paths
from outstride.registry import method

Values = npt.NDArray[np.float64]


def conditioned(top: Values | float, values: Values, largest: Values | float) -> Values:
    """Perturbed values of siblings, given that the largest of them is `top`.

    `largest` is their largest value before.
    """
    with np.errstate(divide="ignore"):
        gap = top - values + np.log1p(-np.exp(values - largest))
    moved: Values = top - np.maximum(gap, 0.0) - np.log1p(np.exp(-np.abs(gap)))
    return moved


@method("rsd", family="draft model", acceptor="recursive")
class RecursiveDrafter(SampledDrafter):
    """A smaller model draws a tree of paths without replacement, so that no candidate comes twice.

    Stochastic beams: the `width` paths with the largest perturbed log-probabilities stay, level by
    level. How many siblings stay depends on those values, which say nothing about which tokens they
    belong to; so the rejection rule may go through the siblings as if their number had been fixed.

    Paper: Recursive Speculative Decoding, RSD-S (Jeon et al., 2024); stochastic beam search (Kool et
      al., 2019)
    Exactness: distribution
    Needs: draft model
    Cost per step: `length` passes of the draft model, shared, and length * width further nodes
    """

    def __init__(self, *, model: str, length: int = 4, width: int = 3) -> None:
        super().__init__(model=model, length=length, width=width)

    def branches(self, view: View, scores: Scores, above: Branch, at: int) -> list[Branch]:
        row = scores.probabilities(above.node)
        tokens, values = sample_top(row, self.noise(view, above.place), at, self.width)
        perturbed = values.astype(np.float64) + above.logprob
        top = above.score if above.place >= 0 else float(perturbed[0])
        moved = conditioned(top, perturbed, perturbed[0])
        return [
            Branch(
                int(token),
                above.place,
                rank=rank,
                score=float(moved[rank]),
                logprob=above.logprob + float(np.log(row[token])),
                row=row,
            )
            for rank, token in enumerate(tokens)
        ]

    def select(self, fresh: list[Branch]) -> tuple[list[Branch], list[Branch]]:
        best = best_branches(fresh, self.width)
        return best, best

    def chosen(self, drafted: list[Branch], budget: int) -> list[Branch]:
        return best_paths(drafted, budget)
