"""The draft budget: how many draft nodes of a pass are worth what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

from outstride.core.contracts import Demand
from outstride.core.sequence import Sequence
from outstride.policy.config import AutoConfig
from outstride.policy.cost_model import CostModel, DraftSource


@dataclass(slots=True)
class Allocation:
    """One sequence's part in a pass: how many given nodes, and how many draft nodes at most."""

    sequence: Sequence
    given: int
    draft: int
    uncomputed: int
    """How many settled tokens the target has not computed."""
    gain: float = 0.0
    """Accepted tokens expected of nodes that were granted for what they are worth."""
    use_draft_head: bool = True
    """Whether a draft head is worth its pass."""
    marginal_costs: tuple[float, ...] = ()
    """How many tokens each further node must be expected to bring, where a draft head is used."""
    cached: int = 0
    """How many tokens of the sequence the target has in its KV cache."""

    @property
    def emits(self) -> bool:
        """Whether the pass reaches the end of what is settled, and so brings a token."""
        return self.given == self.uncomputed

    @property
    def is_prefill(self) -> bool:
        """Whether it is a chunk of a prompt, the last chunk included."""
        return not self.emits or (self.given > 1 and self.sequence.block is None)


def parts_of(
    allocations: Iterable[Allocation],
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The prefill chunks and the decoding parts of a pass: nodes, and cached tokens before them."""
    chunks, decoding = [], []
    for share in allocations:
        if share.is_prefill:
            chunks.append((share.given - share.emits, share.cached))
        else:
            decoding.append((share.given + share.draft, share.cached))
    return chunks, decoding


@dataclass(frozen=True, slots=True)
class Grant:
    """Draft nodes for one sequence: how many, and the gains that were expected of the best ones."""

    allocation: Allocation
    nodes: int
    gains: list[float]


@dataclass(frozen=True, slots=True)
class _Choice:
    """The draft nodes of a pass that are worth their cost, by sequence."""

    rate: float
    """Expected tokens per second."""
    gains: dict[int, list[float]]
    """By sequence: what is expected of each of its nodes."""
    nodes: int
    """Nodes of the pass, those among them."""

    def marginal_costs(self, cost: CostModel, own: int, count: int) -> tuple[float, ...]:
        """Costs of the next `count` nodes in tokens, if they replace `own` of the nodes."""
        first = self.nodes - own
        curve = cost.curve(first + count)[first : first + count + 1]
        return tuple([self.rate * (after - before) for before, after in pairwise(curve)])


def grants(
    allocations: list[Allocation],
    demands: Mapping[Sequence, Demand],
    budget: int,
    cost: CostModel,
    config: AutoConfig,
) -> list[Grant]:
    """Grants nodes, best first, as long as the expected tokens per second rise.

    Draft heads are used by all sequences that have one, if that raises the rate further; each
    allocation records whether they are. The caller reserves the pages.
    """
    if budget <= 0:
        return []
    if not any(demand.gains or demand.gains_with_head for demand in demands.values()):
        return []
    emitting = [share for share in allocations if share.emits]
    with_head = [share for share in emitting if demands[share.sequence].gains_with_head]
    best = _choose(allocations, emitting, demands, budget, cost, config, num_asking=0)
    if with_head:
        asking = len(with_head)
        other = _choose(allocations, emitting, demands, budget, cost, config, num_asking=asking)
        for share in with_head:
            share.use_draft_head = other.rate > best.rate
        if other.rate > best.rate:
            best = other
    found = []
    for share in emitting:
        gains, demand = best.gains.get(share.sequence.id, []), demands[share.sequence]
        count = len(gains)
        if share.use_draft_head and demand.gains_with_head and count:
            # The tree is cut to what is worth its cost once the head has drafted it.
            count = min(config.head_budget_factor * count, len(demand.gains_with_head))
            share.marginal_costs = best.marginal_costs(cost, len(gains), count)
            if demand.fixed_length:
                count = len(demand.gains_with_head)
        if count:
            found.append(Grant(share, count, gains))
    return found


def _choose(
    allocations: list[Allocation],
    emitting: list[Allocation],
    demands: Mapping[Sequence, Demand],
    budget: int,
    cost: CostModel,
    config: AutoConfig,
    *,
    num_asking: int,
) -> _Choice:
    """The nodes that are worth granting if `num_asking` sequences use their draft heads."""
    offers: list[tuple[float, int, Allocation]] = []
    for share in emitting:
        demand = demands[share.sequence]
        gains = (num_asking and demand.gains_with_head) or demand.gains
        offers += [(gain, -place, share) for place, gain in enumerate(gains[:budget])]
    if len(emitting) > 1:  # those of one sequence are in order
        offers.sort(key=itemgetter(0, 1), reverse=True)
        del offers[budget:]
    nodes = sum([share.given + share.draft for share in allocations])
    prefill = sum([max(share.given - 1, 0) for share in emitting])
    if len(emitting) < len(allocations):
        prefill += sum([share.given for share in allocations if not share.emits])
    curve = cost.curve(nodes + len(offers))
    # Prefill happens in any case: its cost does not make drafts any cheaper.
    base = curve[max(nodes - prefill, 1)] - curve[nodes]
    undrafted = base + curve[nodes]
    fixed = num_asking > 0 and any(demands[share.sequence].fixed_length for share in emitting)
    source = DraftSource.of(num_asking, overlapped=fixed and len(allocations) == 1)
    base += cost.draft_seconds(num_asking or len(emitting) or 1, source)
    tokens, worth = float(len(emitting)), 0
    best = config.min_speedup * tokens / undrafted
    for count, (gain, _, _) in enumerate(offers, start=1):
        tokens += gain
        if fixed and count < len(offers):
            continue  # it is drafted in full or not at all
        rate = tokens / (base + curve[nodes + count])
        if rate > best:
            best, worth = rate, count
    chosen: dict[int, list[float]] = {}
    for gain, _, share in offers[:worth]:
        chosen.setdefault(share.sequence.id, []).append(gain)
    return _Choice(best, chosen, nodes + worth)
