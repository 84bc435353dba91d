"""`RunAhead`: launches the passes that will be asked for next, and recognises them when they are.

See the package for its states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from outstride.core.block_table import StepToken
from outstride.core.contracts import PassInput
from outstride.core.graph import IntArray
from outstride.core.proposal import Proposal, Scores
from outstride.ops.contract import HeadInput, Span
from outstride.ops.cuda.batch_metadata import AttentionGeometry, BatchMetadata
from outstride.ops.cuda.chain import request_chain
from outstride.ops.cuda.host_io import PassReply
from outstride.ops.cuda.kv_cache import DeviceKVCache
from outstride.ops.cuda.launch import DeferredPass, PassLauncher, Realignment
from outstride.ops.cuda.lm_head import DeviceLMHead, SamplingKernels, padded
from outstride.ops.cuda.metadata import (
    HeaderField,
    Int32Array,
    RowField,
    SamplingField,
    row_table,
)
from outstride.ops.cuda.metadata_builder import ordinary
from outstride.ops.cuda.run_ahead.decode_steps import STAGING_PAGES, DecodeSteps
from outstride.ops.cuda.run_ahead.draft_ahead import AheadTemplate, DraftAhead, TemplateBuilder
from outstride.ops.cuda.run_ahead.next_step import HitRate, NextStep, ScoringRequest

_FIRST = np.zeros(1, dtype=np.int64)
"""The nodes of a step that are scored."""

Templates = dict[tuple[int, ...], AheadTemplate]
"""Metadata of a sequence's passes, by what they differ in."""


@dataclass(frozen=True, slots=True)
class LaunchedPass:
    """A pass that has just been launched."""

    deferred: DeferredPass
    metadata: BatchMetadata
    wanted: Sequence[HeadInput]
    head: DeviceLMHead
    kernels: SamplingKernels
    sampling: Int32Array
    """The sampling records of the rows that are scored."""
    reply: PassReply


@dataclass(slots=True)
class _DraftRequest:
    """What a draft head was asked last, for one sequence."""

    deferred: DeferredPass
    proposal: Proposal
    version: int
    """Of the sequence's block table."""
    head: DeviceLMHead
    kernels: SamplingKernels
    rows: IntArray
    """Which rows of the pass were scored."""
    reply: PassReply
    drafted: torch.Tensor
    """The chain, on the GPU."""
    templates: Templates = field(default_factory=dict)


@dataclass(slots=True)
class _Verification:
    """The last pass over a chain that a draft head drafted."""

    deferred: DeferredPass
    sampling: Int32Array
    kernels: SamplingKernels
    request: ScoringRequest
    version: int
    """Of the sequence's block table."""
    head: DeviceLMHead
    templates: Templates = field(default_factory=dict)


