"""`BridgeOps`: a model of transformers as a backend. A pass is a run of the whole model.

Rows are cut into batches of one fixed shape [1, ROWS]; the last one is padded. So every operation of
the model has the same shape in every pass, and a row gets the same bits at any place of any batch.
Batches run one after the other: parents come first in a token graph, so the KV that a row sees is in
its slot by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from outstride.core.contracts import PassInput
from outstride.core.graph import FloatArray, IntArray
from outstride.core.proposal import Scores
from outstride.core.scoring import select
from outstride.errors import UnsupportedModel
from outstride.models.bridge.attention import handled_by
from outstride.models.bridge.invariant import ROWS, RowInvariant
from outstride.models.bridge.paged import GraphAttention, PagedKV, kv_bytes_per_token
from outstride.models.bridge.probe import AttentionShape
from outstride.ops.contract import (
    Batch,
    DraftHeadOps,
    HeadInput,
    HeadPlacement,
    HiddenStates,
    Ops,
    PackedHead,
    Span,
)
from outstride.ops.weights import DraftHeadWeights

_WHOLE = (
    "a model that runs through transformers runs as a whole: methods cannot read or enter layers"
)


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Consecutive nodes of one pass input in a batch: `span.first` to the end of its graph."""

    item: int
    span: Span
    wanted: IntArray
    """Nodes of the part that reach the LM head."""


class BridgeDraftHeads(DraftHeadOps):
    """Refuses draft heads and adapters: they need the layers one by one."""

    def unsupported_draft_head(self, weights: DraftHeadWeights) -> str | None:
        return _WHOLE

    def unsupported_adapter(self) -> str | None:
        return _WHOLE

    def attach(self, name: str, packed: PackedHead) -> HeadPlacement:
        raise UnsupportedModel(_WHOLE)

    def final_norm(self) -> torch.Tensor:
        raise UnsupportedModel(_WHOLE)

    def write_kv(self, batch: Batch) -> None:
        """There is none."""


