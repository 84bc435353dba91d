"""This engine as one of the peers: one peer for each method."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from outstride.bench import clock
from outstride.bench.harness import ProgressCounter
from outstride.bench.step import PassBench, StepCase
from outstride.core.params import SamplingParams

if TYPE_CHECKING:
    from outstride.llm import LLM

SETTLE = 0.02


class OutstridePeer:
    """This engine with one method. Each call starts with an empty prefix cache and empty drafter
    memory.
    """

    def __init__(self, llm: LLM, method: str, threads: int) -> None:
        self.name = f"outstride, {method}"
        self._llm, self._method = llm, method
        self._calls = 0
        self.settings: dict[str, Any] = {
            "method": method,
            "weights": str(getattr(getattr(llm.model, "ops", None), "name", "")),
            "threads": threads,
        }

    def fits(self, count: int) -> bool:
        return count > 0

    def generate(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        self._calls += 1
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        given = [list(prompt) for prompt in prompts]
        salt = f"{self.name} {self._calls}"
        found = self._llm.generate(given, params, method=self._method, salt=salt)
        for result in found:
            if result.error is not None:
                raise result.error
        return [result.token_ids for result in found]

    def once(self, nodes: int, cached: int) -> clock.Case | None:
        case = StepCase("nodes", nodes, cached)

        @contextmanager
        def run() -> Iterator[Callable[[], object]]:
            bench = PassBench(self._llm.engine.idle_runner(), 0, ProgressCounter(None))
            try:
                bench.prepare([case])
                with bench.once(case) as call:
                    call()
                time.sleep(SETTLE)
                with bench.once(case) as call:
                    yield call
            finally:
                bench.close()

        return run

    def close(self) -> None:
        """Does nothing: the caller owns the model."""
