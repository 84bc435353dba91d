"""`DraftPolicy`: the engine's one partner for how much to draft and what passes cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outstride.cache.pool import PagePool
from outstride.core import sequence as sequences
from outstride.core.contracts import Demand, Method, Model
from outstride.policy import draft_budget
from outstride.policy.config import DEFAULT_CONFIG, AutoConfig
from outstride.policy.cost_model import CostModel
from outstride.policy.cost_prior import prior_of
from outstride.policy.curve_store import CurveStore
from outstride.policy.draft_budget import Allocation, Grant
from outstride.policy.learning import ObservedStep, learn_from_step
from outstride.policy.profiling import measure


class DraftPolicy:
    """Holds the cost model of an engine: begins it, decides by it, and corrects it.

    cost_model: what passes cost; None until a method needs to know.
    folder: where learned curves are kept between processes; None: nowhere.
    """

    def __init__(
        self,
        cost_model: CostModel | None = None,
        *,
        config: AutoConfig = DEFAULT_CONFIG,
        folder: Path | None = None,
    ) -> None:
        self.cost_model = cost_model
        self.config = config
        self._store = None if folder is None else CurveStore(folder)
        self._key: dict[str, Any] = {}
        """Of the stored curve; empty if the cost model was set or is not stored."""
        self._long_prefill = False
        self._steps = 0
        self._next_save = config.first_save

    def prepare(self, method: Method, model: Model, pool: PagePool, max_nodes: int) -> None:
        """Begins a cost model, if a method needs one and there is none."""
        if method.drafter.cost_aware:
            self.begin(model, pool, max_nodes)

    def begin(
        self, model: Model, pool: PagePool, max_nodes: int, *, long_prefill: bool = False
    ) -> None:
        """Begins a cost model unless there is one: from the stored curve, or from a prior.

        Where no prior is known, passes are measured, as far as there are free pages for it.
        long_prefill: measures also what prefill chunks cost late in a long prompt, for servers.
        """
        if self.cost_model is not None:
            return
        store, config = self._store, self.config
        self._key = {} if store is None else store.key(model)
        self._long_prefill = long_prefill
        found = None if store is None else store.load(self._key, config, long_prefill=long_prefill)
        if found is None and (prior := prior_of(model.build)) is not None:
            found = prior.cost_model(config)
        if found is None:
            found = measure(model, pool, max_nodes, long_prefill=long_prefill, config=config)
            if found is not None:
                self._save(found)
        self.cost_model = found

    def _save(self, cost: CostModel) -> None:
        if self._store is not None and self._key:
            self._store.save(self._key, cost, long_prefill=self._long_prefill)

    def grants(
        self,
        allocations: list[Allocation],
        demands: Mapping[sequences.Sequence, Demand],
        budget: int,
    ) -> list[Grant]:
        """The draft nodes that are worth their cost in this pass."""
        if self.cost_model is None:
            return []
        return draft_budget.grants(allocations, demands, budget, self.cost_model, self.config)

    def observe_step(
        self, parts: Sequence[ObservedStep], nodes: int, seconds: float, draft_seconds: float
    ) -> None:
        """Learns from a step that was taken: its parts, its nodes, and what it took."""
        cost = self.cost_model
        if cost is None:
            return
        self._steps += 1
        often = self._steps % self.config.plain_step_sampling == 0
        sample_plain = often or cost.needs_plain_passes()
        learn_from_step(cost, parts, nodes, seconds, draft_seconds, sample_plain=sample_plain)
        if self._steps >= self._next_save:
            self._next_save = self._steps + min(self._steps, self.config.save_interval)
            self._save(cost)
