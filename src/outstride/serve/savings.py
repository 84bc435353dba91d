"""Estimates of the time that a request saved against plain decoding."""

from __future__ import annotations

from outstride.core.sequence import SequenceCounts
from outstride.llm import LLM


class SavingsEstimator:
    """What passes cost on average, and what plain ones would have cost: estimates the time saved."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.engine
        self.steps = 0
        self.plain = 0.0
        self.real = 0.0
        self._proposed = 0
        self._drafting = 0.0

    def add_pass(self) -> None:
        """Adds a pass: its own cost by the measured curve, and that of one node per sequence."""
        cost, gauges = self._engine.cost, self._engine.gauges()
        rows = gauges.running
        if cost is None or rows == 0:
            return
        drafted = gauges.totals.proposed - self._proposed
        spent = gauges.seconds.get("propose", 0.0)
        self._proposed += drafted
        curve = cost.curve(rows + max(drafted, 0))
        self.steps += 1
        self.plain += curve[rows]
        self.real += curve[rows + max(drafted, 0)] + spent - self._drafting
        self._drafting = spent

    def mark(self) -> tuple[int, float, float]:
        """The sums now, for `saved` later."""
        return self.steps, self.plain, self.real

    def saved(self, since: tuple[int, float, float], counts: SequenceCounts) -> float:
        """What an answer saved since a mark: its tokens at the cost of plain passes, minus its own."""
        steps = self.steps - since[0]
        if steps <= 0:
            return 0.0
        plain, real = (self.plain - since[1]) / steps, (self.real - since[2]) / steps
        return counts.emitted * plain - counts.passes * real
