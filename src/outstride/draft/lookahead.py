"""Lookahead: guesses for later positions refine themselves, and what they agree on is drafted."""

from __future__ import annotations

from itertools import islice

from outstride.core.contracts import Demand, Drafter, Guessing, Rounds
from outstride.core.graph import NodeId, TokenGraph, chain
from outstride.core.guess import Guess, PerTenant, Sign
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.registry import method

Rows = tuple[tuple[int, ...], ...]
"""The window: `rows[j][i]` is a guess for the j-th position behind the i-th one ahead."""


class Pool:
    """Runs of tokens that the target wrote somewhere, by their first token, latest last."""

    def __init__(self, most: int, each: int) -> None:
        self._most = most
        self._each = each
        self._runs: dict[int, dict[tuple[int, ...], None]] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, run: tuple[int, ...]) -> None:
        """Remembers a run; the oldest one of its kind, or the oldest kind, makes room for it."""
        found = self._runs.get(run[0])
        if found is None:
            found = self._runs[run[0]] = {}
            if len(self._runs) > self._most:
                del self._runs[next(iter(self._runs))]
        found.pop(run[1:], None)
        found[run[1:]] = None
        if len(found) > self._each:
            del found[next(iter(found))]

    def after(self, token: int, most: int) -> list[tuple[int, ...]]:
        """What may follow a token, latest first."""
        return list(islice(reversed(self._runs.get(token, {})), most))