class BridgeOps(Ops):
    """A model of transformers in float32, with paged KV."""

    device = "cpu"
    weights = "fp32"
    whole_passes = True

    def __init__(
        self, model: Any, layers: Sequence[AttentionShape], *, slots: int, page_size: int
    ) -> None:
        import inspect

        import transformers

        self._model = model
        self.cache = PagedKV(layers, slots, page_size)
        self.windows = [layer.window for layer in layers]
        self.vocab_size = 0
        self._skips_head = "logits_to_keep" in inspect.signature(model.forward).parameters
        threads = torch.get_num_threads()
        self.name = f"transformers {transformers.__version__} fp32 threads {threads}"
        self.draft_heads = BridgeDraftHeads(self.name)

    def scores_ahead(self, work: Sequence[PassInput]) -> Callable[[], list[Scores]]:
        """Runs the model on all batches of the pass."""
        for item in work:
            _check(item)
        return lambda: self._scores(work)

    @torch.inference_mode()
    def _scores(self, work: Sequence[PassInput]) -> list[Scores]:
        found: list[list[Scores]] = [[] for _ in work]
        for parts in batches(work):
            logits = self.logits(parts)
            for part in parts:
                if len(part.wanted):
                    rows = part.span.row + part.wanted - part.span.first
                    proposal = work[part.item].proposal
                    found[part.item].append(select(proposal, part.wanted, logits[rows]))
        nothing = np.zeros((0, self.vocab_size), dtype=np.float32)
        none = np.zeros(0, dtype=np.int64)
        return [
            Scores.joined(scores or [select(item.proposal, none, nothing)])
            for item, scores in zip(work, found, strict=True)
        ]

    def logits(self, parts: Sequence[BatchPart]) -> FloatArray:
        """[ROWS, vocab_size] of one batch; a single row that nobody wants if no node is wanted."""
        tokens, positions = torch.zeros(2, ROWS, dtype=torch.int64)
        for part in parts:
            graph, first, rows = part.span.graph, part.span.first, part.span.rows
            tokens[rows] = torch.tensor(graph.tokens[first:])
            positions[rows] = torch.tensor(graph.positions[first:])
        handler = GraphAttention(self.cache, [part.span for part in parts])
        wanted = any(len(part.wanted) for part in parts)
        options = {} if wanted or not self._skips_head else {"logits_to_keep": 1}
        with handled_by(handler), RowInvariant():
            found = self._model(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False, **options
            )
        logits: FloatArray = found.logits[0].numpy()
        self.vocab_size = logits.shape[1]
        return logits

    def move(self, sources: IntArray, targets: IntArray) -> None:
        self.cache.move(torch.from_numpy(sources), torch.from_numpy(targets))

    def kv_bytes(self) -> int:
        """Bytes that the KV of one token takes."""
        return kv_bytes_per_token(self.cache.layers)

    # --- a pass is never run layer by layer -------------------------------------------------------

    def begin(self, spans: Sequence[Span], windows: Sequence[int | None]) -> NoReturn:
        raise UnsupportedModel(_WHOLE)

    def initial_hidden(
        self, batch: Batch, hidden: Sequence[HiddenStates | FloatArray | None]
    ) -> NoReturn:
        raise UnsupportedModel(_WHOLE)

    def project(self, layer: int, x: HiddenStates, batch: Batch) -> NoReturn:
        raise UnsupportedModel(_WHOLE)

    def attend(self, layer: int, queries: HiddenStates, batch: Batch) -> NoReturn:
        raise UnsupportedModel(_WHOLE)

    def output(self, layer: int, x: HiddenStates, attended: HiddenStates, batch: Batch) -> NoReturn:
        raise UnsupportedModel(_WHOLE)

    def mlp(self, layer: int, x: HiddenStates, batch: Batch) -> NoReturn:
        raise UnsupportedModel(_WHOLE)

    def keep_features(self, layer: int, x: HiddenStates, batch: Batch) -> NoReturn:
        raise UnsupportedModel(_WHOLE)

    def hidden_of(self, x: HiddenStates, rows: slice) -> NoReturn:
        raise UnsupportedModel(_WHOLE)

    def to_array(self, hidden: HiddenStates) -> NoReturn:
        raise UnsupportedModel(_WHOLE)

    def score(self, wanted: Sequence[HeadInput]) -> NoReturn:
        raise UnsupportedModel(_WHOLE)

    def feature(self, slot: int) -> NoReturn:
        raise UnsupportedModel(_WHOLE)

    def add_rows(self, rows: torch.Tensor) -> NoReturn:
        raise UnsupportedModel("a model that runs through transformers takes no further tokens")


def _check(item: PassInput) -> None:
    """Raises UnsupportedModel for a pass input that needs more than the whole causal model."""
    proposal = item.proposal
    if proposal.layers is not None or proposal.hidden is not None or proposal.wants.hidden:
        raise UnsupportedModel(_WHOLE)
    if proposal.draft_head or not proposal.graph.is_tree:
        raise UnsupportedModel("a model that runs through transformers decodes causally only")


def batches(work: Sequence[PassInput]) -> Iterator[list[BatchPart]]:
    """The computed nodes of a pass in order, ROWS at a time."""
    parts: list[BatchPart] = []
    row = 0
    for index, item in enumerate(work):
        graph, first, wanted = item.proposal.graph, item.first, item.proposal.wanted
        while first < len(graph):
            stop = min(len(graph), first + ROWS - row)
            upto = graph if stop == len(graph) else graph.part(range(stop))
            span = Span(upto, item.slots[:stop], item.table, first, row)
            inside = wanted[(wanted >= first) & (wanted < stop)]
            parts.append(BatchPart(index, span, inside))
            row, first = row + stop - first, stop
            if row == ROWS:
                yield parts
                parts, row = [], 0
    if parts:
        yield parts
