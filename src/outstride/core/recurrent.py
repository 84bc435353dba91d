"""Recurrent state: what convolutions, gated delta nets and Mamba-2 layers keep of a sequence.

KV can be cut back to any token; a recurrent state cannot. So each sequence has a *state slot* with its
committed state: the state after the tokens of its block table, never after a draft. A pass advances it
through the given tokens, which are certain. Drafted nodes are computed from copies along their paths;
the model remembers their inputs until commit, which replays the accepted path (`StateAdvance`).

A *snapshot* is a copy of the state at a fixed position, in a state slot of its own. Prefix pages carry
snapshots; a sequence that finds a prefix starts at the last one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

Snapshots: TypeAlias = tuple[tuple[int, int], ...]
"""(nodes, slot): after this many nodes of a run, the state is copied to a slot."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state slots of a model with recurrent layers.

    slots: how many states it holds, of sequences and snapshots together.
    interval: a snapshot is taken at each multiple of this many tokens; a multiple of the page size.
    """

    slots: int
    interval: int


@dataclass(slots=True)
class SequenceState:
    """The recurrent state that belongs to a block table.

    slot: its state slot; -1: none yet.
    source: the snapshot that its first pass starts from; -1: none.
    given: how many given nodes of the step under way the state includes already.
    snapshots: snapshots of this step, by position.
    """

    slot: int = -1
    source: int = -1
    given: int = 0
    snapshots: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StatePass:
    """How a pass uses the state of a sequence.

    fresh: nothing is cached, so the state is zero whatever the slot holds.
    given: the leading nodes that advance the state; a later round of a step finds them included.
    """

    slot: int
    given: int
    fresh: bool
    snapshots: Snapshots = ()


@dataclass(frozen=True, slots=True)
class StateAdvance:
    """Commit: the state goes on through accepted nodes of the last pass, in order."""

    slot: int
    nodes: tuple[int, ...]
    snapshots: Snapshots = ()


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A snapshot becomes the state of another sequence."""

    source: int
    target: int


StateUpdate: TypeAlias = StateAdvance | StateCopy
"""What happens to states between passes; updates are made in order."""
