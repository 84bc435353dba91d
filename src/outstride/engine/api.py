"""`EngineAPI`: what the rest of the package may ask an engine for, apart from steps and requests.

`llm`, `serve`, `bench` and `train` use these methods; none of them touches the runner, the scheduler,
the sequence manager or the ledger.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from outstride.cache.pool import PagePool
from outstride.core.contracts import AttentionPattern, Drafter, Method, Model
from outstride.core.proposal import TARGET
from outstride.core.sequence import Sequence, SequenceCounts
from outstride.engine.commit import Commit
from outstride.engine.ledger import Ledger, SequenceProgress
from outstride.engine.model_runner import ModelRunner
from outstride.engine.scheduler import Scheduler
from outstride.engine.sequences import SequenceManager
from outstride.errors import OutstrideError
from outstride.policy.cost_model import CostModel
from outstride.policy.policy import DraftPolicy
from outstride.policy.profiling import measure


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """The state and the counters of an engine at one moment, as a copy."""

    steps: int
    totals: SequenceCounts
    seconds: Mapping[str, float]
    """Time by verb: plan, propose, forward, accept, commit."""
    model_passes: Mapping[str, int]
    """Passes by model, the target not included."""
    running: int
    waiting: int
    pages: int
    """Pages of the target's KV cache."""
    free_pages: int
    """Pages that are free or hold cached prefixes only."""


class EngineAPI:
    """Base class of `Engine`: models, measurements and gauges."""

    runner: ModelRunner
    scheduler: Scheduler
    sequences: SequenceManager
    ledger: Ledger
    commit: Commit
    policy: DraftPolicy
    _claimed = False

    def claim(self) -> None:
        """Marks the engine as owned by a thread; raises OutstrideError if it is owned already."""
        if self._claimed:
            raise OutstrideError("this engine has a thread already; use that one")
        self._claimed = True

    # --- models -----------------------------------------------------------------------------------

    @property
    def models(self) -> Mapping[str, Model]:
        """The registered models by name, as a snapshot."""
        return self.runner.models

    def model(self, name: str = TARGET) -> Model:
        """A registered model; KeyError if there is none of that name."""
        return self.runner.models[name]

    def pool(self, name: str = TARGET) -> PagePool:
        """The KV pages of a model; `capacity` is the number of tokens that fit into them.

        Only the engine's thread may change them while the engine is busy.
        """
        return self.runner.pools[name]

    def add_model(self, name: str, model: Model) -> None:
        """Registers a model that drafters may run. Safe on any thread, also while requests run."""
        self.runner.add(name, model)

    def update_model(self, name: str, update: Callable[[Model], None]) -> None:
        """Changes a model, such as by attaching a draft head or an adapter to it.

        No pass may run meanwhile: while an `EngineThread` owns the engine, use its `call`.
        """
        update(self.runner.models[name])
        self.runner.refresh_masked_spec(name)

    def attention_pattern(self, name: str, drafter: Drafter) -> AttentionPattern:
        """The attention pattern with which a model computes settled tokens for a drafter."""
        return self.runner.pattern(name, drafter)

    def idle_runner(self, timeout: float = 10.0) -> ModelRunner:
        """The models and pages themselves, for benchmarks that time single passes.

        Waits until the last step of earlier requests is counted; raises OutstrideError if the engine
        is still busy after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while self.busy:
            if time.monotonic() > deadline:
                raise OutstrideError("the engine is busy; let its requests finish first")
            time.sleep(0.001)
        return self.runner

    # --- cost of passes ---------------------------------------------------------------------------

    @property
    def cost(self) -> CostModel | None:
        """The cost of passes by number of nodes; None until a method needs it."""
        return self.policy.cost_model

    @cost.setter
    def cost(self, cost: CostModel | None) -> None:
        self.policy.cost_model = cost

    def profile(self) -> CostModel | None:
        """Measures the target's passes, which takes seconds; None if there are no free pages for it.

        The engine must be idle. Its own cost model stays as it is.
        """
        return measure(self.model(), self.pool(), self.scheduler.limits.nodes)

    def warm_up(self, method: Method | None = None) -> None:
        """Begins to learn the cost of passes, if the method needs it and it is not known yet.

        Without a method it does so in any case, and with the cost of long prompts: for servers.
        """
        if method is not None:
            self.sequences.prepare(method)
            return
        nodes = self.scheduler.limits.nodes
        self.policy.begin(self.model(), self.pool(), nodes, long_prefill=True)

    # --- state ------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a step would do or report anything."""
        scheduler = self.scheduler
        return bool(
            scheduler.running or scheduler.waiting or self.sequences.ended or self.commit.due
        )

    @property
    def steps(self) -> int:
        """How many steps the engine has taken."""
        return self.ledger.steps

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The sequences that take part in passes."""
        return tuple(self.scheduler.running)

    @property
    def unfinished(self) -> Iterator[Sequence]:
        """All sequences that have not finished: running, then waiting."""
        return iter(self.scheduler)

    def gauges(self) -> EngineGauges:
        """A copy of the counters and of the number of sequences and pages."""
        ledger, pool, total = self.ledger, self.pool(), self.ledger.total
        return EngineGauges(
            steps=ledger.steps,
            totals=replace(total, sources=dict(total.sources)),
            seconds=dict(ledger.seconds),
            model_passes=dict(ledger.model_passes),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            pages=pool.pages,
            free_pages=pool.available,
        )

    def preempt(self, sequence: Sequence) -> None:
        """Takes the pages of a running sequence away; it is recomputed later, with the same text."""
        self.scheduler.preempt(sequence)

    def take_outputs(self) -> list[SequenceProgress]:
        """Counts and returns what the last pass did, which otherwise happens during the next one."""
        return self.commit.outputs()

    def discard_outputs(self) -> None:
        """Drops what the last pass did. For an engine whose step failed."""
        self.commit.discard()
