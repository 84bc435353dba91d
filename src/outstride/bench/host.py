"""Host time per step: the time between the end of one pass and the start of the next."""

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
from outstride.bench.comparison_rows import Bound, Row
from outstride.core.contracts import CAUSAL, PassInput, TrainedFilter
from outstride.core.draft_heads import DraftHead
from outstride.core.graph import FloatArray, IntArray
from outstride.core.params import SamplingParams
from outstride.core.proposal import Scores
from outstride.core.sequence import BlockTable
from outstride.models.decoder import DecoderPass

if TYPE_CHECKING:
    from outstride.llm import LLM
    from outstride.models.decoder import Decoder


class IdleModel:
    """A model whose passes compute nothing useful.

    It replaces the model, and everything around it is real. The time between the end of one pass and
    the start of the next is the host work that no pass hides.
    """

    attention_pattern = CAUSAL
    masked_spec = None
    page_size = 16
    fingerprint = "idle"
    layers = 1
    token = 1

    def __init__(self, vocab_size: int, pages: int, context: int) -> None:
        self.vocab_size, self.pages, self.context = vocab_size, pages, context
        self.draft_heads: dict[str, DraftHead] = {}
        self.filters: dict[str, TrainedFilter] = {}
        self.adapters: dict[str, str] = {}
        self._work = bytes(8_000_000)  # milliseconds, as many as a pass takes
        self._best = np.full((4096, 1), self.token, dtype=np.int64)
        self.passes: list[tuple[int, float, float]] = []
        """Number of sequences, start and end of each pass."""

    def forward(self, work: Sequence[PassInput]) -> DecoderPass:
        return DecoderPass(partial(self._forward, list(work)))

    def _forward(self, work: list[PassInput]) -> list[Scores]:
        begin = clock.now()
        hashlib.sha256(self._work).digest()  # the interpreter is free meanwhile, as in a real pass
        self.passes.append((len(work), begin, clock.now()))
        found = []
        for item in work:
            nodes = item.proposal.wanted
            found.append(Scores(nodes, self._best[: len(nodes)]))
        return found

    def move(self, sources: IntArray, targets: IntArray) -> None:
        """There is no KV to move."""

    def feature(self, table: BlockTable, position: int) -> FloatArray:
        raise NotImplementedError

    def between(self, sequences: int) -> list[float]:
        """Seconds between passes over this many sequences."""
        return [
            begin - end
            for (before, _, end), (now, begin, _) in itertools.pairwise(self.passes)
            if before == now == sequences
        ]


def host(llm: LLM, *, sequences: Sequence[int] = (1, 64), steps: int = 200) -> list[Row]:
    """Host work per step that no pass hides, by number of sequences, under `plain`."""
    from outstride import llm as surface
    from outstride.models.load import Loaded

    limits: Mapping[int, float] = {1: 0.3, 64: 2.0}
    rows = []
    for count in sequences:
        pages = count * (steps // 16 + 8)
        idle = IdleModel(llm.model.vocab_size, pages, 4096)
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
