"""`leap`: settle confident predictions, and less confident ones near them."""

from __future__ import annotations

from outstride.core.proposal import Proposal, Scores
from outstride.core.sequence import View
from outstride.diffusion.unmasker import Prediction, Unmasker
from outstride.registry import method


@method("leap", family="diffusion")
class LeapUnmasker(Unmasker):
    """Settles very sure positions, and with them near ones that are only fairly sure.

    Positions with at least the probability `anchor` are anchors; within `radius` of one, `relaxed` is
    enough.

    Paper: LocalLeap (Kong et al., 2025)
    Exactness: lossy
    Needs: a masked model
    Cost per step: one block, for as many tokens as are sure
    """

    def __init__(
        self,
        *,
        anchor: float = 0.9,
        relaxed: float = 0.75,
        radius: int = 4,
        block: int = 0,
        cache: str = "none",
        refresh: int = 0,
    ) -> None:
        super().__init__(block=block, cache=cache, refresh=refresh)
        if not 0 < relaxed <= anchor <= 1 or radius < 0:
            raise ValueError("needs 0 < relaxed <= anchor <= 1 and radius >= 0")
        self.anchor = anchor
        self.relaxed = relaxed
        self.radius = radius

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Prediction]
    ) -> list[Prediction]:
        anchors = [p.position for p in found if p.probability >= self.anchor]

        def near(prediction: Prediction) -> bool:
            return any(abs(prediction.position - at) <= self.radius for at in anchors)

        return [
            p for p in found if p.position in anchors or (p.probability >= self.relaxed and near(p))
        ]
