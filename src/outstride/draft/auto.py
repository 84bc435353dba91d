"""`auto`: as much of a joined draft as pays; where a trained part is swift, its chain or nothing."""

from __future__ import annotations

from outstride.core.contracts import Demand, Rounds
from outstride.core.guess import Guess
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.draft.block_drafter import BlockDrafter
from outstride.draft.mix import Mix, State
from outstride.registry import method


@method("auto", family="joined")
class Auto(Mix):
    """Drafts as much as pays at this moment: from nothing at all to a tree from several drafters.

    After every step it weighs what each further token is expected to bring, by tracked odds, against
    what one more node costs in the pass at hand, by a cost curve that is measured at the start and
    corrected on line. Under load it shrinks to plain decoding by itself, and comes back. A trained part
    of the model, the one that is shipped or that `from` names, is asked where that pays; beside it,
    `parts` are `suffix` alone, which knows what the part does not: what stands in the text.

    Paper: none of its own; thresholds as in SpecDec++ (Huang et al., 2024), trees fitted to measured
      hardware as in PPD (Chen et al., 2024) and Sequoia (Chen et al., 2024)
    Exactness: exact
    Needs: nothing
    Cost per step: what is expected to pay, up to `nodes` further nodes
    """

    weighed = True
    PATIENCE = 16
    """After so many steps in which nothing paid, it looks only now and then."""
    SELDOM = 8
    """Once in so many steps, and half as often after four times as many of them."""
    CROWD = 8
    """With twice as many sequences, patience is a quarter as long, and so are looks as many."""
    STEADY = 8
    """Where a swift part is asked, it is weighed once in so many steps whether to go on."""
    LITTLE = 0.2
    """Where it brings fewer tokens than this, it pauses, whatever steps seem to cost: whoever only
    drafts does not know what plain steps take, and a slow one long ago would have the last word."""
    TRIAL, SURE = 6, 8
    """A sequence to which no chain has brought anything pauses after so many; after fewer if chains
    bring its tenant little: one, and so many more for each token that they bring there. The first one
    behind a plain step is dear, for it is not foreseen: a trial is worth a few more."""
    PAUSE, LONGER = 32, 4
    """Steps of a pause, and how many times longer the next one is; the first is so twice over where
    chains bring hardly anything to anybody."""

    def __init__(self, *, parts: str = "", nodes: int = 48, from_: str = "") -> None:
        usual = "suffix" if from_ else "suffix+recycle"
        super().__init__(parts=parts or usual, nodes=nodes, from_=from_)
        self._chain = BlockDrafter(from_=from_, width=1) if from_ else None

    def demand(self, view: View) -> Demand:
        state: State | None = view.state
        if state is None:
            return Demand()
        state.swift = False
        crowd = max(view.company // self.CROWD, 1) ** 2
        seldom = crowd * (self.SELDOM if state.idle <= 4 * self.PATIENCE else 2 * self.SELDOM)
        # All look at the same step: what it costs to weigh anything is paid once.
        state.resting = crowd * state.idle > self.PATIENCE and view.clock % seldom > 0
        if state.resting:
            return self._rest(state, seldom - view.clock % seldom)
        if self._chain is not None and view.graft(self.grafts[0]).swift:
            return self._swiftly(view, state, self._chain)
        return self._weighed(view, state)

    @staticmethod
    def _rest(state: State, steps: int) -> Demand:
        """So many steps of which nothing is told: what would have been noted then is noted now."""
        state.idle += steps
        state.promises.asked.fade(steps)
        state.promises.chains.fade(steps)
        return Demand(rest=steps)

    def _swiftly(self, view: View, state: State, chain: BlockDrafter) -> Demand:
        """A chain of the part alone, or nothing: a look at anything else takes longer than a pass."""
        state.resting = True
        usual = chain.demand(view)
        depth = min(usual.most, view.graft(self.grafts[0]).block - 1, view.limit - view.end - 1)
        chains = state.promises.chains
        if state.chains:
            trial = min(1 + int(self.SURE * chains.common), self.TRIAL)
            vain = not state.brought and state.chains >= trial
            if vain or chains.trust < self.LITTLE:
                longer = min(state.vain + 2 * (trial < self.TRIAL // 2), 3)
                state.chains, state.vain = 0, state.vain + 1
                return self._rest(state, self.PAUSE * self.LONGER**longer)
            if state.chains % self.STEADY:
                return Demand(most=depth, gain=usual.gain)
            state.vain = 0
        return Demand(asking=chains.gains(depth), whole=True)

    def _weighed(self, view: View, state: State) -> Demand:
        joined = self._made(view, min(self.nodes, 2 * state.last + 4))
        if joined is None:
            return Demand()
        gains = state.promises.looked[state.kind].believed(joined.gains[: self.nodes])
        asking: tuple[float, ...] = ()
        if self._trained is not None:
            asking = state.promises.asking(state.kind, gains)[: self.nodes]
        return Demand(gains=gains, asking=asking)

    def propose(self, view: View, room: int) -> Rounds:
        state: State | None = view.state
        if state is not None and self._chain is not None:
            state.swift = view.ask and room > 0 and view.graft(self.grafts[0]).swift
            if state.swift:
                proposal = yield from self._chain.propose(view, room)
                drafted = range(proposal.given, len(proposal.graph))
                proposal.labels = dict.fromkeys(drafted, self._chain.name)
                return proposal
        if state is not None and state.resting:
            return Guess().proposal(view)
        return (yield from super().propose(view, room))

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> State:
        state: State | None = view.state
        if self._chain is not None and view.graft(self.grafts[0]).swift:
            return self._counted(state or self._begin(view), len(verdict.settled) - 1)
        return super().observe(view, proposal, scores, verdict)

    def _counted(self, state: State, held: int) -> State:
        """What came of a chain, or that none was asked for; nothing else is looked at."""
        if state.swift:
            state.brought += held
            state.idle, state.chains = 0, state.chains + 1
            state.promises.chains.settle(1.0, held)
        else:
            state.idle, state.chains = state.idle + 1, 0
            state.promises.chains.fade()
        return state
