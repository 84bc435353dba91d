"""`DraftPolicy`: the engine's one partner for how much to draft and what passes cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from outstride.cache.pool import PagePool
from outstride.core import sequence as sequences
from outstride.core.contracts import Demand, Method, Model
from outstride.policy import draft_budget
from outstride.policy.config import DEFAULT_CONFIG, AutoConfig
from outstride.policy.cost_model import CostModel
from outstride.policy.curve_store import CurveStore
from outstride.policy.draft_budget import Allocation, Grant
from outstride.policy.learning import ObservedStep, learn_from_step
from outstride.policy.profiling import Progress, measure


class DraftPolicy:
    """Holds the cost model of an engine: measures it, decides by it, and corrects it.

    cost_model: what passes cost; None until a method needs to know.
    folder: where measured curves are kept between processes; None: nowhere.
    on_progress: called while passes are measured, which takes seconds.
    """

    def __init__(
        self,
        cost_model: CostModel | None = None,
        *,
        config: AutoConfig = DEFAULT_CONFIG,
        folder: Path | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        self.cost_model = cost_model
        self.config = config
        self.on_progress = on_progress
        self._store = None if folder is None else CurveStore(folder)
        self._steps = 0

    def prepare(self, method: Method, model: Model, pool: PagePool, max_nodes: int) -> None:
        """Finds out what passes cost, if a method needs to know and nothing is known yet."""
        if method.drafter.cost_aware and self.cost_model is None:
            self.profile(model, pool, max_nodes)

    def profile(
        self, model: Model, pool: PagePool, max_nodes: int, *, long_prefill: bool = False
    ) -> None:
        """Takes the stored cost curve for this model and machine, or measures one and stores it.

        long_prefill: also what prefill chunks cost late in a long prompt, for servers.
        """
        store, config = self._store, self.config
        key = store.key(model.fingerprint, max_nodes, config) if store else {}
        found = store.load(key, config, long_prefill=long_prefill) if store else None
        if found is None:
            found = measure(
                model,
                pool,
                max_nodes,
                long_prefill=long_prefill,
                config=config,
                on_progress=self.on_progress,
            )
            if store is not None and found is not None:
                store.save(key, found, long_prefill=long_prefill)
        self.cost_model = found

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
        self._steps += 1
        if self.cost_model is not None:
            sample_plain = self._steps % self.config.plain_step_sampling == 0
            learn_from_step(
                self.cost_model, parts, nodes, seconds, draft_seconds, sample_plain=sample_plain
            )
