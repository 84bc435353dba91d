"""The metadata of a pass: the fields of the int32 buffer that host and kernels share.

The buffer goes to the GPU in one transfer. It holds, in this order:

    header      HEADER_SIZE words: `HeaderField`, then MAX_MOVES pairs of slots (`HeaderField.MOVES`)
    rows        one line of `rows` words for each `RowField`
    head rows   which rows of the pass reach the LM head, then a `SamplingField` record for each
    items       for each attention window, records of `ItemField`; a record without nodes ends them
    lists       slots of KV blocks that are not found through pages
    pages       the block tables

Offsets are written once, here. The host indexes arrays with these enums; kernels import the same
numbers from `kernel_metadata`, as HEADER_*, ROW_*, ITEM_* and SAMPLING_* constants.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class HeaderField(IntEnum):
    """Words of the header."""

    REPLY = 0
    """Which reply buffer the sampled tokens go to."""
    NUM_MOVES = 1
    """How many KV slots are copied before the pass."""
    NUM_NODES = 2
    """Nodes of a pass that the GPU realigns (`run_ahead.realign`); this and the next five."""
    NUM_ITEMS = 3
    ITEMS_START = 4
    PAGES_START = 5
    MAX_REJECTED = 6
    """By how many positions the pass is moved back at most: the length of the draft before it."""
    CHAIN_LENGTH = 7
    """How long a chain the draft head is asked for; the next six say how it is sampled."""
    CHAIN_TEMPERATURE = 8
    CHAIN_SEED_LOW = 9
    CHAIN_SEED_HIGH = 10
    CHAIN_INDEX = 11
    CHAIN_PURPOSE = 12
    CHAIN_POSITION = 13
    """The position of the first token of the chain."""
    SHIFT = 14
    """How much further on a realigned pass stands than its template was made for."""
    UNUSED = 15
    MOVES = 16
    """The first of MAX_MOVES pairs: source slot, target slot."""


class RowField(IntEnum):
    """Lines of the row table, each with one word for every padded row."""

    TOKEN = 0
    """The input token; from PREVIOUS_TOKEN downwards, a token that the pass before sampled."""
    POSITION = 1
    SLOT = 2
    """Where its KV goes."""


class ItemField(IntEnum):
    """Words of a work item of attention: a run of KV blocks for the queries of some nodes."""

    FIRST_ROW = 0
    NUM_NODES = 1
    """0 ends the list."""
    PAGES = 2
    """Where the pages of its sequence begin in the buffer."""
    BLOCK_LIST = 3
    """Where its list of blocks begins, or PAGED, or SAME_LIMIT."""
    START_BLOCK = 4
    STOP_BLOCK = 5
    TILE_START_BLOCK = 6
    """The blocks of the whole tile, of which the item takes a run."""
    TILE_STOP_BLOCK = 7
    NUM_RUNS = 8
    """How many items share the tile."""
    PARTIALS = 9
    """Where the tile's partial results begin."""
    TILE = 10
    LIMIT = 11
    """The first node sees keys below this position; each further node one more, if PAGED."""
    POSITION = 12
    """Of the first node: sliding windows end there."""
    TILE_NODE = 13
    """Which node of the tile is the item's first."""
    TILE_ROW = 14
    TILE_NODES = 15


class TileField(IntEnum):
    """Columns of a tile on the host, before its blocks are shared out to items."""

    FIRST_ROW = 0
    NUM_NODES = 1
    PAGES = 2
    BLOCK_LIST = 3
    STOP_BLOCK = 4
    START_BLOCK = 5
    LIMIT = 6
    POSITION = 7
    SHARED_STOP = 8
    """The block up to which all nodes of the tile see the same keys."""
    OWN_LISTS = 9
    """Where the lists of the blocks from there on begin, node by node."""


class SamplingField(IntEnum):
    """Words of the record that says how the token of one row is sampled."""

    TEMPERATURE = 0
    TOP_K = 1
    NUM_TOKENS = 2
    """How many tokens are wanted; 0 stands for one."""
    LOG_MIN_P = 3
    SEED_LOW = 4
    SEED_HIGH = 5
    INDEX = 6
    PURPOSE = 7
    POSITION = 8
    FILTERED = 9
    """Whether top-k, top-p or min-p apply."""
    TOP_P_LOW = 10
    """The two halves of a float64."""
    TOP_P_HIGH = 11


MAX_MOVES = 64
"""How many KV slots are copied at the beginning of a pass at most."""
HEADER_SIZE = HeaderField.MOVES + 2 * MAX_MOVES
NUM_ROW_FIELDS = len(RowField)
ITEM_SIZE = len(ItemField)
TILE_SIZE = len(TileField)
SAMPLING_SIZE = len(SamplingField)
ITEM_PLACES = [ItemField.LIMIT, ItemField.POSITION]
"""Fields of an item that move with the sequence."""
PAGED, SAME_LIMIT = -1, -2
"""Instead of a list of blocks: all blocks are found through pages; SAME_LIMIT: and `LIMIT` holds for
all nodes alike."""
PREVIOUS_TOKEN = -2
"""Input tokens -2, -3, ... stand for what rows 0, 1, ... of the pass before sampled."""
BLOCK_KEYS = 128
"""Keys of a block of attention."""
ROW_SIZES = (16, 32, 64, 128)
"""Padded numbers of rows of small passes; larger passes have multiples of the last."""
MAX_HEAD_ROWS = 128
"""How many rows of logits exist at once."""
MAX_CANDIDATES = 16
"""How many tokens of a row are sampled on the GPU at most."""


def row_table(words: Int32Array, rows: int) -> Int32Array:
    """The row table of a pass as [NUM_ROW_FIELDS, rows]: a view."""
    end = HEADER_SIZE + NUM_ROW_FIELDS * rows
    return words[HEADER_SIZE:end].reshape(NUM_ROW_FIELDS, rows)


def item_table(words: Int32Array) -> Int32Array:
    """Work items as [items, ITEM_SIZE]: a view."""
    return words.reshape(-1, ITEM_SIZE)


def num_live(items: Int32Array) -> int:
    """How many items of a window have nodes; they come first."""
    return int(np.count_nonzero(items[:, ItemField.NUM_NODES]))
