"""From a request's parameters to the rules of each node: they depend on the node's path alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from outstride.core.graph import NodeId
from outstride.core.params import SamplingParams
from outstride.core.proposal import Proposal
from outstride.core.sampling import Draw, Purpose, Rules
from outstride.core.sequence import Sequence

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
        drafted = [int(graph.tokens[i]) for i in graph.path(NodeId(node)) if i >= proposal.given]
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
            allowed=None
            if grammar is None
            else grammar.allowed([*sequence.tokens[start:], *drafted]),
        )
    proposal.rules = rules
    return proposal
