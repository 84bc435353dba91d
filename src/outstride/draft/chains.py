"""Independent chains of a draft model, for acceptors that keep the distribution."""

from __future__ import annotations

from outstride.core.proposal import Scores
from outstride.core.sequence import View
from outstride.draft.sampled import Sampled, drawn
from outstride.draft.writer import Branch
from outstride.registry import method


class Chains(Sampled):
    """`width` chains, each drawn by itself. Two may begin alike, and are then judged together."""

    def _count(self, view: View) -> int:
        return self.width if view.params.temperature > 0 else 1

    def depth(self, view: View, room: int) -> int:
        return min(super().depth(view, room), -(-room // self._count(view)))

    def branches(self, view: View, scores: Scores, above: Branch, at: int) -> list[Branch]:
        row = scores.probabilities(above.node)
        found = []
        for i in range(self._count(view) if above.place < 0 else 1):
            [token], _ = drawn(row, self.noise(view, above.place + i), at, 1)
            found.append(Branch(int(token), above.place, row=row))
        return found

    def chosen(self, written: list[Branch], room: int) -> list[Branch]:
        return written[:room]  # levels come one behind the other


@method("rejection", family="draft model", acceptor="rejection")
class Rejection(Chains):
    """A smaller model writes a chain with noise of its own; the classic rejection rule judges it.

    It accepts more than equality can, but keeps only the distribution: the text depends on draft
    lengths, and so on load.

    Paper: Speculative Decoding (Leviathan et al., 2023); Speculative Sampling (Chen et al., 2023)
    Exactness: distribution
    Needs: draft model
    Cost per step: `length` passes of the draft model, shared, and `length` further nodes
    """

    def __init__(self, *, model: str, length: int = 4) -> None:
        super().__init__(model=model, length=length)


@method("block-verify", family="draft model", acceptor="block")
class BlockVerify(Chains):
    """A smaller model writes a chain with noise of its own; it is judged as a whole.

    A token that the target likes less than the draft model did may be made up for by those before
    it, so at least as many tokens are accepted as when each is judged by itself.

    Paper: Block Verification Accelerates Speculative Decoding (Sun et al., 2024)
    Exactness: distribution
    Needs: draft model
    Cost per step: `length` passes of the draft model, shared, and `length` further nodes
    """

    def __init__(self, *, model: str, length: int = 4) -> None:
        super().__init__(model=model, length=length)


@method("mcsd", family="draft model", acceptor="candidates")
class Candidates(Chains):
    """A smaller model draws several chains; the rejection rule goes through the candidates in turn.

    What a refused candidate leaves of the target's distribution is what the next one is held to.

    Paper: Multi-Candidate Speculative Decoding (Yang et al., 2024); SpecInfer (Miao et al., 2024)
    Exactness: distribution
    Needs: draft model
    Cost per step: `length` passes of the draft model, shared, and length * width further nodes
    """

    def __init__(self, *, model: str, length: int = 4, width: int = 3) -> None:
        super().__init__(model=model, length=length, width=width)


@method("spectr", family="draft model", acceptor="k-seq")
class SpecTr(Chains):
    """A smaller model draws several chains; candidates are selected by SpecTr's transport plan.

    All candidates face one threshold, which is set so that those refused leave just what is needed.

    Paper: SpecTr (Sun et al., 2023)
    Exactness: distribution
    Needs: draft model
    Cost per step: `length` passes of the draft model, shared, and length * width further nodes
    """

    def __init__(self, *, model: str, length: int = 4, width: int = 3) -> None:
        super().__init__(model=model, length=length, width=width)
