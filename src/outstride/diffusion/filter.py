"""`filter`: a trained filter predicts which tokens will be those of the finished text."""

from __future__ import annotations

import numpy as np

from outstride.core.graph import BoolArray, FloatArray
from outstride.core.proposal import Proposal, Scores, Wants
from outstride.core.sequence import View
from outstride.diffusion.canvas import CanvasState
from outstride.diffusion.unmasker import Prediction, Unmasker
from outstride.registry import method

REACH = 2
"""How many neighbours on either side are among the features."""
FEATURES = 6 + 4 * REACH
"""How many features a prediction has."""
_MAX_COUNT = 32
"""Counts and distances are clipped here."""


def features(
    probability: FloatArray,
    lead: FloatArray,
    entropy: FloatArray,
    active: BoolArray,
    certainty: FloatArray,
) -> FloatArray:
    """The features of each position: [..., positions, `FEATURES`]. All inputs are [..., positions].

    probability, lead, entropy: of the predicted token, of it over the next token, of the position.
    active: the open positions of the pass. certainty: the prediction's probability at active
    positions, 1 where a token is settled, and 0 where nothing is known.
    """
    size = probability.shape[-1]
    edges = [(0, 0)] * (probability.ndim - 1) + [(REACH, REACH)]
    around = np.pad(certainty, edges)
    near = [around[..., i : i + size] for i in range(2 * REACH + 1) if i != REACH]
    count = active.sum(-1, keepdims=True)
    before = np.cumsum(active, axis=-1) - 1
    table = [
        probability,
        _nines(probability),
        lead,
        entropy,
        np.broadcast_to(np.minimum(count, _MAX_COUNT) / _MAX_COUNT, probability.shape),
        np.clip(before, 0, _MAX_COUNT) / _MAX_COUNT,
        *near,
        *map(_nines, near),
    ]
    found: FloatArray = np.stack(table, axis=-1).astype(np.float32)
    return found


def _nines(probability: FloatArray) -> FloatArray:
    """How near to 1, where probabilities hardly differ: 0 for no nines, 1 for six of them."""
    found: FloatArray = -np.log10(np.clip(1.0 - probability, 1e-6, 1.0)) / 6.0
    return found


@method("filter", family="trained")
class FilterUnmasker(Unmasker):
    """Settles every position of which a trained filter expects that its token stays, and always one.

    The filter is a tiny network over what a pass shows of each mask: the probability of its token, the
    lead over the next, the entropy, how sure its neighbours are and how much is still open. It was
    trained on the model's own texts, on whether each prediction was that of the finished text. `from`
    names its folder; `threshold` is the probability of staying that is enough (0: the one it was
    trained with).

    Paper: Learn2PD (Bao et al., 2025)
    Exactness: lossy
    Needs: a masked model, trained filter
    Cost per step: one block, for as many tokens as are expected to stay; a few thousand products on
      the host
    """

    asks = Wants(logprobs=8)
    head_kind = "unmask-filter"

    def __init__(
        self,
        *,
        from_: str,
        threshold: float = 0.0,
        block: int = 0,
        cache: str = "none",
        refresh: int = 0,
    ) -> None:
        super().__init__(block=block, cache=cache, refresh=refresh)
        if not 0 <= threshold < 1:
            raise ValueError("needs 0 <= threshold < 1")
        self.filter = from_
        self.threshold = threshold

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Prediction]
    ) -> list[Prediction]:
        trained = view.filter(self.filter)
        stays = trained.probability(self._features(view, scores, found))
        threshold = self.threshold or trained.threshold
        first = found[0].position
        return [p for p in found if stays[p.position - first] >= threshold]

    @staticmethod
    def _features(view: View, scores: Scores, found: list[Prediction]) -> FloatArray:
        """The features of all positions from the first prediction to the last."""
        canvas, first, last = CanvasState(view), found[0].position, found[-1].position
        positions = range(first - REACH, last + 1 + REACH)
        tables = np.zeros((4, len(positions)), dtype=np.float32)
        probability, lead, entropy, certainty = tables
        active = np.zeros(len(positions), dtype=np.bool_)
        for i, position in enumerate(positions):
            inside = 0 <= position < canvas.stop
            certainty[i] = float(inside and canvas.token(position) is not None)
        for prediction in found:
            i = prediction.position - positions.start
            top = scores.logprobs[prediction.row][1:]
            others = [value for token, value in top if token != prediction.token]
            shares = np.exp([value for _, value in top])
            every = np.append(shares, max(0.0, 1.0 - float(shares.sum())))
            probability[i] = certainty[i] = prediction.probability
            lead[i] = prediction.probability - float(np.exp(others[0]))
            entropy[i] = -float((every * np.log(np.maximum(every, 1e-12))).sum())
            active[i] = True
        return features(probability, lead, entropy, active, certainty)[REACH:-REACH]
