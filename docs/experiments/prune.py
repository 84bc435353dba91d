"""How well a model's first layers tell good branches of a draft from bad ones, by layer.

    .venv/bin/python docs/experiments/prune.py --prompts question.jsonl --limit 12

A drafter's whole trees pass the layers in pieces. After each piece the head says what it would put
behind every node, and afterwards it is known which nodes the target kept. So one run shows what
`prune` would have cut off at each layer with each `keep`, how much of what was kept it would have
lost, and how many tokens a pass would have brought. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np

from outstride import LLM, SamplingParams, registry
from outstride.bench.prompts import built_in, read_prompts, spread
from outstride.core.contracts import Demand, Drafter, Method, Rounds
from outstride.core.graph import NodeId
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View


@dataclass(slots=True)
class Look:
    """One step: where each node hangs, which nodes were kept, and their early ranks by layer."""

    parents: list[int]
    ranks: dict[int, list[int]]
    kept: set[int]

    def alive(self, layer: int, keep: int) -> set[int]:
        """The drafted nodes that `prune` would have let through."""
        found = {0}
        for node in range(1, len(self.parents)):
            if self.parents[node] in found and self.ranks[layer][node] < keep:
                found.add(node)
        return found - {0}


class Looking(Drafter):
    """Another drafter's trees, looked at after some layers and never cut."""

    def __init__(self, of: Drafter, layers: list[int], max_candidates: int) -> None:
        self.of, self.layers, self.max_candidates = of, layers, max_candidates
        self.wants, self.looks = of.wants, list[Look]()

    def demand(self, view: View) -> Demand:
        return self.of.demand(view)

    def propose(self, view: View, room: int) -> Rounds:
        whole = yield from self.of.propose(view, room)
        graph = whole.graph
        if whole.given > 1 or len(graph) == 1:
            return whole
        parents, tokens, ranks = graph.parents.tolist(), graph.tokens.tolist(), {}
        hidden = None
        for low, high in pairwise([0, *self.layers]):
            wants = Wants(
                nodes=tuple(sorted(set(parents[1:]))), best=self.max_candidates, hidden=(high,)
            )
            early = yield replace(whole, layers=(low, high), hidden=hidden, wants=wants)
            hidden, ranks[high] = early.hidden[high], [0] * len(graph)
            for node in range(1, len(graph)):
                candidates = [int(token) for token in early.candidates(NodeId(parents[node]))]
                found = tokens[node] in candidates
                ranks[high][node] = candidates.index(tokens[node]) if found else self.max_candidates
        self.looks.append(Look(parents, ranks, set()))
        return replace(whole, layers=(self.layers[-1], view.layers), hidden=hidden)

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> Any:
        if proposal.layers is not None:
            self.looks[-1].kept = {int(node) for node in verdict.keep[1:]}
        return self.of.observe(view, proposal, scores, verdict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--of", default="recycle", help="whose trees (default recycle)")
    parser.add_argument("--prompts", help="as for bench decode")
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--layers", default="8,15,20,25", help="where to look (default 8,15,20,25)")
    parser.add_argument("--keep", default="1,4,8,16,64", help="candidates (default 1,4,8,16,64)")
    args = parser.parse_args()
    layers, keeps = (list(map(int, text.split(","))) for text in (args.layers, args.keep))
    llm = LLM(args.model)
    registry.discover()
    prompts = spread(read_prompts(args.prompts) if args.prompts else built_in(), args.limit)
    whole = registry.build(args.of)
    drafter = Looking(whole.drafter, layers, max(keeps))
    method = Method("looking", drafter, whole.acceptor, whole.exactness)
    params = SamplingParams(max_tokens=args.length, temperature=args.temperature, seed=1)
    for prompt in prompts:
        sequence = llm.engine.submit(llm.encode(prompt.text, chat=True), params, method)
        while llm.engine.busy:
            llm.engine.step()
        if sequence.error is not None:
            raise sequence.error
    looks, rows = drafter.looks, []
    drafted = sum(len(look.parents) - 1 for look in looks)
    kept = sum(len(look.kept) for look in looks)
    print(f"{len(looks)} trees, {drafted / len(looks):.1f} nodes, ", end="")
    print(f"{1 + kept / len(looks):.3f} tokens per pass if nothing is cut off")
    print("layer  keep  cut off   lost  tokens per pass")
    for layer, keep in product(layers, keeps):
        alive = [look.alive(layer, keep) for look in looks]
        saved = sum(len(look.kept & found) for look, found in zip(looks, alive, strict=True))
        cut, lost = 1 - sum(map(len, alive)) / drafted, 1 - saved / max(kept, 1)
        rows.append([layer, keep, *np.round([cut, lost, 1 + saved / len(looks)], 4).tolist()])
        print("{:>5}  {:>4}  {:>7.1%}  {:>5.1%}  {:>15.3f}".format(*rows[-1]), flush=True)
    found = {"model": args.model, "of": args.of, "trees": len(looks), "nodes": drafted}
    print(json.dumps({**found, "kept": kept, "layers": llm.model.layers, "rows": rows}))


if __name__ == "__main__":
    main()
