"""`rejection`, `block-verify`, `mcsd`, `spectr`: independent chains of a draft model, verified by rules
that keep the distribution."""

from __future__ import annotations

from outstride.core.proposal import Scores
from outstride.core.sequence import View
from outstride.draft.sampled import SampledDrafter, sample_top
from outstride.draft.tree_expansion import Branch
from outstride.registry import method


class SampledChains(SampledDrafter):
    """`width` chains, each sampled by itself. Two with the same beginning are verified together."""

    def _count(self, view: View) -> int:
        return self.width if view.params.temperature > 0 else 1

    def depth(self, view: View, budget: int) -> int:
        return min(super().depth(view, budget), -(-budget // self._count(view)))

    def branches(self, view: View, scores: Scores, above: Branch, at: int) -> list[Branch]:
        row = scores.probabilities(above.node)
        found = []
        for i in range(self._count(view) if above.place < 0 else 1):
            [token], _ = sample_top(row, self.noise(view, above.place + i), at, 1)
            found.append(Branch(int(token), above.place, row=row))
        return found

    def chosen(self, drafted: list[Branch], budget: int) -> list[Branch]:
        return drafted[:budget]  # one level after the other


@method("rejection", family="draft model", acceptor="rejection")
class RejectionDrafter(SampledChains):
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
class BlockVerifyDrafter(SampledChains):
    """A smaller model writes a chain with noise of its own; it is judged as a whole.

    A token that is less likely under the target than under the draft model may be made up for by
    those before it, so at least as many tokens are accepted as when each is judged by itself.

    Paper: Block Verification Accelerates Speculative Decoding (Sun et al., 2024)
    Exactness: distribution
    Needs: draft model
    Cost per step: `length` passes of the draft model, shared, and `length` further nodes
    """

    def __init__(self, *, model: str, length: int = 4) -> None:
        super().__init__(model=model, length=length)


@method("mcsd", family="draft model", acceptor="candidates")
class MultiCandidateDrafter(SampledChains):
    """A smaller model draws several chains; the rejection rule goes through the candidates in turn.

    The next candidate is tested against the residual that a refused one leaves of the target's
    distribution.

    Paper: Multi-Candidate Speculative Decoding (Yang et al., 2024); SpecInfer (Miao et al., 2024)
    Exactness: distribution
    Needs: draft model
    Cost per step: `length` passes of the draft model, shared, and length * width further nodes
    """

    def __init__(self, *, model: str, length: int = 4, width: int = 3) -> None:
        super().__init__(model=model, length=length, width=width)


@method("spectr", family="draft model", acceptor="k-seq")
class SpecTrDrafter(SampledChains):
    """A smaller model draws several chains; candidates are selected by SpecTr's transport plan.

    All candidates face one threshold, set so that the residual after all of them makes up exactly
    what is missing of the target's distribution.

    Paper: SpecTr (Sun et al., 2023)
    Exactness: distribution
    Needs: draft model
    Cost per step: `length` passes of the draft model, shared, and length * width further nodes
    """

    def __init__(self, *, model: str, length: int = 4, width: int = 3) -> None:
        super().__init__(model=model, length=length, width=width)
