"""`mix`: several drafters in one draft tree, ranked by how often each was right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outstride import registry
from outstride.core.contracts import Demand, Drafter, DraftRounds, Rounds
from outstride.core.draft_heads import DraftHead
from outstride.core.draft_tree import AcceptanceEstimator, DraftTree, PerPrefixKey
from outstride.core.proposal import DEFAULT_WANTS, Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.errors import MethodFailed
from outstride.policy.calibration import SourceCalibration, level_of, num_worthwhile
from outstride.policy.config import DEFAULT_CONFIG, AutoConfig
from outstride.policy.joined_tree import JoinedTree
from outstride.registry import method

Shared = tuple[AcceptanceEstimator, SourceCalibration]
"""What the sequences of a tenant learn together."""


@dataclass(slots=True)
class Lookup:
    """What the drafters that need no pass found at one position."""

    end: int
    """The position that follows the text: where the draft begins."""
    trees: list[DraftTree]
    joined: JoinedTree
    level: int
    """The group of steps that this one belongs to: see `calibration.level_of`."""


@dataclass(slots=True)
class MixState:
    """One sequence: its drafters' states, acceptance estimates, calibration, and the draft at hand."""

    parts: list[Any]
    estimator: AcceptanceEstimator
    calibration: SourceCalibration
    last_draft: int
    """How many nodes the last draft had."""
    lookup: Lookup | None = None
    """What was looked up for the draft at hand."""
    joined: JoinedTree | None = None
    """The tree at hand if a draft head contributed to it."""
    idle_steps: int = 0
    """Steps without a draft since the last draft that brought something."""
    chain_drafted: bool = False
    """Whether this step drafts the chain of a head that finds chains on the device."""
    chain_run: int = 0
    """How many such steps came one after the other."""
    chain_tokens: int = 0
    """How many tokens all of them brought."""
    failed_chain_runs: int = 0
    """How many runs of them were given up, one after the other."""


def joinable(drafter: type[Drafter]) -> bool:
    """Whether a drafter proposes a plain tree of tokens and nothing else."""
    return (
        not drafter.models
        and drafter.propose is Drafter.propose
        and drafter.draft_ahead is Drafter.draft_ahead
        and drafter.draft_tree is not Drafter.draft_tree
    )


def head_methods() -> dict[str, registry.MethodEntry]:
    """The joinable methods that draft with a head, by the kind of the head."""
    found = (entry for entry in registry.entries() if entry.drafter.head_kind)
    return {entry.drafter.head_kind: entry for entry in found if joinable(entry.drafter)}


@dataclass(slots=True)
class HeadDrafters:
    """The drafters that a draft head of each kind needs: which one is known once the head is."""

    name: str
    """Of the draft head."""
    trees: dict[str, Drafter] = field(default_factory=dict)
    """Draft trees, by kind of head."""
    chains: dict[str, Drafter] = field(default_factory=dict)
    """Draft single chains, by kind of head."""

    @classmethod
    def of(cls, name: str, part: str, nodes: int) -> HeadDrafters:
        """For a head of any kind, or of the kind that the method `part` uses."""
        found = cls(name)
        for kind, entry in head_methods().items():
            spec = part if part and registry.parse(part)[0] is entry else entry.name
            if part and spec != part:
                continue
            named, known = registry.parse(spec)[1], {option.name for option in entry.options}
            given = {"from": name} | ({"nodes": 2 * nodes} if "nodes" in known - set(named) else {})
            found.trees[kind] = registry.build(spec, **given).drafter
            chain = {"from": name} | ({"width": 1} if "width" in known else {})
            found.chains[kind] = registry.build(spec, **chain).drafter
        return found

    def head(self, view: View) -> DraftHead:
        """The draft head that the model has under this name."""
        return view.draft_head(self.name)

    def _for(self, drafters: Mapping[str, Drafter], view: View) -> Drafter:
        kind = self.head(view).kind
        if kind not in drafters:
            raise MethodFailed(
                f"the draft head {self.name} is of the kind {kind!r}; this method can use "
                f"{' or '.join(map(repr, drafters))}: name another folder with from=FOLDER"
            )
        return drafters[kind]

    def tree_drafter(self, view: View) -> Drafter:
        """Drafts trees with the head that the model has under this name."""
        return self._for(self.trees, view)

    def chain_drafter(self, view: View) -> Drafter | None:
        """Drafts chains, if that head finds them on the device; else None."""
        if not self.head(view).device_chain:
            return None
        return self._for(self.chains, view)


