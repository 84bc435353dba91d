"""Recursive speculative decoding: paths of a draft model, drawn without replacement."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from outstride.core.proposal import Scores
from outstride.core.sequence import View
from outstride.draft.sampled import Sampled, drawn
from outstride.draft.writer import Branch, leading, pruned
from outstride.registry import method

Values = npt.NDArray[np.float64]


def below(top: Values | float, values: Values, largest: Values | float) -> Values:
    """Perturbed values, moved so that the largest of the siblings comes to stand at `top`.

    This is what they are once it is known that `top` is the largest of them all.
    """
    with np.errstate(divide="ignore"):
        gap = top - values + np.log1p(-np.exp(values - largest))
    moved: Values = top - np.maximum(gap, 0.0) - np.log1p(np.exp(-np.abs(gap)))
    return moved


@method("rsd", family="draft model", acceptor="recursive")
class Recursive(Sampled):
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
        tokens, values = drawn(row, self.noise(view, above.place), at, self.width)
        perturbed = values.astype(np.float64) + above.logprob
        top = above.score if above.place >= 0 else float(perturbed[0])
        moved = below(top, perturbed, perturbed[0])
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

    def sift(self, fresh: list[Branch]) -> tuple[list[Branch], list[Branch]]:
        going = leading(fresh, self.width)
        return going, going

    def chosen(self, written: list[Branch], room: int) -> list[Branch]:
        return pruned(written, room)
