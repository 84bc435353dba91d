"""As many guesses as a bound on their joint error allows."""

from __future__ import annotations

from outstride.accept.unmask import Guess, Unmask, entropy, logits
from outstride.core.proposal import Proposal, Scores
from outstride.core.sequence import View
from outstride.registry import acceptor


@acceptor("entropy-bound")
class EntropyBound(Unmask):
    """Settles the most certain for as long as their entropies, but for the largest, stay in bounds.

    What guesses that do not see each other can be wrong about together is at most the sum of their
    entropies less the largest.
    """

    def __init__(self, *, bound: float, cache: str) -> None:
        super().__init__(cache=cache)
        self.bound = bound

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Guess]
    ) -> list[Guess]:
        doubts = {guess.position: entropy(logits(scores, guess)) for guess in found}
        chosen: list[Guess] = []
        total = 0.0
        for guess in sorted(found, key=lambda g: (doubts[g.position], g.position)):
            if chosen and total > self.bound:  # the newcomer is the largest: the others count
                break
            chosen.append(guess)
            total += doubts[guess.position]
        return chosen
