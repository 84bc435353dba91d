"""A trained judge passes drafted tokens that the target would have worded otherwise. Lossy."""

from __future__ import annotations

from outstride.core.contracts import Rounds
from outstride.core.proposal import Wants
from outstride.core.sequence import View
from outstride.draft.draft import Draft
from outstride.registry import method


@method("judge", family="draft model", acceptor="judge")
class Judge(Draft):
    """A smaller model's tokens stay where a trained judge finds that the target could have said them.

    It changes the text. Tokens that the target puts there itself hold as ever; of others, the judge
    looks at the target's state behind them, and passes those that are right with a probability of
    `sure` or more. `from` names the folder of the judge, which was trained on the target's own words.

    Paper: Judge Decoding (Bachmann et al., 2025)
    Exactness: lossy
    Needs: draft model, trained part
    Cost per step: as for `draft`; a few thousand products on the host for each token in doubt
    """

    part = "judge"

    def __init__(
        self, *, model: str, from_: str, length: int = 6, width: int = 1, sure: float = 0.9
    ) -> None:
        super().__init__(model=model, length=length, width=width)
        if not 0 < sure <= 1:
            raise ValueError("needs sure above 0 and up to 1")
        self.judge = from_

    def propose(self, view: View, room: int) -> Rounds:
        guess = yield from self.guess(view, room)
        wants = Wants(hidden=(view.filter(self.judge).layer,)) if len(guess) else None
        return guess.proposal(view, wants)
