"""From a request's parameters to the rules of each node: they depend on the node's path alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np

from outstride.core.contracts import Grammar
from outstride.core.graph import MIXTURE, BoolArray, NodeId
from outstride.core.params import SamplingParams
from outstride.core.proposal import Proposal
from outstride.core.sampling import Draw, Purpose, Rules
from outstride.core.sequence import Sequence
from outstride.errors import InvalidGrammar

COLDEST = 1e-5
"""Temperatures below this are taken as 0."""


def draw_of(params: SamplingParams, seed: int, index: int, purpose: Purpose) -> Draw:
    """The request's temperature, filters and noise, for one purpose."""
    if params.temperature < COLDEST:
        return Draw(seed=seed, index=index, purpose=purpose)
    return Draw(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed,
        index=index,
        purpose=purpose,
    )


def attach(sequence: Sequence, proposal: Proposal, end_tokens: Collection[int]) -> Proposal:
    """The proposal with the request's draw, and with rules for each node that is scored."""
    params, purpose = sequence.params, proposal.draw.purpose
    if purpose not in sequence.draws:
        sequence.draws[purpose] = draw_of(params, sequence.seed, sequence.index, purpose)
    proposal.draw = sequence.draws[purpose]
    if not params.has_rules and sequence.grammar is None:
        return proposal
    graph, start, grammar = proposal.graph, sequence.prompt_length, sequence.grammar
    settled = Counter(sequence.tokens[start:])
    known = set(sequence.tokens) if params.repetition_penalty != 1.0 else set()
    silent = {t: float("-inf") for t in (*end_tokens, *params.stop_token_ids)}
    rules: dict[int, Rules] = {}
    for node in proposal.wanted:
        above = [i for i in graph.path(NodeId(node)) if i >= proposal.given]
        drafted = [int(graph.tokens[i]) for i in above if not graph.probes[i]]
        added = dict(params.logit_bias)
        if params.presence_penalty or params.frequency_penalty:
            for token, count in (settled + Counter(drafted)).items():
                penalty = params.presence_penalty + params.frequency_penalty * count
                added[token] = added.get(token, 0.0) - penalty
        if int(graph.positions[node]) + proposal.offset - start < params.min_tokens:
            added.update(silent)
        rules[int(node)] = Rules(
            scaled=tuple(known.union(drafted)) if params.repetition_penalty != 1.0 else (),
            scale=params.repetition_penalty,
            added=added,
            allowed=_allowed(grammar, sequence.tokens[start:], drafted),
        )
    proposal.rules = rules
    return proposal


def _allowed(grammar: Grammar | None, said: list[int], drafted: list[int]) -> BoolArray | None:
    """What may follow. A draft may end where nothing can; a text may not."""
    if grammar is None:
        return None
    mask = grammar.allowed([*said, *drafted])
    if mask is not None and not drafted and not mask.any():
        raise InvalidGrammar(
            f"no token of this model leads on behind {len(said)} tokens of the answer in the shape "
            "that was asked for: it needs characters that the vocabulary does not have"
        )
    return mask


def attach_masked(
    sequence: Sequence,
    proposal: Proposal,
    end_tokens: Collection[int],
    mask: int,
    vocab_size: int,
) -> Proposal:
    """The same for a model that fills in masks, which never answers with a mask.

    A node goes by what is settled anywhere, and by what its rival canvas assumes. A grammar can speak
    only about the first gap: behind it nobody knows what comes before.
    """
    params, purpose, start = sequence.params, proposal.draw.purpose, sequence.prompt_length
    if purpose not in sequence.draws:
        sequence.draws[purpose] = draw_of(params, sequence.seed, sequence.index, purpose)
    proposal.draw = sequence.draws[purpose]
    graph, grammar = proposal.graph, sequence.grammar
    settled = {**dict(enumerate(sequence.tokens)), **sequence.canvas}
    silent = dict.fromkeys((*end_tokens, *params.stop_token_ids), float("-inf"))
    never = {mask: float("-inf")} if mask < vocab_size else {}
    if not (params.has_rules or never or grammar):
        return proposal
    counting = params.presence_penalty or params.frequency_penalty
    penalised = counting or params.repetition_penalty != 1.0
    rules: dict[int, Rules] = {}
    texts: dict[int, dict[int, int]] = {}  # by block: its nodes see the same
    for node in map(int, proposal.wanted):
        position, block = int(graph.positions[node]) + proposal.offset, int(graph.blocks[node])
        if penalised and block not in texts:
            seen = np.flatnonzero(graph.sees[node] & ~np.isin(graph.tokens, (mask, MIXTURE)))
            texts[block] = settled | {int(graph.positions[i]): int(graph.tokens[i]) for i in seen}
        known = texts.get(block, settled)
        added = {**params.logit_bias, **never}
        if counting:
            for token, count in Counter(t for p, t in known.items() if p >= start).items():
                penalty = params.presence_penalty + params.frequency_penalty * count
                added[token] = added.get(token, 0.0) - penalty
        if position - start < params.min_tokens:
            added |= silent
        first = grammar is not None and position == len(sequence.tokens)
        rules[node] = Rules(
            scaled=tuple(sorted(set(known.values()))) if params.repetition_penalty != 1.0 else (),
            scale=params.repetition_penalty,
            added=added,
            allowed=_allowed(grammar if first else None, sequence.tokens[start:], []),
        )
    proposal.rules = rules
    return proposal