@method("lookahead", family="jacobi")
class Lookahead(Drafter):
    """Refines a window of guesses in every pass and drafts the runs of tokens that it brought forth.

    The front row of the window is Jacobi iteration: guesses for the next `window` positions, each
    renewed from the ones before it, and accepted where they hold. Behind each of them hangs a column
    of guesses of earlier passes, `level - 2` long, as probes; every column yields a run of `level`
    tokens for the pool, from which up to `branches` runs that begin with the last token are drafted.
    With `level=2` there are no columns: that is Jacobi decoding. `retrieve` puts runs of the text
    itself into the pool and fills the window's open end from it; `recycle` also keeps the runs that
    the target wrote along rejected guesses.

    Paper: Lookahead Decoding (Fu et al., 2024); TR-Jacobi of Make Some Noise (Wang et al., 2024);
      rejection recycling of Jacobi Forcing (Hu et al., 2025); Jacobi decoding (Santilli et al., 2023)
    Exactness: exact
    Needs: nothing
    Cost per step: up to (`window` + `branches`) * (`level` - 1) further nodes
    """

    def __init__(
        self,
        *,
        window: int = 6,
        level: int = 4,
        branches: int = 4,
        retrieve: bool = False,
        recycle: bool = False,
    ) -> None:
        if window < 1 or level < 2 or branches < 1:
            raise ValueError("needs window >= 1, level >= 2 and branches >= 1")
        self.window = window
        self.level = level
        self.branches = branches
        self.retrieve = retrieve
        self.recycle = recycle
        self._pools = PerTenant(lambda: Pool(most=8192, each=4 * branches))
        self._spares = PerTenant(lambda: Pool(most=8192, each=branches))
        """Runs along rejected guesses: drafted where there are no others."""

    def demand(self, view: View) -> Demand:
        if view.limit - view.end <= 1:
            return Demand()
        return Demand(most=(self.window + self.branches) * (self.level - 1), gain=1.0)

    # --- the draft --------------------------------------------------------------------------------

    def guess(self, view: View, room: int) -> Guessing:
        yield from ()
        return self._draft(view, room, room // 2)[0]

    def propose(self, view: View, room: int) -> Rounds:
        yield from ()
        if room <= 0:
            return Guess().proposal(view)
        runs = min(self.branches * (self.level - 1), room // 2)
        guess, places = self._draft(view, room, runs)
        proposal = guess.proposal(view)
        graph, front = proposal.graph, -1
        for i, (first, *column) in enumerate(zip(*self._rows(view), strict=True)):
            if (front, first) not in places:
                break
            front = node = places[front, first]
            start = view.end + i + 1
            column = column[: view.limit - 1 - start]
            while column and (node, column[0]) in places:  # drafted as it is
                node, start, column = places[node, column[0]], start + 1, column[1:]
            if len(graph) + len(column) > proposal.given + room:
                break
            below = chain(column, start, probe=True)
            graph = graph.grow(below, at=NodeId(proposal.given + node))
        proposal.graph = graph
        return proposal

    def _draft(self, view: View, room: int, runs: int) -> tuple[Guess, dict[tuple[int, int], int]]:
        """The pool's runs (`runs` nodes) and the window's front row as a tree, and where all is."""
        guess, deepest = Guess(), view.limit - view.end - 1
        places: dict[tuple[int, int], int] = {}
        for rank, run in enumerate(self._runs(view), start=1):
            parent = -1
            for depth, token in enumerate(run[:deepest]):
                if (parent, token) not in places:
                    if len(guess) >= runs:
                        break
                    sign = Sign("lookahead", (min(rank, 4), min(depth, 3)))
                    chance = 0.5 if depth else 0.5 / rank
                    places[parent, token] = guess.add(token, parent, sign, chance)
                parent = places[parent, token]
        parent, width = -1, min(deepest, -((len(guess) - room) // (self.level - 1)))
        for depth, token in enumerate(self._rows(view)[0][:width]):
            if (parent, token) not in places:
                if len(guess) >= room:
                    break
                sign = Sign("lookahead", (0, min(depth, 3)))
                places[parent, token] = guess.add(token, parent, sign, 0.3)
            parent = places[parent, token]
        return guess, places

    def _runs(self, view: View) -> list[tuple[int, ...]]:
        """What may follow the last token."""
        last, pool = view.tokens[-1], self._pools.of(view.salt)
        found = pool.after(last, self.branches)
        if self.recycle and len(found) < self.branches:
            found += self._spares.of(view.salt).after(last, self.branches - len(found))
        return found

    def _rows(self, view: View) -> Rows:
        """The window; there is none before the first pass."""
        found: Rows | None = view.state
        return found or ((),) * (self.level - 1)

    def _filled(self, view: View, rows: Rows) -> Rows:
        """A window whose open end is filled up: from the pool if asked for, else from anywhere."""
        tokens, filled = view.tokens, [list(row) for row in rows]
        pool = self._pools.of(view.salt)
        while len(filled[0]) < self.window:
            last = filled[0][-1] if filled[0] else tokens[-1]
            runs = pool.after(last, 1) if self.retrieve else []
            column = list(runs[0]) if runs else []
            while len(column) < len(filled):
                place = 7919 * (len(tokens) + len(filled[0])) + 104729 * len(column)
                column.append(tokens[place % len(tokens)])
            for row, token in zip(filled, column, strict=False):
                row.append(token)
        return tuple(map(tuple, filled))

    # --- what the pass says -----------------------------------------------------------------------

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> Rows:
        pool, passed = self._pools.of(view.salt), len(verdict.settled) - 1
        columns = self._renewed(proposal, scores, self._rows(view), pool)[passed:]
        if self.recycle:
            self._keep_rejected(proposal, scores, self._spares.of(view.salt))
        if self.retrieve:
            start = view.end - len(verdict.settled) if view.state else 0
            for end in range(max(start, self.level - 1), view.end):
                pool.add(tuple(view.tokens[end - self.level + 1 : end + 1]))
        rows: Rows = tuple(zip(*columns, strict=True))
        return self._filled(view, rows or ((),) * (self.level - 1))

    def _renewed(
        self, proposal: Proposal, scores: Scores, rows: Rows, pool: Pool
    ) -> list[tuple[int, ...]]:
        """The window's columns one position on; runs that they complete enter the pool."""
        graph, columns = proposal.graph, []
        node = proposal.root
        for column in zip(*rows, strict=True):
            below = _child(graph, node, column[0])
            if below is None:
                break
            node = below
            end: NodeId | None = node
            for token in column[1:]:
                end = None if end is None else _child(graph, end, token)
            if end is not None:
                run = (*column, int(scores.token(end)))
                pool.add(run)
                columns.append(run[1:])
            else:  # there was no room for the column: its first guess is renewed at least
                columns.append((int(scores.token(node)), *column[2:], column[-1]))
        return columns

    def _keep_rejected(self, proposal: Proposal, scores: Scores, pool: Pool) -> None:
        """What the target wrote along guesses that failed may come true a little later."""
        written: dict[int, tuple[int, ...]] = {}
        for node in range(proposal.root, len(proposal.graph)):
            above = written.get(int(proposal.graph.parents[node]), ())
            run = (*above, int(scores.token(NodeId(node))))
            if len(run) >= self.level:
                run = run[-self.level :]
                pool.add(run)
            written[node] = run


def _child(graph: TokenGraph, node: NodeId, token: int) -> NodeId | None:
    """The child of a node with this token, probe or not."""
    for child in graph.children(node):
        if graph.tokens[child] == token:
            return child
    return None
