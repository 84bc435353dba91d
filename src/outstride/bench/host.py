"""The host's own work: what passes between the end of one pass and the beginning of the next."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, cast

import numpy as np

from outstride.bench import clock
from outstride.bench.peers.rows import Bound, Row
from outstride.core.contracts import CAUSAL, Filter, Graft, Work
from outstride.core.graph import FloatArray, IntArray
from outstride.core.params import SamplingParams
from outstride.core.proposal import Scores
from outstride.core.sequence import Table
from outstride.models.decoder import Pass

if TYPE_CHECKING:
    from outstride.llm import LLM
    from outstride.models.decoder import Decoder


class Idle:
    """A model whose passes compute what nobody needs.

    It stands where a model stands, with everything real around it. What passes between the end of
    one pass and the beginning of the next is the host's work that no pass hides.
    """

    vision = CAUSAL
    masking = None
    page_size = 16
    fingerprint = "idle"
    layers = 1
    token = 1

    def __init__(self, vocab_size: int, pages: int, context: int) -> None:
        self.vocab_size, self.pages, self.context = vocab_size, pages, context
        self.grafts: dict[str, Graft] = {}
        self.filters: dict[str, Filter] = {}
        self._work = bytes(8_000_000)  # milliseconds, as many as a pass takes
        self._best = np.full((4096, 1), self.token, dtype=np.int64)
        self.passes: list[tuple[int, float, float]] = []
        """How many sequences, beginning and end of each pass."""

    def forward(self, work: Sequence[Work]) -> Pass:
        return Pass(partial(self._forward, list(work)))

    def _forward(self, work: list[Work]) -> list[Scores]:
        begin = clock.now()
        hashlib.sha256(self._work).digest()  # the interpreter is free meanwhile, as in a real pass
        self.passes.append((len(work), begin, clock.now()))
        found = []
        for item in work:
            nodes = item.proposal.wanted
            found.append(Scores(nodes, self._best[: len(nodes)]))
        return found

    def move(self, sources: IntArray, targets: IntArray) -> None:
        """There are no entries."""

    def feature(self, table: Table, position: int) -> FloatArray:
        raise NotImplementedError

    def between(self, sequences: int) -> list[float]:
        """Seconds between passes over so many sequences."""
        return [
            begin - end
            for (before, _, end), (now, begin, _) in itertools.pairwise(self.passes)
            if before == now == sequences
        ]


def host(llm: LLM, *, sequences: Sequence[int] = (1, 64), steps: int = 200) -> list[Row]:
    """The host's work per step that no pass hides, with so many sequences under `plain`."""
    from outstride import llm as surface
    from outstride.models.load import Loaded

    limits: Mapping[int, float] = {1: 0.3, 64: 2.0}
    rows = []
    for count in sequences:
        pages = count * (steps // 16 + 8)
        idle = Idle(llm.model.vocab_size, pages, 4096)
        loaded = Loaded(cast("Decoder", idle), llm.tokenizer, "idle", 4096, Path())
        with surface.LLM(loaded, max_sequences=count) as fresh:
            prompts = [[2, 3, 4, 5 + i % 20] for i in range(count)]
            params = SamplingParams(max_tokens=steps, ignore_eos=True)
            for result in fresh.generate(prompts, params):
                if result.error is not None:
                    raise result.error
        found = idle.between(count)[5:]
        bound = Bound(limits[count], of="value") if count in limits else None
        name = f"host work per step, {count} sequence{'' if count == 1 else 's'}"
        rows.append(Row(name, "ms", median(found) * 1e3, None, bound, raw={"ours": found}))
    return rows
