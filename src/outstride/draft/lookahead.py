"""`lookahead`: Jacobi iteration over a window of later positions yields n-grams to draft."""

from __future__ import annotations

from itertools import islice

from outstride.core.contracts import Demand, Drafter, DraftRounds, Rounds
from outstride.core.draft_tree import AcceptanceKey, DraftTree, PerPrefixKey
from outstride.core.graph import NodeId, TokenGraph, chain
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.registry import method

Rows = tuple[tuple[int, ...], ...]
"""The window: `rows[j][i]` is a guess for the j-th position after the i-th one ahead."""


class NGramPool:
    """Runs of tokens that the target predicted, by their first token, latest last."""

    def __init__(self, capacity: int, per_token: int) -> None:
        self._capacity = capacity
        self._per_token = per_token
        self._runs: dict[int, dict[tuple[int, ...], None]] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, run: tuple[int, ...]) -> None:
        """Adds a run; drops the oldest with the same first token, or the oldest first token."""
        found = self._runs.get(run[0])
        if found is None:
            found = self._runs[run[0]] = {}
            if len(self._runs) > self._capacity:
                del self._runs[next(iter(self._runs))]
        found.pop(run[1:], None)
        found[run[1:]] = None
        if len(found) > self._per_token:
            del found[next(iter(found))]

    def after(self, token: int, limit: int) -> list[tuple[int, ...]]:
        """Runs that may follow a token, latest first."""
        return list(islice(reversed(self._runs.get(token, {})), limit))


@method("lookahead", family="jacobi")
class Lookahead(Drafter):
    """Refines a window of guesses in every pass and drafts the runs of tokens that it yields.

    The front row of the window is Jacobi iteration: guesses for the next `window` positions, each
    renewed from the ones before it, and accepted where they hold. Below each of them is a column of
    guesses of earlier passes, `level - 2` long, as probes; every column yields a run of `level` tokens
    for the pool, from which up to `branches` runs that begin with the last token are drafted. With
    `level=2` there are no columns: that is Jacobi decoding. `retrieve` puts runs of the text itself
    into the pool and fills the window's open end from it; `recycle` also keeps the runs that the
    target predicted along rejected guesses. The decoding of all four papers is here. The models that
    Make Some Noise and Jacobi Forcing train for it are not, nor is the latter's multi-block decoding.

    Paper: Lookahead Decoding (Fu et al., 2024); TR-Jacobi of Make Some Noise (Wang et al., 2024) and
      rejection recycling of Jacobi Forcing (Hu et al., 2025), without their training; Jacobi decoding
      (Santilli et al., 2023)
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
        self._pools = PerPrefixKey(lambda: NGramPool(capacity=8192, per_token=4 * branches))
        self._spares = PerPrefixKey(lambda: NGramPool(capacity=8192, per_token=branches))
        """Runs along rejected guesses: drafted where the pool has too few."""

    def demand(self, view: View) -> Demand:
        if view.limit - view.end <= 1:
            return Demand()
        return Demand(max_nodes=(self.window + self.branches) * (self.level - 1), gain=1.0)

    # --- the draft --------------------------------------------------------------------------------

    def draft_tree(self, view: View, budget: int) -> DraftRounds:
        yield from ()
        return self._draft(view, budget, budget // 2)[0]

    def propose(self, view: View, budget: int) -> Rounds:
        yield from ()
        if budget <= 0:
            return DraftTree().proposal(view)
        runs = min(self.branches * (self.level - 1), budget // 2)
        draft, places = self._draft(view, budget, runs)
        proposal = draft.proposal(view)
        graph, front = proposal.graph, -1
        for i, (first, *column) in enumerate(zip(*self._rows(view), strict=True)):
            if (front, first) not in places:
                break
            front = node = places[front, first]
            start = view.end + i + 1
            column = column[: view.limit - 1 - start]
            while column and (node, column[0]) in places:  # it is in the draft already
                node, start, column = places[node, column[0]], start + 1, column[1:]
            if len(graph) + len(column) > proposal.given + budget:
                break
            below = chain(column, start, probe=True)
            graph = graph.grow(below, at=NodeId(proposal.given + node))
        proposal.graph = graph
        return proposal

    def _draft(
        self, view: View, budget: int, runs: int
    ) -> tuple[DraftTree, dict[tuple[int, int], int]]:
        """The pool's runs (`runs` nodes) and the window's front row as a tree, and the places."""
        draft, max_depth = DraftTree(), view.limit - view.end - 1
        places: dict[tuple[int, int], int] = {}
        for rank, run in enumerate(self._runs(view), start=1):
            parent = -1
            for depth, token in enumerate(run[:max_depth]):
                if (parent, token) not in places:
                    if len(draft) >= runs:
                        break
                    key = AcceptanceKey("lookahead", (min(rank, 4), min(depth, 3)))
                    rate = 0.5 if depth else 0.5 / rank
                    places[parent, token] = draft.add(token, parent, key, rate)
                parent = places[parent, token]
        parent, width = -1, min(max_depth, -((len(draft) - budget) // (self.level - 1)))
        for depth, token in enumerate(self._rows(view)[0][:width]):
            if (parent, token) not in places:
                if len(draft) >= budget:
                    break
                key = AcceptanceKey("lookahead", (0, min(depth, 3)))
                places[parent, token] = draft.add(token, parent, key, 0.3)
            parent = places[parent, token]
        return draft, places

    def _runs(self, view: View) -> list[tuple[int, ...]]:
        """Runs that may follow the last token."""
        last, pool = view.tokens[-1], self._pools.of(view.key)
        found = pool.after(last, self.branches)
        if self.recycle and len(found) < self.branches:
            found += self._spares.of(view.key).after(last, self.branches - len(found))
        return found

    def _rows(self, view: View) -> Rows:
        """The window; it is empty before the first pass."""
        found: Rows | None = view.state
        return found or ((),) * (self.level - 1)

    def _filled(self, view: View, rows: Rows) -> Rows:
        """The window with its open end filled: from the pool with `retrieve`, else from the text."""
        tokens, filled = view.tokens, [list(row) for row in rows]
        pool = self._pools.of(view.key)
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

    # --- after the pass ----------------------------------------------------------------------------

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> Rows:
        pool, passed = self._pools.of(view.key), len(verdict.settled) - 1
        columns = self._renewed(proposal, scores, self._rows(view), pool)[passed:]
        if self.recycle:
            self._keep_rejected(proposal, scores, self._spares.of(view.key))
        if self.retrieve:
            start = view.end - len(verdict.settled) if view.state else 0
            for end in range(max(start, self.level - 1), view.end):
                pool.add(tuple(view.tokens[end - self.level + 1 : end + 1]))
        rows: Rows = tuple(zip(*columns, strict=True))
        return self._filled(view, rows or ((),) * (self.level - 1))

    def _renewed(
        self, proposal: Proposal, scores: Scores, rows: Rows, pool: NGramPool
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
            else:  # the column did not fit: only its first guess is renewed
                columns.append((int(scores.token(node)), *column[2:], column[-1]))
        return columns

    def _keep_rejected(self, proposal: Proposal, scores: Scores, pool: NGramPool) -> None:
        """Adds the runs that the target predicted along rejected guesses: they may fit later."""
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