class RunAhead:
    """The passes that are under way ahead of what was asked for."""

    def __init__(
        self,
        launcher: PassLauncher,
        cache: DeviceKVCache,
        geometry: AttentionGeometry,
        head: DeviceLMHead,
        windows: Sequence[int | None],
        max_positions: int,
    ) -> None:
        """windows: of the model's layers, without those of draft heads."""
        self._launcher, self._cache, self._geometry, self._head = launcher, cache, geometry, head
        self._windows = tuple(dict.fromkeys(windows))
        self._max_positions, self._all_layers = max_positions, (0, len(windows))
        self._next_step: NextStep | None = None
        self.step_hits, self.draft_hits = HitRate(), HitRate(0.6)
        self._draft_request: _DraftRequest | None = None
        self._verification: _Verification | None = None
        self._draft_ahead: DraftAhead | None = None
        self._builders: dict[str, TemplateBuilder] = {}

    def cancel(self) -> None:
        """Drops what is under way: another pass is asked for, or KV is copied."""
        self._next_step = None
        if self._draft_ahead is not None:
            self.draft_hits.learn(False)
        self._draft_ahead = None

    def reset(self) -> None:
        """Forgets everything: buffers or weights have changed."""
        self.cancel()
        self._draft_request = self._verification = None
        self._builders.clear()

    def match(self, work: Sequence[PassInput]) -> Callable[[], list[Scores]] | None:
        """The scores of a pass that is under way already; launches what follows it."""
        if self._draft_ahead is not None:
            return self._match_draft(self._draft_ahead, work)
        step, self._next_step = self._next_step, None
        if step is None:
            return None
        rows = step.match(work, self._geometry.page_size)
        self.step_hits.learn(rows is not None)
        if rows is None or step.reply is None:
            return None
        return self._take_step(step, step.reply, rows, work)

    def after(self, launched: LaunchedPass) -> None:
        """Launches what will follow a pass, if that can be known."""
        steps, wanted = launched.deferred.batch.steps, launched.wanted
        if launched.head is not self._head:
            self._note_draft(launched)
        elif steps is not None and len(launched.sampling) == len(wanted) == len(steps):
            self._verification = None  # this answer is not made of drafts alone
            requests = [ScoringRequest.of(item.proposal) for item in wanted]
            rows = list(range(len(wanted)))
            self._prepare_step(
                steps, rows, launched.reply, launched.sampling, requests, launched.kernels
            )
        elif len(wanted) == 1:
            self._note_verification(launched)

    # --- one more step ----------------------------------------------------------------------------

    def _prepare_step(
        self,
        steps: DecodeSteps,
        rows: list[int],
        before: PassReply,
        sampling: Int32Array,
        requests: list[ScoringRequest],
        kernels: SamplingKernels,
    ) -> None:
        """Works out the next pass; launches it if the last ones were asked for as expected."""
        following = steps.following(rows, self._geometry, self._max_positions)
        if following is None:
            return
        sampling = sampling.copy()
        sampling[:, SamplingField.POSITION] += 1
        self._next_step = step = NextStep(following, before, sampling, requests, kernels)
        if not self.step_hits.enough:
            return
        count = len(following)
        metadata = following.metadata(self._windows, padded(count), self._geometry)
        graph = self._launcher.captured(metadata, self._all_layers, kernels)
        if graph is None:
            return
        metadata.set_head_rows(range(count))[:] = sampling
        step.reply = self._head.replies.take(count)
        metadata.words[HeaderField.REPLY] = step.reply.slot
        self._launcher.ring.post(metadata.words)
        graph.replay()
        step.reply.launched()

    def _take_step(
        self, step: NextStep, reply: PassReply, rows: list[int], work: Sequence[PassInput]
    ) -> Callable[[], list[Scores]]:
        """Some rows of a pass that is under way: its scores. Launches the pass after it."""
        copies = step.steps.settle(rows, work, self._geometry.page_size)
        if copies:
            self._cache.copy(copies)
        self._verification = None
        requests = [step.requests[row] for row in rows]
        self._prepare_step(step.steps, rows, reply, step.sampling[rows], requests, step.kernels)

        def scores() -> list[Scores]:
            best = reply.wait()[rows]
            if not step.kernels.several:
                return [Scores(_FIRST, line) for line in best[:, :1, None].transpose(0, 2, 1)]
            return [
                Scores(_FIRST, best[i : i + 1, : min(request.wants.best, self._head.vocab)])
                for i, request in enumerate(requests)
            ]

        return scores

    # --- the next draft and the pass over it --------------------------------------------------------

    def _note_draft(self, launched: LaunchedPass) -> None:
        """Remembers what a draft head was asked, if it was asked for one chain of one sequence."""
        self._draft_request = None
        batch, finder = launched.deferred.batch, launched.head.chain
        if finder is None or not launched.reply.chain_length or len(batch.windows) != 1:
            return
        item = launched.wanted[0]
        self._draft_request = _DraftRequest(
            launched.deferred, item.proposal, batch.spans[0].table.version, launched.head,
            launched.kernels, item.nodes, launched.reply, finder.drafted,
        )  # fmt: skip

    def _note_verification(self, launched: LaunchedPass) -> None:
        """After a pass over just the chain that was drafted for it, both will come again."""
        draft, (item,) = self._draft_request, launched.wanted
        span, *others = launched.deferred.batch.spans
        if draft is None or others or not self._follows(draft, item, span):
            return
        if self._verification is not None and self._verification.version == span.table.version:
            self.draft_hits.learn(True)  # this pass could have been known
        self._verification = _Verification(
            launched.deferred, launched.sampling.copy(), launched.kernels,
            ScoringRequest.of(item.proposal), span.table.version, launched.head,
        )  # fmt: skip
        token, pages = span.table.step_token, span.table.pages
        drafted = span.graph.tokens[1:]
        self._launch_draft(draft, self._verification, token, pages, drafted, launched.reply)

    def _follows(self, draft: _DraftRequest, item: HeadInput, span: Span) -> bool:
        """Whether a pass is over the chain of a draft, or the beginning of it, and nothing else."""
        proposal, graph, chain = item.proposal, span.graph, draft.reply.chain
        count = len(graph.tokens) - 1
        return (
            chain is not None
            and draft.version == span.table.version
            and len(self._windows) == 1
            and 0 < count <= len(chain)
            and proposal.given == 1
            and proposal.exact_match  # else more may be accepted than the GPU can know
            and len(item.nodes) == count + 1
            and proposal.layers is None
            and np.array_equal(graph.tokens[1:], chain[:count])
            and ordinary(span, self._geometry.page_size)
        )

    def _launch_draft(
        self,
        draft: _DraftRequest,
        verification: _Verification,
        token: StepToken,
        known: list[int],
        drafted: IntArray,
        before: PassReply,
    ) -> None:
        """Launches the next draft and the pass over it, as if all of the chain were accepted.

        token, known: of the pass over the chain `drafted`, and the pages of its sequence.
        """
        geometry, count = self._geometry, len(drafted)
        context = token.num_cached + 1 + count
        end = context + max(len(draft.proposal.graph.tokens), count + 1)
        further = -(-end // geometry.page_size) - len(known)
        if not self.draft_hits.enough or end > self._max_positions or further > STAGING_PAGES:
            return
        first = self._draft_template(draft, context, count)
        second = self._verify_template(verification, context, count)
        if first is None or second is None:
            return
        staging = geometry.staging_page
        pages = [*known, *range(staging, staging + max(further, 0))]
        ahead = DraftAhead(
            token.on(1), drafted, before, pages, len(known), draft.proposal, verification.request
        )
        scored = len(draft.rows)
        ahead.draft = self._start(first, draft, context, pages, scored, draft.drafted)
        ahead.draft.chain_length = scored
        ahead.verify = self._start(second, verification, context, pages, count + 1, draft.drafted)
        self._draft_ahead = ahead

    def _builder(
        self, head: str, windows: Sequence[int | None], *, bidirectional: bool
    ) -> TemplateBuilder:
        if head not in self._builders:
            self._builders[head] = TemplateBuilder(
                windows, self._geometry, bidirectional=bidirectional
            )
        return self._builders[head]

    def _draft_template(
        self, draft: _DraftRequest, context: int, rejected: int
    ) -> AheadTemplate | None:
        """The draft head's next pass."""
        proposal, rows = draft.proposal, draft.rows
        nodes, windows = len(proposal.graph.tokens), draft.deferred.batch.windows
        builder = self._builder(proposal.draft_head, windows, bidirectional=True)
        key = builder.key(context, rejected, nodes)
        if key in draft.templates:
            return draft.templates[key]
        template = builder.template(key, context, padded(nodes))
        if template is not None:
            made, first = template.made, template.context + int(rows[0])
            row_table(made.words, made.rows)[RowField.TOKEN, :nodes] = proposal.graph.tokens
            request_chain(made.words, len(rows), proposal.sampling, first)
            records = made.set_head_rows(rows)
            records[:, SamplingField.NUM_TOKENS] = draft.head.num_candidates(proposal)
            draft.templates[key] = template
        return template

    def _verify_template(
        self, verification: _Verification, context: int, rejected: int
    ) -> AheadTemplate | None:
        """The target's pass over what the draft head will draft."""
        builder = self._builder("", self._windows, bidirectional=False)
        key = builder.key(context, rejected, rejected + 1)
        if key in verification.templates:
            return verification.templates[key]
        template = builder.template(key, context, padded(rejected + 1))
        if template is not None:
            rows = np.arange(rejected + 1)
            records = template.made.set_head_rows(rows)
            records[:] = verification.sampling
            position = template.context + rows + verification.request.offset
            records[:, SamplingField.POSITION] = position
            verification.templates[key] = template
        return template

    def _start(
        self,
        template: AheadTemplate,
        of: _DraftRequest | _Verification,
        context: int,
        pages: list[int],
        rows: int,
        drafted: torch.Tensor,
    ) -> PassReply:
        """Launches a pass that the GPU moves to where its sequence will stand."""
        reply = of.head.replies.take(rows)
        words = template.words(context, pages, reply.slot)
        moves = self._cache.has_pending
        if not self._launcher.replay(template.graphs.get(moves), words):
            metadata = self._launcher.fit(replace(template.made, words=words))
            realignment = Realignment(self._head.sampled, drafted, draft=of.head is not self._head)
            graph = self._launcher.start(
                metadata, of.deferred, padded(rows), of.kernels, of.head, cut=False,
                realignment=realignment,
            )  # fmt: skip
            if graph is not None:
                template.graphs[moves] = graph
        reply.launched()
        return reply

    def _match_draft(
        self, ahead: DraftAhead, work: Sequence[PassInput]
    ) -> Callable[[], list[Scores]] | None:
        """The draft that is under way, or the pass over it; launches what follows that."""
        draft, verification = self._draft_request, self._verification
        size = self._geometry.page_size
        if len(work) == 1 and draft is not None and verification is not None:
            (piece,) = work
            item = HeadInput(piece.proposal, piece.proposal.wanted, None, 0)
            if ahead.draft is not None and ahead.is_draft(piece, size):
                draft.proposal, draft.reply = piece.proposal, ahead.draft
                return draft.head.collect([item], ahead.draft, True)
            if ahead.verify is not None and ahead.is_verify(piece, size):
                self._draft_ahead = None
                self.draft_hits.learn(True)
                if staged := ahead.staged(piece, size):
                    self._cache.move(*np.asarray(staged).T)
                drafted, table = piece.proposal.graph.tokens[1:], piece.table
                self._launch_draft(
                    draft, verification, table.step_token, table.pages, drafted, ahead.verify
                )
                return self._head.collect([item], ahead.verify, True)
        self.cancel()
        return None
