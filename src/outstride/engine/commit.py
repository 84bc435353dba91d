"""Commit: the only place where verdicts change sequences and KV caches, the target's or a drafter's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from outstride.cache.pool import Moves
from outstride.core.contracts import accepted_nodes
from outstride.core.graph import NodeId
from outstride.core.pooling import PooledStates
from outstride.core.proposal import TARGET, Proposal, Scores, Verdict
from outstride.core.sampling import logprobs
from outstride.core.sequence import Sequence, Status
from outstride.engine.final_norm import normalized
from outstride.engine.ledger import Ledger, SequenceProgress
from outstride.engine.model_runner import ModelRunner, SequenceStep
from outstride.engine.sequences import SequenceManager


class _Due(NamedTuple):
    """What a pass did for a sequence; counted and published while the next pass runs."""

    step: SequenceStep
    verdict: Verdict
    scores: Scores
    emitted: list[int]


class Commit:
    """Settles tokens, keeps KV, starts forks and ends finished sequences.

    Whatever the next pass depends on happens at once; counting and publishing wait until it runs.
    """

    def __init__(self, runner: ModelRunner, sequences: SequenceManager, ledger: Ledger) -> None:
        self._runner = runner
        self._sequences = sequences
        self._ledger = ledger
        self._due: list[_Due] = []

    @property
    def due(self) -> bool:
        """Whether something waits to be counted or published."""
        return bool(self._due)

    def __call__(
        self, verdicts: Mapping[SequenceStep, Verdict], scores: Mapping[SequenceStep, Scores]
    ) -> None:
        moves: dict[str, Moves] = {}
        for step, verdict in verdicts.items():
            sequence, score = step.sequence, scores[step]
            sequence.steps += not step.prefilling
            emitted, reason = self._settle(sequence, verdict)
            self._due.append(_Due(step, verdict, score, emitted))
            self._keep(step, verdict, moves)
            if not step.prefilling:
                drafter = sequence.method.drafter
                if drafter.observes and sequence.steps > sequence.draft_backoff_until:
                    verb = self._ledger.switch_timer("propose")
                    sequence.state = self._sequences.run_guarded(
                        sequence, drafter.observe, step.view, step.proposal, score, verdict
                    )
                    self._ledger.switch_timer(verb)
                    if sequence.status is not Status.RUNNING:
                        continue
            self._fork(step, verdict)
            if reason is not None:
                self._sequences.end(sequence, reason)
        for name, needed in moves.items():
            self._runner.move(name, needed)

    def _settle(self, sequence: Sequence, verdict: Verdict) -> tuple[list[int], str | None]:
        """Appends settled tokens; those without a gap before them are emitted, up to a stop rule."""
        canvas, emitted = sequence.canvas, []
        for position, token in verdict.settled.items():
            if canvas or position != len(sequence.tokens):
                canvas[int(position)] = int(token)
                continue
            emitted.append(int(token))
            if reason := self._sequences.append(sequence, int(token)):
                return emitted, reason
        while canvas and (found := canvas.pop(len(sequence.tokens), None)) is not None:
            emitted.append(found)
            if reason := self._sequences.append(sequence, found):
                canvas.clear()
                return emitted, reason
        return emitted, None

    def _keep(self, step: SequenceStep, verdict: Verdict, moves: dict[str, Moves]) -> None:
        """Keeps valid KV: by the verdict for the target, by matching tokens for other models."""
        sequence = step.sequence
        for name, ran in step.rounds.items():
            table, pool = sequence.tables[name], self._runner.pools[name]
            if name == TARGET:
                keep, reuse = verdict.keep, verdict.reuse
                if len(keep) > ran.given:
                    # A stop rule may have cut the accepted run: KV beyond the cut is dropped.
                    end, canvas = len(sequence.tokens), sequence.canvas
                    places = ran.graph.positions.tolist()
                    keep = tuple(n for n in keep if places[n] < end or places[n] in canvas)
            elif name in sequence.method.drafter.masked_models:  # its other nodes saw masks
                keep, reuse = tuple(map(NodeId, range(ran.given))), ()
            else:
                keep = tuple(map(NodeId, accepted_nodes(ran.graph, ran.given, sequence.tokens)))
                reuse = ()
            forks = [int(ran.graph.positions[n]) for n in verdict.forks] if name == TARGET else []
            if needed := pool.commit(table, ran.graph.positions, keep, reuse, forks):
                moves.setdefault(name, Moves()).add(needed)
            if name == TARGET and not table.ordered and len(table) >= len(sequence.order):
                sequence.order = list(table.positions)
            tokens = sequence.shareable if name == TARGET else sequence.tokens
            pool.publish(table, tokens, self._runner.prefix_key(name, sequence))

    def _fork(self, step: SequenceStep, verdict: Verdict) -> None:
        """Forks at the end of the prompt for a request's n samples, else where the verdict says."""
        sequence, graph = step.sequence, step.proposal.graph
        if sequence.pending_forks and not step.prefilling:
            self._sequences.fork(sequence, sequence.prompt_length, sequence.pending_forks)
            sequence.pending_forks = 0
        for node, count in verdict.forks.items():
            self._sequences.fork(sequence, int(graph.positions[node]) + 1, count)

    # --- counting and publishing --------------------------------------------------------------------

    def outputs(self) -> list[SequenceProgress]:
        """Counts what is due in the ledger and returns the progress of each sequence concerned."""
        due, self._due = self._due, []
        emitted: dict[Sequence, list[int]] = {}
        passes: dict[Sequence, tuple[Proposal, Verdict]] = {}
        for item in due:
            sequence = item.step.sequence
            if item.scores.logprobs:
                self._store_logprobs(item)
            if sequence.pooled is not None:
                self._pool_states(sequence.pooled, item)
            self._ledger.count(
                sequence,
                item.step.proposal,
                item.verdict,
                item.emitted,
                item.step.allocation.gain,
            )
            if (item.emitted or sequence.stream_canvas) and sequence.streaming:
                emitted[sequence] = item.emitted
                if sequence.stream_canvas:
                    passes[sequence] = (item.step.proposal, item.verdict)
        for sequence in self._sequences.take_ended():
            emitted.setdefault(sequence, [])
        found = [self._sequences.progress(sequence, tokens) for sequence, tokens in emitted.items()]
        for progress in found if passes else ():
            progress.drawn = passes.get(progress.sequence)
        return found

    def discard(self) -> None:
        """Drops what is due. The engine failed, and every request has got the error."""
        self._due.clear()
        self._sequences.take_ended()

    def _pool_states(self, pooled: PooledStates, item: _Due) -> None:
        """Adds the hidden states of the given nodes to the embedding of the prompt."""
        model, proposal = self._runner.models[TARGET], item.step.proposal
        rows = item.scores.hidden.get(model.layers)
        if rows is None:
            return  # the model returns no hidden states; the embedding stays empty
        rows = normalized(model, rows[: proposal.given])
        pooled.add(proposal.graph.positions[: proposal.given], rows)

    def _store_logprobs(self, item: _Due) -> None:
        """Stores the log-probabilities of prompt tokens and of emitted tokens."""
        scores, verdict = item.scores, item.verdict
        sequence, proposal = item.step.sequence, item.step.proposal
        params, start = sequence.params, len(sequence.tokens) - len(item.emitted)
        if verdict.nodes:
            self._store_unordered_logprobs(item)
            return
        trusted = set(verdict.keep) if proposal.offset else set(scores.nodes.tolist())
        for i, (node, row) in enumerate(zip(scores.nodes.tolist(), scores.logprobs, strict=True)):
            position = int(proposal.graph.positions[node]) + proposal.offset
            if position < sequence.prompt_length:
                sequence.prompt_logprobs[position] = row[: (params.prompt_logprobs or 0) + 1]
            elif node in trusted and start <= position < len(sequence.tokens):
                if params.logprobs is None:
                    continue
                token = sequence.tokens[position]
                if row[0][0] != token and scores.logits is not None:  # not the target's own sample
                    row = tuple(logprobs(scores.logits[i], [token], params.logprobs))
                sequence.logprobs[position] = row[: params.logprobs + 1]

    def _store_unordered_logprobs(self, item: _Due) -> None:
        """Stores log-probabilities where tokens are settled in any order: those of that step."""
        scores, sequence = item.scores, item.step.sequence
        top = sequence.params.logprobs
        for position, node in item.verdict.nodes.items() if top is not None else ():
            token, i = item.verdict.settled[position], scores.row(node)
            row = scores.logprobs[i]
            if row[0][0] != token and scores.logits is not None:  # not the target's own sample
                row = tuple(logprobs(scores.logits[i], [token], top or 0))
            sequence.logprobs[int(position)] = row[: (top or 0) + 1]
