"""The logits processors of each node, from the request's parameters and the node's path alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np

from outstride.core.contracts import Grammar
from outstride.core.graph import MIXTURE, BoolArray, NodeId
from outstride.core.params import SamplingParams
from outstride.core.proposal import Proposal
from outstride.core.sampling import LogitsProcessors, Purpose, SamplingSpec
from outstride.core.sequence import Sequence
from outstride.errors import InvalidGrammar

MIN_TEMPERATURE = 1e-5
"""Temperatures below this are taken as 0."""


def sampling_spec(params: SamplingParams, seed: int, index: int, purpose: Purpose) -> SamplingSpec:
    """The request's temperature, filters and noise, for one purpose."""
    if params.temperature < MIN_TEMPERATURE:
        return SamplingSpec(seed=seed, index=index, purpose=purpose)
    return SamplingSpec(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed,
        index=index,
        purpose=purpose,
    )


def attach(sequence: Sequence, proposal: Proposal, end_tokens: Collection[int]) -> Proposal:
    """Sets the sampling of a proposal, and the logits processors of each node that is scored."""
    params, purpose = sequence.params, proposal.sampling.purpose
    if purpose not in sequence.sampling:
        sequence.sampling[purpose] = sampling_spec(params, sequence.seed, sequence.index, purpose)
    proposal.sampling = sequence.sampling[purpose]
    if not params.has_processors and sequence.grammar is None:
        return proposal
    graph, start, grammar = proposal.graph, sequence.prompt_length, sequence.grammar
    settled = Counter(sequence.tokens[start:])
    known = set(sequence.tokens) if params.repetition_penalty != 1.0 else set()
    forbidden_ends = {t: float("-inf") for t in (*end_tokens, *params.stop_token_ids)}
    processors: dict[int, LogitsProcessors] = {}
    for node in proposal.wanted:
        above = [i for i in graph.path(NodeId(node)) if i >= proposal.given]
        drafted = [int(graph.tokens[i]) for i in above if not graph.probes[i]]
        added = dict(params.logit_bias)
        if params.presence_penalty or params.frequency_penalty:
            for token, count in (settled + Counter(drafted)).items():
                penalty = params.presence_penalty + params.frequency_penalty * count
                added[token] = added.get(token, 0.0) - penalty
        if int(graph.positions[node]) + proposal.offset - start < params.min_tokens:
            added.update(forbidden_ends)
        forbidden = _bad_next(params, sequence, drafted) if params.bad_words else ()
        added.update(dict.fromkeys(forbidden, float("-inf")))
        processors[int(node)] = LogitsProcessors(
            penalized=tuple(known.union(drafted)) if params.repetition_penalty != 1.0 else (),
            scale=params.repetition_penalty,
            added=added,
            allowed=_allowed(grammar, sequence.tokens[start:], drafted, forbidden),
        )
    proposal.processors = processors
    return proposal


def _bad_next(params: SamplingParams, sequence: Sequence, drafted: list[int]) -> set[int]:
    """The tokens that would complete a bad word after the output and the drafted tokens."""
    longest = max(map(len, params.bad_words)) - 1
    output = sequence.tokens[sequence.prompt_length :][-longest:] if longest else []
    path = (*output, *drafted)
    return {
        word[-1]
        for word in params.bad_words
        if len(word) == 1 or path[max(len(path) - len(word) + 1, 0) :] == tuple(word[:-1])
    }


def _allowed(
    grammar: Grammar | None, output: list[int], drafted: list[int], forbidden: Collection[int]
) -> BoolArray | None:
    """The tokens that the grammar allows next. Only a draft may reach a path without any."""
    if grammar is None:
        return None
    mask = grammar.allowed([*output, *drafted])
    if mask is not None and forbidden and not drafted and mask.any():
        mask = mask.copy()
        mask[list(forbidden)] = False
        if not mask.any():
            raise InvalidGrammar(
                f"after {len(output)} tokens of the answer, bad_words forbids every token that "
                "the structured output allows"
            )
    if mask is not None and not drafted and not mask.any():
        raise InvalidGrammar(
            f"after {len(output)} tokens of the answer, no token of this model continues the "
            "structured output: it needs characters that the vocabulary does not have"
        )
    return mask


def attach_masked(
    sequence: Sequence,
    proposal: Proposal,
    end_tokens: Collection[int],
    mask: int,
    vocab_size: int,
) -> Proposal:
    """`attach` for a model that fills in masks. The mask itself is never an output token.

    The processors of a node depend on all settled tokens, and on what its own alternative canvas
    assumes. A grammar applies to the first gap only: after it, the text before is unknown.
    """
    params, purpose, start = sequence.params, proposal.sampling.purpose, sequence.prompt_length
    if purpose not in sequence.sampling:
        sequence.sampling[purpose] = sampling_spec(params, sequence.seed, sequence.index, purpose)
    proposal.sampling = sequence.sampling[purpose]
    graph, grammar = proposal.graph, sequence.grammar
    settled = {**dict(enumerate(sequence.tokens)), **sequence.canvas}
    forbidden_ends = dict.fromkeys((*end_tokens, *params.stop_token_ids), float("-inf"))
    never = {mask: float("-inf")} if mask < vocab_size else {}
    if not (params.has_processors or never or grammar):
        return proposal
    counting = params.presence_penalty or params.frequency_penalty
    penalised = counting or params.repetition_penalty != 1.0
    processors: dict[int, LogitsProcessors] = {}
    texts: dict[int, dict[int, int]] = {}  # by block: its nodes see the same tokens
    for node in map(int, proposal.wanted):
        position, block = int(graph.positions[node]) + proposal.offset, int(graph.blocks[node])
        if penalised and block not in texts:
            seen = np.flatnonzero(graph.sees[node] & ~np.isin(graph.tokens, (mask, MIXTURE)))
            texts[block] = settled | {int(graph.positions[i]): int(graph.tokens[i]) for i in seen}
        context = texts.get(block, settled)
        added = {**params.logit_bias, **never}
        forbidden = [word[0] for word in params.bad_words]
        added.update(dict.fromkeys(forbidden, float("-inf")))
        if counting:
            for token, count in Counter(t for p, t in context.items() if p >= start).items():
                penalty = params.presence_penalty + params.frequency_penalty * count
                added[token] = added.get(token, 0.0) - penalty
        if position - start < params.min_tokens:
            added |= forbidden_ends
        first = grammar is not None and position == len(sequence.tokens)
        processors[node] = LogitsProcessors(
            penalized=tuple(sorted(set(context.values())))
            if params.repetition_penalty != 1.0
            else (),
            scale=params.repetition_penalty,
            added=added,
            allowed=_allowed(grammar if first else None, sequence.tokens[start:], [], forbidden),
        )
    proposal.processors = processors
    return proposal