@method("mix", family="joined")
class Mix(Drafter):
    """Joins several drafters in one draft tree: equal nodes merged, best expected gain first.

    Acceptance rates are tracked for each kind of node, for the sequence and for all sequences of its
    tenant, whether a node was drafted or not. A draft head joins in if the model has one: `from` names
    its folder, or `none`; the kind of the head decides which method drafts with it, unless `parts`
    names one, as in `parts=suffix+eagle`.

    Paper: none of its own; trees from several sources as in Sequoia (Chen et al., 2024) and
      PPD (Chen et al., 2024), here with acceptance rates that are tracked instead of trained
    Exactness: exact
    Needs: nothing
    Cost per step: `nodes` further nodes at the most, and what the drafters cost
    """

    prunable = True  # `propose` adds nothing but labels
    head_kind = "block-drafter"

    def __init__(
        self,
        config: AutoConfig = DEFAULT_CONFIG,
        *,
        parts: str = "suffix+recycle",
        nodes: int = 32,
        from_: str = "",
    ) -> None:
        if nodes < 1:
            raise ValueError("needs nodes >= 1")
        self.config = config
        self.nodes = nodes
        names, head_entries = [name.strip() for name in parts.split("+")], head_methods().values()
        head_parts = [name for name in names if registry.parse(name)[0] in head_entries]
        if len(head_parts) > 1 or (head_parts and not from_):
            raise ValueError("needs one draft head for its parts: name its folder with from=FOLDER")
        self._drafters = [self._part(name) for name in names if name not in head_parts]
        if not self._drafters:
            raise ValueError("needs a part that looks drafts up, such as suffix")
        self._head = HeadDrafters.of(from_, "".join(head_parts), nodes) if from_ else None
        self.draft_heads = (from_,) if from_ else ()
        wants = Wants(best=max(drafter.wants.best for drafter in self._drafters))
        self.wants = DEFAULT_WANTS if wants == DEFAULT_WANTS else wants
        self._greedy = PerPrefixKey(lambda: self._shared(1.0))
        self._sampled = PerPrefixKey(lambda: self._shared(config.sampled_head_prior))

    @classmethod
    def head_kinds(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The kind of the head that `parts` names; else any kind, the shipped one first."""
        kinds = head_methods()
        for name in filter(None, map(str.strip, str(options.get("parts", "")).split("+"))):
            if (part := registry.parse(name)[0]) in kinds.values():
                return (part.drafter.head_kind,)
        return (cls.head_kind, *(kind for kind in kinds if kind != cls.head_kind))

    @staticmethod
    def _part(name: str) -> Drafter:
        drafter = registry.build(name).drafter
        if drafter.models or drafter.draft_heads or type(drafter).propose is not Drafter.propose:
            raise ValueError(f"{name!r} cannot be joined: it does more than look up a draft")
        return drafter

    def _shared(self, head_prior: float) -> Shared:
        estimator = AcceptanceEstimator(weight=self.config.shared_estimate_weight)
        return estimator, SourceCalibration(prior=head_prior, config=self.config)

    # --- before the pass ----------------------------------------------------------------------------

    def _look_up(self, view: View, max_nodes: int) -> Lookup | None:
        """What the drafters find, unless this step cannot draft. Changes nothing.

        An answer to `demand` at the same position is used again.
        """
        state: MixState | None = view.state
        if state is None or view.num_uncomputed() != 1 or view.limit - view.end <= 1:
            return None
        end, asked = view.end, view.demand
        if asked is not None and isinstance(asked.prepared, Lookup) and asked.prepared.end == end:
            return asked.prepared
        trees = []
        for drafter, its in zip(self._drafters, state.parts, strict=True):
            if found := _without_passes(drafter.draft_tree(_part_view(view, its), max_nodes)):
                trees.append(found)
        joined = JoinedTree.of(trees, state.estimator, self.config)
        return Lookup(end, trees, joined, level_of(joined.gains, self.config))

    def demand(self, view: View) -> Demand:
        lookup = self._look_up(view, self.nodes)
        if lookup is None:
            return Demand()
        if self._head is not None:
            state: MixState = view.state
            gain = sum(state.calibration.head.gains[: self.nodes])
            return Demand(max_nodes=self.nodes, gain=gain, prepared=lookup)
        gains = lookup.joined.gains[: self.nodes]
        return Demand(max_nodes=len(gains), gain=sum(gains), prepared=lookup)

    def draft_tree(self, view: View, budget: int) -> DraftRounds:
        lookup = self._look_up(view, self.nodes)
        if lookup is None:
            return DraftTree()
        state: MixState = view.state
        state.lookup, joined = lookup, lookup.joined
        if self._head is not None and view.use_draft_head:
            costs, config = view.marginal_costs, self.config
            max_nodes = max(len(costs), config.head_prior_nodes) if costs else 2 * self.nodes
            found = yield from self._head.tree_drafter(view).draft_tree(view, max_nodes)
            joined = JoinedTree.of([*lookup.trees, found], state.estimator, config)
            state.joined = joined
            state.calibration.learn(lookup.level, joined.gains)
            if costs:
                gains = state.calibration.head.calibrated(joined.gains)
                budget = min(budget, num_worthwhile(gains, costs))
        return joined.best(budget)

    def propose(self, view: View, budget: int) -> Rounds:
        tree = (yield from self.draft_tree(view, budget)) if budget > 0 else DraftTree()
        proposal = tree.proposal(view, self.wants)
        joined = self._joined(view)
        if joined is not None:
            proposal.labels = {
                proposal.given + i: joined.tree.keys[node].source
                for i, node in enumerate(joined.order[: len(proposal.graph) - proposal.given])
            }
        return proposal

    @staticmethod
    def _joined(view: View) -> JoinedTree | None:
        """The tree at hand: the one that a head contributed to, else the one that was looked up."""
        state: MixState | None = view.state
        if state is None:
            return None
        if state.joined is not None:
            return state.joined
        return None if state.lookup is None else state.lookup.joined

    # --- after the pass -----------------------------------------------------------------------------

    def _begin(self, view: View) -> MixState:
        """A new sequence starts from what its tenant's sequences have learned."""
        known = self._greedy if view.params.temperature == 0.0 else self._sampled
        estimator, calibration = known.of(view.key)
        return MixState(
            [None] * len(self._drafters),
            AcceptanceEstimator(estimator, self.config.sequence_estimate_weight),
            SourceCalibration(calibration, config=self.config),
            self.config.initial_draft_nodes,
        )

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> MixState:
        state: MixState = view.state or self._begin(view)
        drafted = len(proposal.graph) - proposal.given
        with_head = view.use_draft_head and self._head is not None
        asked = view.demand
        if state.lookup is None and asked is not None and isinstance(asked.prepared, Lookup):
            state.lookup = (
                asked.prepared
            )  # looked up and not drafted: it was right or wrong as well
        if (lookup := state.lookup) is not None:
            joined = state.joined or lookup.joined
            if drafted:
                expected, accepted = sum(joined.gains[:drafted]), len(verdict.settled) - 1
                state.calibration.observe(lookup.level, expected, accepted, with_head)
            joined.learn(view.tokens[lookup.end :], state.estimator)
            state.lookup = state.joined = None
        if not with_head:
            state.calibration.head.fade()
        if not drafted:
            state.idle_steps += 1
        elif len(verdict.settled) > 1:
            state.idle_steps = 0
        state.last_draft = drafted or state.last_draft
        state.parts = [
            drafter.observe(_part_view(view, its), proposal, scores, verdict)
            for drafter, its in zip(self._drafters, state.parts, strict=True)
        ]
        return state


def _without_passes(rounds: DraftRounds) -> DraftTree:
    """The result of a drafter that needs no passes."""
    try:
        next(rounds)
    except StopIteration as stop:
        found: DraftTree = stop.value
        return found
    raise RuntimeError("a joined drafter asked for a pass")


def _part_view(view: View, state: Any) -> View:
    """The view of one of the joined drafters, with its own state."""
    return view.with_state(state)
