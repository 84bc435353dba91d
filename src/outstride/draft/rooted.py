"""A draft that starts from several of the target's own next tokens. Lossy."""

from __future__ import annotations

from outstride.core.contracts import Demand, Rounds
from outstride.core.graph import tree
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.draft.writer import Branch, Writer
from outstride.registry import method


@method("rooted", family="draft model", acceptor="rooted")
class Rooted(Writer):
    """The target leaves its next token open between its `width` best; the longest draft decides.

    It changes the text: of several tokens that the target might have said, the one is taken behind
    which the smaller model foresaw most. (Kept exact, the first of them would always win: a
    candidate drawn from the target's own distribution is never refused. That is the token which
    other methods settle at the end of a pass.) With `width` 1 the text is that of plain decoding.

    Paper: Improving Multi-candidate Speculative Decoding (Lu et al., 2024)
    Exactness: lossy
    Needs: draft model
    Cost per step: `length` passes of the draft model, shared, and length * width further nodes
    """

    def __init__(self, *, model: str, length: int = 4, width: int = 3) -> None:
        super().__init__(model=model, length=length, width=width)
        self.wants = Wants(best=width)

    def demand(self, view: View) -> Demand:
        roots, depth = len(view.state or ()), min(self.length, view.limit - view.end)
        return Demand(least=min(roots, 1), most=roots * depth, gain=0.5 * depth)

    def depth(self, view: View, room: int) -> int:
        roots = len(view.state or ())
        return min(self.length, view.limit - view.end, -(-room // roots)) if roots else 0

    def branches(self, view: View, scores: Scores, above: Branch, at: int) -> list[Branch]:
        if above.place < 0:
            return [Branch(token, -1) for token in view.state]
        return [Branch(scores.token(above.node), above.place)]

    def propose(self, view: View, room: int) -> Rounds:
        given = view.given()
        written = (yield from self.write(view, room))[:room]  # levels come one behind the other
        if not written and room > 0:
            written = [Branch(token, -1) for token in view.state or ()][:room]
        drafted = tree([b.token for b in written], [b.parent for b in written], view.end)
        return Proposal(given.grow(drafted), len(given), wants=self.wants)

    def observe(
        self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict
    ) -> list[int]:
        return [int(token) for token in scores.rivals(verdict.keep[-1])]
