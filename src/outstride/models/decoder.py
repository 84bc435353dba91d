"""`Decoder`: one transformer for the Llama, Qwen and LLaDA families, autoregressive or not.

It runs token graphs over a paged KV cache through operations (`ops`) whose rows do not depend on each
other: a node gets the same bits alone, in a long prompt, in a tree or in a batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from threading import Lock

import numpy as np
import torch

from outstride.core.contracts import MaskedSpec, PassInput, TrainedFilter
from outstride.core.draft_heads import DraftHead, MedusaDraftHead
from outstride.core.graph import MIXTURE, FloatArray, IntArray
from outstride.core.proposal import Proposal, Scores
from outstride.core.recurrent import StateSpec, StateUpdate
from outstride.core.sequence import BlockTable
from outstride.errors import UnsupportedModel
from outstride.models import weights
from outstride.models.config import DecoderConfig
from outstride.ops.contract import (
    MAX_ADAPTERS,
    AdapterRows,
    HeadInput,
    HiddenStates,
    Ops,
    PackedHead,
    Span,
)
from outstride.ops.reference import Reference
from outstride.ops.weights import (
    AdapterWeights,
    BlockDrafterWeights,
    DraftHeadWeights,
    MedusaWeights,
    ModelWeights,
)

MASKS = ""
"""The name of the diffusion adapter, which no request can choose."""


@dataclass(slots=True)
class _GraphRun:
    """The token graph of one pass input on its way through the layers."""

    work: PassInput
    start: int
    stop: int
    state: HiddenStates | FloatArray | None
    """Hidden states, one row per computed node; None before the embedding."""
    hidden: dict[int, FloatArray] = field(default_factory=dict)

    @property
    def proposal(self) -> Proposal:
        return self.work.proposal

    @property
    def count(self) -> int:
        """How many nodes this pass computes."""
        return len(self.work.proposal.graph) - self.work.first

    @property
    def wanted(self) -> IntArray:
        """Nodes that reach the LM head; nodes of earlier rounds are scored already."""
        nodes, first = self.work.proposal.wanted, self.work.first
        return nodes[nodes >= first] if first else nodes


@dataclass(slots=True)
class DecoderPass:
    """A pass that runs on a device already, or that runs when its result is waited for.

    On a CPU a pass uses all cores, and a switch to another thread and back takes longer than most work
    that could be overlapped. So it is started on the model's thread only when a drafter works in the
    same step (`start`).
    """

    result: Callable[[], list[Scores]]
    worker: Executor | None = None
    """The model's own thread; None for passes that were launched on a device."""

    def start(self) -> None:
        if self.worker is not None:
            self.result, self.worker = self.worker.submit(self.result).result, None

    def wait(self) -> list[Scores]:
        return self.result()


