"""Every guess that a trained filter expects to stay."""

from __future__ import annotations

import numpy as np

from outstride.accept.unmask import Guess, Unmask
from outstride.core.canvas import Sheet
from outstride.core.graph import BoolArray, FloatArray
from outstride.core.proposal import Proposal, Scores
from outstride.core.sequence import View
from outstride.registry import acceptor

REACH = 2
"""So many neighbours on either side are looked at."""
FEATURES = 6 + 4 * REACH
"""Numbers by which a guess is judged."""
_FAR = 32
"""Where counting ends."""


def features(
    chance: FloatArray, gap: FloatArray, doubt: FloatArray, work: BoolArray, sure: FloatArray
) -> FloatArray:
    """What a filter is shown of each position: [..., positions, `FEATURES`].

    chance, gap, doubt: probability of the guess, its lead over the next token, and the entropy.
    work: the positions in work. sure: how sure the text is at each position: the guess's probability
    in work, 1 where a token is settled, and 0 where nothing is known.
    All are [..., positions].
    """
    size = chance.shape[-1]
    edges = [(0, 0)] * (chance.ndim - 1) + [(REACH, REACH)]
    around = np.pad(sure, edges)
    near = [around[..., i : i + size] for i in range(2 * REACH + 1) if i != REACH]
    count = work.sum(-1, keepdims=True)
    ahead = np.cumsum(work, axis=-1) - 1
    table = [
        chance,
        _nines(chance),
        gap,
        doubt,
        np.broadcast_to(np.minimum(count, _FAR) / _FAR, chance.shape),
        np.clip(ahead, 0, _FAR) / _FAR,
        *near,
        *map(_nines, near),
    ]
    found: FloatArray = np.stack(table, axis=-1).astype(np.float32)
    return found


def _nines(chance: FloatArray) -> FloatArray:
    """How near to certain, where probabilities hardly differ: 0 for none, 1 for six nines."""
    found: FloatArray = -np.log10(np.clip(1.0 - chance, 1e-6, 1.0)) / 6.0
    return found


@acceptor("filter")
class Filter(Unmask):
    """Settles the guesses that a trained part expects to be those of the finished text."""

    def __init__(self, *, from_: str, threshold: float, cache: str) -> None:
        super().__init__(cache=cache)
        self.part = from_
        self.threshold = threshold

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Guess]
    ) -> list[Guess]:
        part = view.filter(self.part)
        stays = part.judged(self._shown(view, scores, found))
        bar = self.threshold or part.threshold
        first = found[0].position
        return [guess for guess in found if stays[guess.position - first] >= bar]

    @staticmethod
    def _shown(view: View, scores: Scores, found: list[Guess]) -> FloatArray:
        """The features of all positions from the first guess to the last."""
        sheet, first, last = Sheet(view), found[0].position, found[-1].position
        places = range(first - REACH, last + 1 + REACH)
        tables = np.zeros((4, len(places)), dtype=np.float32)
        chance, gap, doubt, sure = tables
        work = np.zeros(len(places), dtype=np.bool_)
        for i, place in enumerate(places):
            inside = 0 <= place < sheet.stop
            sure[i] = float(inside and sheet.token(place) is not None)
        for guess in found:
            i = guess.position - places.start
            likeliest = scores.logprobs[guess.row][1:]
            others = [value for token, value in likeliest if token != guess.token]
            shares = np.exp([value for _, value in likeliest])
            every = np.append(shares, max(0.0, 1.0 - float(shares.sum())))
            chance[i] = sure[i] = guess.chance
            gap[i] = guess.chance - float(np.exp(others[0]))
            doubt[i] = -float((every * np.log(np.maximum(every, 1e-12))).sum())
            work[i] = True
        return features(chance, gap, doubt, work, sure)[REACH:-REACH]
