"""`skip-layers`: the longer an answer gets, the fewer layers its tokens pass. Lossy."""

from __future__ import annotations

from itertools import takewhile

from outstride.core.contracts import Demand, Drafter, Rounds
from outstride.core.proposal import Proposal, Wants
from outstride.core.sequence import View
from outstride.registry import method


@method("skip-layers", family="self-speculation")
class SkipLayers(Drafter):
    """Each token passes the first layers and the last ones, fewer of them as the answer gets longer.

    It changes the text, and nothing checks it. The prompt passes all layers. From the first token of
    the answer to the one numbered `span`, the number of layers falls evenly from all of them to
    `min_layers` (0: half of them). The layers that are skipped come right after the first `warm`
    ones, so a later token uses no layer that an earlier one did not pass: all KV that it attends to
    is there. The number follows from the position in the answer alone; so the text is the same in
    every batch, and after a preemption, when the answer is computed again in chunks of tokens that
    skip the same layers. A model has to be tuned to do without these layers; the text of one that was
    not soon degrades.

    Paper: SkipDecode (Del Corro et al., 2023), without its fine-tuning
    Exactness: lossy
    Needs: nothing
    Cost per step: one node, which passes `warm` layers in a round of its own and then the last ones
    """

    layer_ranges = True
    partial_kv = True

    def __init__(self, *, warm: int = 4, min_layers: int = 0, span: int = 64) -> None:
        if warm < 1 or span < 1 or (min_layers <= warm and min_layers != 0):
            raise ValueError(
                "needs warm >= 1, span >= 1, and min_layers > warm (or 0: half the layers)"
            )
        self.warm = warm
        self.min_layers = min_layers
        self.span = span

    def resumes(self, position: int, view: View) -> int:
        """The layer at which a token goes on after the first ones: `warm` if it skips none."""
        layers, place = view.layers, position - view.prompt_length + 1
        fewest = min(max(self.min_layers or layers // 2, self.warm + 1), layers)
        return self.warm + (layers - fewest) * min(max(place, 0), self.span) // self.span

    def demand(self, view: View) -> Demand:
        """No nodes. Settled tokens are computed again in chunks that skip the same layers."""
        if (pending := view.num_uncomputed()) == 1:
            return Demand()
        first = view.end - pending
        if first < view.prompt_length:
            return Demand(prefill_until=view.prompt_length)
        start, later = self.resumes(first, view), range(first, view.end)
        alike = takewhile(lambda position: self.resumes(position, view) == start, later)
        return Demand(prefill_until=first + sum(1 for _ in alike))

    def propose(self, view: View, budget: int) -> Rounds:
        given = view.given()
        start = self.resumes(int(given.positions[0]), view)
        if start == self.warm:
            return Proposal(given, len(given))
        wants = Wants(nodes=(), hidden=(self.warm,))
        scores = yield Proposal(given, len(given), layers=(0, self.warm), wants=wants)
        states = scores.hidden[self.warm]
        return Proposal(given, len(given), layers=(start, view.layers), hidden=states)