class Decoder:
    """A decoder with a paged KV cache. Implements `core.contracts.Model`.

    Attention follows the token graphs: one pass may hold chains, trees and masked blocks. `digest`
    identifies the weights; the fingerprint adds device, weights format and build.
    """

    def __init__(
        self,
        config: DecoderConfig,
        ops: Ops,
        digest: str,
        *,
        pages: int,
        page_size: int = 16,
        masking: MaskedSpec | None = None,
        states: StateSpec | None = None,
    ) -> None:
        if (states is None) != (config.switches.recurrent is None):
            raise ValueError("recurrent layers, and nothing else, need state slots")
        self.config = config
        self.ops = ops
        self.whole_passes = ops.whole_passes
        self.vocab_size = config.vocab_size
        self.layers = config.layers
        self.context = config.context
        self.attention_pattern = config.attention_pattern
        self.masked_spec = masking
        self.page_size = page_size
        self.pages = pages
        self.digest = digest
        self.state_spec = states
        self.draft_heads: dict[str, DraftHead] = {}
        self.filters: dict[str, TrainedFilter] = {}
        self.adapters: dict[str, str] = {}
        self._adapter_numbers: dict[str, int] = {}
        """The number that the backend has for each adapter; `MASKS` is the diffusion adapter."""
        self._ranges: dict[str, tuple[int, int]] = {"": (0, config.layers)}
        self._eagle_heads: dict[int, str] = {}
        """EAGLE draft heads, by their first layer."""
        self._busy = Lock()
        """Held during a pass, and while a draft head or an adapter is attached."""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="outstride-model")
        self.build = f"{ops.device} {ops.weights} {ops.name} torch {torch.__version__}"
        self.fingerprint = hashlib.sha256(f"{digest} {self.build}".encode()).hexdigest()[:16]

    @classmethod
    def from_tensors(
        cls,
        config: DecoderConfig,
        tensors: dict[str, torch.Tensor],
        *,
        pages: int,
        page_size: int = 16,
        features: tuple[int, ...] = (),
        states: StateSpec | None = None,
        make_ops: Callable[[ModelWeights], Ops] = Reference,
        masking: MaskedSpec | None = None,
        digest: str | None = None,
    ) -> Decoder:
        """From tensors named as in a Llama checkpoint of Hugging Face.

        They are removed from the dictionary one by one, so that no second copy of the model exists.
        `features` names layers whose input hidden states are stored with the KV of each node, for
        draft heads. digest: of the file that the tensors are from; None: it is computed from them.
        """
        weights.check(config, tensors)
        weights.check_finite(tensors)
        if any(not 0 <= layer <= config.layers for layer in features):
            raise ValueError(f"features must name layers from 0 to {config.layers}: {features}")
        if digest is None:
            digest = weights.digest_of(config, tensors)
        model = ModelWeights(
            shape=config,
            layers=[weights.take_layer(config, tensors, i) for i in range(config.layers)],
            **weights.take_model(config, tensors),
            slots=pages * page_size,
            page_size=page_size,
            features=features,
            state_slots=0 if states is None else states.slots,
        )
        ops = make_ops(model)
        return cls(
            config, ops, digest, pages=pages, page_size=page_size, masking=masking, states=states
        )

    def add_rows(self, rows: torch.Tensor) -> int:
        """Adds embedding rows (masks, prompt tokens); returns the id of the first."""
        return self.vocab_size + self.ops.add_rows(weights.joined([rows]))

    def pack_draft_head(self, weights: DraftHeadWeights) -> PackedHead:
        """The slow part of `attach_draft_head`, for any thread, also while passes run."""
        aux_layers = (weights.layer,) if isinstance(weights, MedusaWeights) else weights.aux_layers
        if any(not 0 <= layer <= self.layers for layer in aux_layers):
            raise ValueError(f"it reads layers {aux_layers} of a model that has {self.layers}")
        listed = weights.vocabulary
        if not len(listed) or listed.min() < 0 or listed.max() >= self.vocab_size:
            raise ValueError(f"its vocabulary is not part of the model's {self.vocab_size} tokens")
        return self.ops.draft_heads.pack(weights)

    def attach_draft_head(
        self,
        name: str,
        head: DraftHead,
        weights: DraftHeadWeights,
        packed: PackedHead | None = None,
    ) -> None:
        """Attaches a draft head. It only drafts: no text depends on it.

        packed: what `pack_draft_head` made of the weights; None: it is made now.
        """
        if packed is None:
            packed = self.pack_draft_head(weights)
        with self._busy:
            placed = self.ops.draft_heads.attach(name, packed)
            self._ranges[name] = placed.layers
            if head.autoregressive:
                self._eagle_heads[placed.layers[0]] = name
            if isinstance(head, MedusaDraftHead):
                head = replace(head, feature_range=placed.feature_range)
            if isinstance(weights, BlockDrafterWeights) and weights.bigram is not None:
                head = replace(head, device_chain=self.ops.device_chains)
            self.draft_heads[name] = head

    def attach_adapter(self, name: str, digest: str, layers: Sequence[AdapterWeights]) -> None:
        """Attaches a LoRA adapter that requests may choose by its name.

        digest: of its weights; it takes part in the fingerprint of the requests that choose it.
        """
        if name in self._adapter_numbers:
            raise UnsupportedModel(f"there is an adapter {name!r} already; choose another name")
        with self._busy:
            self._attach_adapter(name, layers)
            self.adapters[name] = digest

    def detach_adapter(self, name: str) -> None:
        """Drops an adapter; no request may use it any more."""
        with self._busy:
            del self.adapters[name]
            self.ops.draft_heads.detach_adapter(self._adapter_numbers.pop(name))

    def _attach_adapter(self, name: str, layers: Sequence[AdapterWeights]) -> None:
        if len(self._adapter_numbers) == MAX_ADAPTERS:
            raise UnsupportedModel(f"a model takes {MAX_ADAPTERS} adapters at most; unload one")
        self._adapter_numbers[name] = self.ops.draft_heads.attach_adapter(layers)

    def attach_diffusion_adapter(
        self, mask: torch.Tensor, block: int, layers: Sequence[AdapterWeights]
    ) -> MaskedSpec:
        """Attaches a LoRA adapter that only the nodes of blocks with masks go through."""
        if self.state_spec is not None:
            raise UnsupportedModel(
                "a diffusion adapter cannot be attached to a model with a recurrent state: it takes "
                "tokens one after the other, and masked blocks see each other; use another method"
            )
        with self._busy:
            self._attach_adapter(MASKS, layers)
            token = self.add_rows(mask)
            self.masked_spec = MaskedSpec(
                token, block, shifted=True, causal=True, uses_adapter=True
            )
            with_it = self.fingerprint.encode() + mask.float().numpy().tobytes()
            self.fingerprint = hashlib.sha256(with_it).hexdigest()[:16]
            return self.masked_spec

    # --- the contract -----------------------------------------------------------------------------

    def forward(self, work: Sequence[PassInput]) -> DecoderPass:
        """One pass over all graphs."""
        if self.ops.asynchronous:
            with self._busy:
                return DecoderPass(self.ops.scores_ahead(work) or self._launch(list(work)))
        return DecoderPass(partial(self._forward, list(work)), self._worker)

    def move(self, sources: IntArray, targets: IntArray) -> None:
        """Copies KV between slots, all read before any is written."""
        if len(sources):
            with torch.inference_mode():
                self.ops.move(np.asarray(sources), np.asarray(targets))

    def update_states(self, updates: Sequence[StateUpdate]) -> None:
        """Advances recurrent states along accepted paths, and copies them."""
        with torch.inference_mode():
            self.ops.update_states(updates)

    def feature(self, table: BlockTable, position: int) -> FloatArray:
        """The stored hidden states at a kept position, the layers one after the other."""
        index = table.positions.index(position)
        slot = table.pages[index // self.page_size] * self.page_size + index % self.page_size
        return self.ops.feature(slot)

    def close(self) -> None:
        """Ends the model's thread; no pass may follow."""
        self._worker.shutdown()

    # --- the pass ---------------------------------------------------------------------------------

    def _forward(self, work: list[PassInput]) -> list[Scores]:
        with self._busy:
            return (self.ops.scores_ahead(work) or self._launch(work))()

    @torch.inference_mode()
    def _launch(self, work: list[PassInput]) -> Callable[[], list[Scores]]:
        runs = [self._graph_run(item) for item in work]
        bounds = sorted({edge for run in runs for edge in (run.start, run.stop)})
        for low, high in pairwise(bounds):
            active = [r for r in runs if r.count and r.start <= low and high <= r.stop]
            if active:
                alone = len(active) == sum(run.count > 0 for run in runs)
                self._run_layers(active, low, high, alone)
        wanted = [HeadInput(r.proposal, r.wanted, r.state, r.work.first) for r in runs]
        collect = self.ops.score(wanted)

        def scores() -> list[Scores]:
            return [
                replace(found, hidden=run.hidden) if run.hidden else found
                for run, found in zip(runs, collect(), strict=True)
            ]

        return scores

    def _graph_run(self, work: PassInput) -> _GraphRun:
        proposal = work.proposal
        start, stop = proposal.layers or self._ranges[proposal.draft_head]
        run = _GraphRun(work, start, stop, proposal.hidden if start else None)
        if start and proposal.hidden is None and not proposal.draft_head:
            raise ValueError(f"a pass from layer {start} on needs hidden states")
        if proposal.hidden is not None and len(proposal.hidden) != run.count:
            raise ValueError("hidden states need one row for each node to be computed")
        return run

    def _run_layers(self, runs: list[_GraphRun], low: int, high: int, alone: bool) -> None:
        """Runs layers `low` to `high - 1` on the hidden states of these graphs.

        alone: the pass computes nothing else before the LM head.
        """
        ops, spans, row = self.ops, [], 0
        for run in runs:
            work = run.work
            graph, adapters = run.proposal.graph, self._adapter_rows(run)
            spans.append(Span(graph, work.slots, work.table, work.first, row, adapters, work.state))
            row += run.count
        batch = ops.begin(spans, ops.windows[low:high])
        eagle = self._eagle_heads.get(low, "")

        def layers() -> HiddenStates:
            if eagle:
                x = ops.draft_heads.eagle_input(eagle, batch)
            else:
                x = ops.initial_hidden(batch, [run.state for run in runs])
            for layer in range(low, high):
                ops.keep_features(layer, x, batch)
                self._record(runs, spans, layer, x)
                queries = ops.project(layer, x, batch)
                x = ops.output(layer, x, ops.attend(layer, queries, batch), batch)
                x = ops.mlp(layer, x, batch)
            if high == self.config.layers:
                ops.keep_features(high, x, batch)
                ops.draft_heads.write_kv(batch)
            if eagle:
                ops.draft_heads.keep_hidden(eagle, x, batch)
            return x

        fresh = all(run.state is None and not run.proposal.wants.hidden for run in runs)
        whole = (
            (low, high)
            if fresh and alone and not eagle and (low, high) in self._ranges.values()
            else None
        )
        x = ops.run(layers, batch, whole)
        self._record(runs, spans, high, x)
        for run, span in zip(runs, spans, strict=True):
            run.state = ops.hidden_of(x, span.rows)

    def _adapter_rows(self, run: _GraphRun) -> AdapterRows | None:
        """The number of the adapter that each computed node goes through.

        Nodes of blocks that hold a mask go through the diffusion adapter, if there is one; all others
        through the one of the request. Draft heads are trained for the model without an adapter.
        """
        if not self._adapter_numbers or run.proposal.draft_head:
            return None
        graph, spec, first = run.proposal.graph, self.masked_spec, run.work.first
        own = self._adapter_numbers[run.work.adapter] if run.work.adapter else 0
        if spec is not None and spec.uses_adapter:
            masks = (graph.tokens == spec.token) | (graph.tokens == MIXTURE)
            if masks.any():
                blocks = np.isin(graph.blocks, graph.blocks[masks])[first:]
                return np.where(blocks, self._adapter_numbers[MASKS], own).astype(np.uint8)
        return np.full(run.count, own, dtype=np.uint8) if own else None

    def _record(
        self, runs: list[_GraphRun], spans: list[Span], layer: int, x: HiddenStates
    ) -> None:
        """Copies the input hidden states of a layer for the proposals that want them."""
        for run, span in zip(runs, spans, strict=True):
            if layer in run.proposal.wants.hidden:
                run.hidden[layer] = self.ops.to_array(self.ops.hidden_of(x, span.rows))
