"""`Launcher`: starts whole passes, replayed from recordings once they have been seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-not-found,unused-ignore]

from outstride.ops.contract import Span
from outstride.ops.cuda.back import move_back
from outstride.ops.cuda.head import Head, Kind, Rows
from outstride.ops.cuda.layout import SIZES, Layout, Words
from outstride.ops.cuda.moves import Entries
from outstride.ops.cuda.steps import Steps
from outstride.ops.cuda.tiles import Describer
from outstride.ops.cuda.transfer import Recording, Ring

WORDS = 1 << 16
"""Room for the words of a pass, at first."""
RECORDED = 1024
"""Passes of up to so many rows are recorded: of larger ones, handing them over takes no time."""


@dataclass(slots=True)
class Batch:
    """A pass."""

    spans: Sequence[Span]
    windows: tuple[int | None, ...]
    rows: int
    """Padded."""
    mixtures: bool
    steps: Steps | None = None
    layout: Layout | None = None

    def layout_for(self, describe: Describer) -> Layout:
        """The description, made when it is needed."""
        if self.layout is None:
            card = describe.card
            self.steps = Steps.of(self.spans, card.page_size) if self.rows <= SIZES[-1] else None
            if self.steps is not None and len(self.steps) > 1:
                self.layout = self.steps.layout(self.windows, self.rows, card)
            else:
                self.layout = describe(self.spans, self.windows, self.rows)
        return self.layout


@dataclass(frozen=True, slots=True)
class Deferred:
    """A whole pass that waits for what is wanted of it."""

    layers: Callable[[], Rows]
    batch: Batch
    whole: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Back:
    """That a pass is moved back by the card before it begins (see `relay`)."""

    best: torch.Tensor
    drafted: torch.Tensor
    draft: bool


class Launcher:
    """The words of passes, and their recordings."""

    def __init__(
        self, device: torch.device, entries: Entries, page_size: int, *, graphs: bool
    ) -> None:
        self.words = Ring(device, WORDS)
        self.under_way = False
        """Whether a whole pass is being launched, or recorded, at this moment."""
        self.recording: Recording | None = None
        self._device, self._entries, self._page_size = device, entries, page_size
        self._wanted = graphs
        self._state = torch.zeros(2, dtype=torch.int32, device=device)
        self._graphs: dict[Any, Recording] = {}
        self._seen: set[Any] = set()

    def clear(self) -> None:
        """Makes recordings void: buffers or weights are others now."""
        self._drop()
        self._seen.clear()

    def _drop(self) -> None:
        for recording in self._graphs.values():
            recording.void = True
        self._graphs.clear()

    def fit(self, layout: Layout) -> Layout:
        """Makes room for the words of a pass."""
        if len(layout.words) > len(self.words):
            self.words.settle()  # its memory goes to somebody else
            self.words = Ring(self._device, triton.next_power_of_2(len(layout.words)))
            self._drop()
        return layout

    def recorded(self, layout: Layout, whole: tuple[int, int], kind: Kind) -> Recording | None:
        """The recording of a pass all of whose rows are scored, that is launched behind another."""
        if len(layout.words) > len(self.words):
            return None
        return self._graphs.get(_key(layout, whole, layout.rows, kind, False, False, None))

    def start(
        self,
        layout: Layout,
        deferred: Deferred,
        rows: int,
        kind: Kind,
        head: Head,
        *,
        cut: bool = True,
        back: Back | None = None,
    ) -> Recording | None:
        """Starts a whole pass and `rows` rows of its head: replayed, once it has been recorded.

        Returns what was replayed, for the same pass `again`.
        cut: the card has nothing else to do while the pass is handed to it.
        """
        moves = self._entries.enter(layout.words)

        def work(recording: Recording | None = None) -> None:
            words = self.words.words
            self.words.fetch()
            self.under_way, self.recording = True, recording if cut else None
            try:
                if moves:
                    self._entries.launch(words)
                if back is not None:
                    move_back(
                        words, back.best, back.drafted, self._state, layout, self._page_size,
                        draft=back.draft,
                    )  # fmt: skip
                deferred.batch.layout = layout
                left = deferred.layers()
            finally:
                self.under_way, self.recording = False, None
            if rows:
                head.launch(left.low, rows, kind, words, layout.head_at, layout.head_rows)

        self.words.post(layout.words)
        try:
            if not self._wanted or layout.rows > RECORDED:
                work()
                return None
            key = _key(layout, deferred.whole, rows, kind, cut, moves, back)
            if key not in self._seen:  # compiles what is missing
                self._seen.add(key)
                work()
                return None
            if key not in self._graphs:
                self._graphs[key] = Recording(work)
            self._graphs[key].replay()
            return self._graphs[key]
        except BaseException:
            self.words.realign()
            raise

    def again(self, recording: Recording | None, words: Words) -> bool:
        """Replays a pass with other words; recorded, as it has to be now, with moves or without."""
        if recording is None or recording.void or len(words) > len(self.words):
            return False
        self._entries.enter(words)
        self.words.post(words)
        recording.replay()
        return True


def _key(
    layout: Layout,
    whole: tuple[int, int],
    head: int,
    kind: Kind,
    cut: bool,
    moves: bool,
    back: Back | None,
) -> Any:
    """What recorded passes differ in; those that are moved back, in whose chain they read, too."""
    return (
        whole,
        layout.rows,
        layout.tile,
        layout.shared,
        layout.splits,
        layout.programs,
        layout.deep,
        layout.windows,
        head,
        kind,
        cut,
        moves,
        back and (back.draft, back.best.data_ptr(), back.drafted.data_ptr()),
    )
