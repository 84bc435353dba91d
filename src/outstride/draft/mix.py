"""Several drafters in one graph: what each is good at, judged by how often it was right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from outstride import registry
from outstride.core.contracts import Demand, Drafter, Guessing, Rounds
from outstride.core.guess import Guess, Odds, PerTenant, Sign
from outstride.core.proposal import USUAL, Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.draft.block_drafter import BlockDrafter
from outstride.draft.promises import PROMISES, Promises, affordable, kind_of
from outstride.registry import method

LEAST = 0.01
"""Nodes that are expected to hold less often are not worth a thought."""
SAMPLED = 0.8
"""So much is believed of a trained part's promises where tokens are drawn: there is less to guess."""


@dataclass(slots=True)
class Joined:
    """Guesses of several drafters as one tree, with the chance that each node will be reached."""

    guess: Guess
    claims: list[tuple[Sign, ...]]
    """By node: what each drafter that guessed it went by."""
    children: dict[int, list[int]]
    order: list[int]
    """Nodes, best first: parents always come before their children."""
    gains: list[float]
    """In that order."""

    @classmethod
    def of(cls, guesses: Sequence[Guess], odds: Odds) -> Joined:
        """Merges what is the same; what contradicts a likelier guess is worth what that leaves."""
        if len(guesses) == 1:
            return cls._alone(guesses[0], odds)
        tokens: list[int] = []
        parents: list[int] = []
        chances: list[float] = []
        claims: list[tuple[Sign, ...]] = []
        children: dict[int, list[int]] = {}
        known: dict[tuple[int, int], int] = {}
        for guess in guesses:
            places: list[int] = []
            own = odds.chances(guess.signs, guess.chances)
            for token, parent, sign, chance in zip(
                guess.tokens, guess.parents, guess.signs, own, strict=True
            ):
                above = places[parent] if parent >= 0 else -1
                node = known.get((above, token))
                if node is None:
                    node = known[above, token] = len(tokens)
                    tokens.append(token)
                    parents.append(above)
                    chances.append(chance)
                    claims.append((sign,))
                    children.setdefault(above, []).append(node)
                else:
                    claims[node] += (sign,)
                    chances[node] = 1.0 - (1.0 - chances[node]) * (1.0 - chance)
                places.append(node)
        joined = _named(["+".join([sign.source for sign in signs]) for signs in claims], chances)
        chances = odds.chances(joined, chances)
        for rivals in children.values():
            if len(rivals) > 1:
                _discount(rivals, joined, chances, odds)
        whole = Guess(tokens, parents, joined, chances)
        return cls(whole, claims, children, *_ranked(parents, chances))

    @classmethod
    def _alone(cls, guess: Guess, odds: Odds) -> Joined:
        """One drafter's guess as it is: nothing to merge, nobody contradicts it."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(guess.parents):
            children.setdefault(parent, []).append(node)
        signs = list(map(_unrivalled, guess.signs))
        chances = odds.chances(signs, guess.chances)
        mine = Guess(guess.tokens, guess.parents, signs, chances)
        claims: list[tuple[Sign, ...]] = [(sign,) for sign in guess.signs]
        return cls(mine, claims, children, *_ranked(guess.parents, chances))

    def best(self, count: int) -> Guess:
        """The `count` best nodes as a tree of their own."""
        whole, chosen = self.guess, self.order[:count]
        places = {node: place for place, node in enumerate(chosen)} | {-1: -1}
        return Guess(
            [whole.tokens[node] for node in chosen],
            [places[whole.parents[node]] for node in chosen],
            [whole.signs[node] for node in chosen],
            [whole.chances[node] for node in chosen],
        )

    def learn(self, tokens: Sequence[int], odds: Odds) -> None:
        """Compares with what was said: drafted or not, every guess on the way was right or wrong."""
        node = -1
        for said in tokens:
            reached = None
            for child in self.children.get(node, ()):
                held = self.guess.tokens[child] == said
                odds.learn(self.guess.signs[child], held)
                for sign in self.claims[child]:
                    if sign is not self.guess.signs[child]:
                        odds.learn(sign, held)
                if held:
                    reached = child
            if reached is None:
                return
            node = reached


def _ranked(parents: list[int], chances: list[float]) -> tuple[list[int], list[float]]:
    """Nodes by how likely they are reached, as far as worth a thought, and how likely that is."""
    gains: list[float] = []
    for parent, chance in zip(parents, chances, strict=True):
        gains.append(chance * gains[parent] if parent >= 0 else chance)
    order = [node for node, gain in enumerate(gains) if gain >= LEAST]
    order.sort(key=gains.__getitem__, reverse=True)
    return order, [gains[node] for node in order]


def _about(chance: float) -> int:
    """A chance to the nearest step of a coarse scale, fine where it is small.

    Estimates that rest on other estimates are taken as if these had nothing to do with each other.
    They are corrected by how often such estimates held, which takes few kinds of them.
    """
    return round(12.0 * math.sqrt(max(chance, 0.0)))


@cache
def _unrivalled(sign: Sign) -> Sign:
    """What a node goes by where nobody else guessed anything."""
    return Sign(sign.source, (-3, *sign.key))


def _named(sources: list[str], chances: list[float]) -> list[Sign]:
    """What nodes go by whose chances are estimates that rest on others."""
    return list(map(_sign_of, sources, map(_about, chances)))


@cache
def _sign_of(source: str, about: int) -> Sign:
    """What a node goes by that some drafters guessed together: made once, needed at each step."""
    return Sign(source, (-2, about))


def _discount(rivals: list[int], signs: list[Sign], chances: list[float], odds: Odds) -> None:
    """Drafters that contradict each other cannot all be right: the likelier one comes first."""
    rivals = sorted(rivals, key=lambda node: -chances[node])
    taken: dict[str, float] = {}
    total = 0.0
    for node in rivals:
        sign = signs[node]
        others = total - taken.get(sign.source, 0.0)
        if others > 0.05:
            left = chances[node] * max(1.0 - others, 0.0)
            signs[node] = Sign(sign.source, (-1, _about(left)))
            chances[node] = odds.chance(signs[node], left)
        taken[sign.source] = taken.get(sign.source, 0.0) + chances[node]
        total += chances[node]


@dataclass(slots=True)
class State:
    """One sequence: its drafters' states, how often they were right, and the guess at hand."""

    parts: list[Any]
    odds: Odds
    promises: Promises
    guesses: list[Guess]
    """What was looked up."""
    kind: int = 0
    """How much that promises."""
    joined: Joined | None = None
    end: int = -1
    """Where the guess at hand begins."""
    idle: int = 0
    """How many steps without a draft there were since one last brought something."""
    last: int = 8
    """How many nodes were drafted when it was last worth it."""
    resting: bool = False
    """Whether this step was taken without a look at anything."""
    swift: bool = False
    """Whether this step drafts the chain of a part that is swift, and nothing else."""
    chains: int = 0
    """How many such steps there were one behind the other."""
    brought: int = 0
    """How many tokens all of them brought."""
    vain: int = 0
    """How many runs of them were given up, one behind the other."""


