"""`auto`: drafts as much of a joined tree as pays, or the chains of a fast draft head, or nothing."""

from __future__ import annotations

from outstride.core.contracts import Demand, Drafter, Rounds
from outstride.core.draft_tree import DraftTree
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.policy.config import DEFAULT_CONFIG, AutoConfig
from outstride.policy.mix import Mix, MixState
from outstride.registry import method


@method("auto", family="joined")
class Auto(Mix):
    """Drafts as much as pays at this moment: from nothing at all to a tree from several drafters.

    At every step it weighs the expected tokens of each further node, by tracked acceptance rates,
    against the marginal cost of that node, by a cost curve that is learned from the passes themselves.
    Under load it shrinks to plain decoding by itself, and comes back. A draft head, the one that is
    shipped for the model or that `from` names, is used where that pays. With a head, `parts` is
    `suffix` alone, which knows what the head does not: what stands in the text.

    Paper: none of its own; thresholds as in SpecDec++ (Huang et al., 2024), trees fitted to measured
      hardware as in PPD (Chen et al., 2024) and Sequoia (Chen et al., 2024)
    Exactness: exact
    Needs: nothing
    Cost per step: what is expected to pay, up to `nodes` further nodes
    """

    cost_aware = True

    def __init__(
        self,
        config: AutoConfig = DEFAULT_CONFIG,
        *,
        parts: str = "",
        nodes: int = 48,
        from_: str = "",
    ) -> None:
        usual = "suffix" if from_ else "suffix+recycle"
        super().__init__(config, parts=parts or usual, nodes=nodes, from_=from_)

    # --- before the pass ----------------------------------------------------------------------------

    def demand(self, view: View) -> Demand:
        state: MixState | None = view.state
        if state is None:
            return Demand()
        if skip_steps := self._backoff(view, state):
            return Demand(skip_steps=skip_steps)
        chain = self._chain_drafter(view)
        if chain is not None:
            return self._chain_demand(view, state, chain)
        return self._tree_demand(view, state)

    def _chain_drafter(self, view: View) -> Drafter | None:
        """Drafts the chains that the model's draft head finds on the device, if it does."""
        return None if self._head is None else self._head.chain_drafter(view)

    def _backoff(self, view: View, state: MixState) -> int:
        """For how many steps not to look for drafts, this one included; 0: it looks now."""
        config = self.config
        batch = max(view.num_running // config.backoff_batch_size, 1) ** 2
        if batch * state.idle_steps <= config.backoff_after:
            return 0
        long_idle = state.idle_steps > config.long_idle_factor * config.backoff_after
        interval = batch * config.backoff_interval * (2 if long_idle else 1)
        # All sequences look at the same engine step, so that the fixed cost of a look is paid once.
        since = view.engine_step % interval
        return interval - since if since else 0

    def _chain_demand(self, view: View, state: MixState, chain: Drafter) -> Demand:
        """A chain of the head alone, or nothing: any other lookup takes longer than a pass."""
        usual, config = chain.demand(view), self.config
        depth = min(
            usual.max_nodes,
            view.draft_head(self.draft_heads[0]).block - 1,
            view.limit - view.end - 1,
        )
        chains = state.calibration.chains
        if state.chain_run:
            # The first chain after a plain step costs more, because the device cannot start it
            # early: a trial is worth a few more chains.
            trial = 1 + int(config.trial_chains_per_token * chains.shared_factor)
            trial = min(trial, config.max_trial_chains)
            failed = not state.chain_tokens and state.chain_run >= trial
            if failed or chains.factor < config.min_chain_tokens:
                return Demand(skip_steps=self._pause(state, trial))
            if state.chain_run % config.chain_review_interval:
                return Demand(max_nodes=depth, gain=usual.gain)
        return Demand(gains_with_head=chains.gains(depth), fixed_length=True)

    def _pause(self, state: MixState, trial: int) -> int:
        """Steps of a pause: longer each time, and at once where chains bring nothing to anybody."""
        config = self.config
        growth = state.failed_chain_runs + 2 * (trial < config.max_trial_chains // 2)
        growth = min(growth, config.max_chain_pause_exponent)
        return int(config.chain_pause_steps * config.chain_pause_growth**growth)

    def _tree_demand(self, view: View, state: MixState) -> Demand:
        config = self.config
        max_nodes = config.lookup_growth * state.last_draft + config.lookup_margin
        lookup = self._look_up(view, min(self.nodes, max_nodes))
        if lookup is None:
            return Demand()
        calibration, level = state.calibration, lookup.level
        gains = calibration.lookups[level].calibrated(lookup.joined.gains[: self.nodes])
        with_head: tuple[float, ...] = ()
        if self._head is not None:
            with_head = calibration.gains_with_head(level, gains)[: self.nodes]
        return Demand(gains=gains, gains_with_head=with_head, prepared=lookup)

    def on_backoff(self, view: View, steps: int) -> None:
        """Counts the steps in which it is neither asked nor told, all at once."""
        state: MixState = view.state
        state.idle_steps += steps
        state.calibration.head.fade(steps)
        state.calibration.chains.fade(steps)
        if state.chain_run:  # the back-off gives up a run of chains
            state.chain_run, state.failed_chain_runs = 0, state.failed_chain_runs + 1

    def propose(self, view: View, budget: int) -> Rounds:
        state: MixState | None = view.state
        chain = self._chain_drafter(view) if state is not None else None
        if state is not None and chain is not None and view.use_draft_head and budget > 0:
            state.chain_drafted = True
            proposal = yield from chain.propose(view, budget)
            drafted = range(proposal.given, len(proposal.graph))
            proposal.labels = dict.fromkeys(drafted, chain.name)
            return proposal
        backing_off = view.demand is not None and view.demand.skip_steps > 0
        if chain is not None or backing_off:
            return DraftTree().proposal(view)
        return (yield from super().propose(view, budget))

    # --- after the pass -----------------------------------------------------------------------------

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> MixState:
        if self._chain_drafter(view) is None:
            return super().observe(view, proposal, scores, verdict)
        state: MixState = view.state or self._begin(view)
        return self._observe_chain(state, len(verdict.settled) - 1)

    def _observe_chain(self, state: MixState, accepted: int) -> MixState:
        """Learns what came of a chain, or that there was none."""
        if state.chain_run and state.chain_run % self.config.chain_review_interval == 0:
            state.failed_chain_runs = 0  # this run was reviewed and goes on
        if state.chain_drafted:
            state.chain_tokens += accepted
            state.idle_steps, state.chain_run = 0, state.chain_run + 1
            state.calibration.chains.observe(1.0, accepted)
        else:
            state.idle_steps, state.chain_run = state.idle_steps + 1, 0
            state.calibration.chains.fade()
        state.chain_drafted = False
        return state