@method("mix", family="joined")
class Mix(Drafter):
    """Joins several drafters in one tree, best expected gain first, what is the same merged.

    How often each kind of guess holds is tracked, for the sequence and for everybody (of a tenant),
    whether it was drafted or not. A trained part, if there is one for the model (`from` names its
    folder, or `none`), is asked as well.

    Paper: none of its own; trees from several sources as in Sequoia (Chen et al., 2024) and
      PPD (Chen et al., 2024), here with odds that are tracked instead of trained
    Exactness: exact
    Needs: nothing
    Cost per step: `nodes` further nodes at the most, and what the drafters cost
    """

    trimmable = True  # `propose` adds nothing but labels
    part = "block-drafter"

    def __init__(self, *, parts: str = "suffix+recycle", nodes: int = 32, from_: str = "") -> None:
        if nodes < 1:
            raise ValueError("needs nodes >= 1")
        self.nodes = nodes
        self._drafters = [self._part(name) for name in parts.split("+")]
        self._trained = BlockDrafter(from_=from_, nodes=2 * nodes) if from_ else None
        self.grafts = self._trained.grafts if self._trained else ()
        wants = Wants(best=max(drafter.wants.best for drafter in self._drafters))
        self.wants = USUAL if wants == USUAL else wants
        self._odds = PerTenant(lambda: (Odds(weight=12.0), Promises()))
        self._sampled = PerTenant(lambda: (Odds(weight=12.0), Promises(share=SAMPLED)))

    @staticmethod
    def _part(name: str) -> Drafter:
        drafter = registry.build(name.strip()).drafter
        if drafter.models or drafter.grafts or type(drafter).propose is not Drafter.propose:
            raise ValueError(f"{name!r} cannot be joined: it does more than look up a guess")
        return drafter

    # --- what there is to draft ---------------------------------------------------------------------

    def _made(self, view: View, most: int) -> Joined | None:
        """What was looked up, anew if the text has grown."""
        state: State | None = view.state
        if state is None or view.pending() != 1 or view.limit - view.end <= 1:
            return None
        if state.end != view.end:
            state.guesses = []
            for drafter, its in zip(self._drafters, state.parts, strict=True):
                if found := _run(drafter.guess(view.with_state(its), most)):
                    state.guesses.append(found)
            state.joined, state.end = Joined.of(state.guesses, state.odds), view.end
            state.kind = kind_of(state.joined.gains)
        return state.joined

    def demand(self, view: View) -> Demand:
        joined = self._made(view, self.nodes)
        if joined is None:
            return Demand()
        gains = joined.gains[: self.nodes]
        if self._trained is not None:
            state: State = view.state
            promised = state.promises.asked.gains[: self.nodes]
            return Demand(most=self.nodes, gain=sum(promised))
        return Demand(most=len(gains), gain=sum(gains))

    def guess(self, view: View, room: int) -> Guessing:
        joined = self._made(view, self.nodes)
        if joined is None:
            return Guess()
        if self._trained is not None and view.ask:
            state: State = view.state
            most = max(len(view.prices), len(PROMISES)) if view.prices else 2 * self.nodes
            found = yield from self._trained.guess(view, most)
            state.joined = joined = Joined.of([*state.guesses, found], state.odds)
            state.promises.learn(state.kind, joined.gains)
            if view.prices:
                believed = state.promises.asked.believed(joined.gains)
                room = min(room, affordable(believed, view.prices))
        return joined.best(room)

    def propose(self, view: View, room: int) -> Rounds:
        proposal = yield from super().propose(view, room)
        joined: Joined | None = view.state.joined if view.state else None
        if joined is not None:
            proposal.labels = {
                proposal.given + i: joined.guess.signs[node].source
                for i, node in enumerate(joined.order[: len(proposal.graph) - proposal.given])
            }
        return proposal

    # --- what came of it ----------------------------------------------------------------------------

    def _begin(self, view: View) -> State:
        """Of a sequence that resembles others of its tenant."""
        known = self._odds if view.params.temperature == 0.0 else self._sampled
        odds, promises = known.of(view.salt)
        return State([None] * len(self._drafters), Odds(odds), Promises(promises), [])

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> State:
        state: State = view.state or self._begin(view)
        drafted, asked = len(proposal.graph) - proposal.given, view.ask and bool(self.grafts)
        if state.joined is not None:
            if drafted:
                promised = sum(state.joined.gains[:drafted])
                state.promises.settle(state.kind, promised, len(verdict.settled) - 1, asked)
            state.joined.learn(view.tokens[state.end :], state.odds)
            state.joined = None
        if not asked:
            state.promises.asked.fade()
        if not drafted:
            state.idle += 1
        elif len(verdict.settled) > 1:
            state.idle = 0
        state.last = drafted or state.last
        state.parts = [
            drafter.observe(view.with_state(its), proposal, scores, verdict)
            for drafter, its in zip(self._drafters, state.parts, strict=True)
        ]
        return state


def _run(guessing: Guessing) -> Guess:
    """A guess that needs no passes."""
    try:
        next(guessing)
    except StopIteration as stop:
        found: Guess = stop.value
        return found
    raise RuntimeError("a joined drafter asked for a pass")
