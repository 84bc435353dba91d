"""The metadata of passes that run ahead, and whether they are recognised: no GPU is needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from outstride.core.contracts import PassInput
from outstride.core.graph import IntArray, block, chain
from outstride.core.proposal import Proposal
from outstride.core.sequence import BlockTable
from outstride.ops.contract import Span
from outstride.ops.cuda.batch_metadata import BatchMetadata
from outstride.ops.cuda.metadata import ITEM_PLACES, HeaderField, RowField, item_table, row_table
from outstride.ops.cuda.run_ahead.decode_steps import DecodeSteps
from outstride.ops.cuda.run_ahead.draft_ahead import TemplateBuilder
from tests.ops.test_cuda_metadata import GEOMETRY, PAGE, POOL, read, right, span


def steps(source: np.random.Generator, count: int) -> tuple[DecodeSteps, list[Span]]:
    spans = [span(source, "step", int(source.integers(1, 300)), row) for row in range(count)]
    made = DecodeSteps.of(spans, PAGE)
    assert made is not None
    return made, spans


def test_decode_steps_have_the_same_metadata() -> None:
    made, spans = steps(np.random.default_rng(14), 12)
    assert read(made.metadata((None,), 16, GEOMETRY), 0, None) == right(spans, None)


@pytest.mark.parametrize("rows", [list(range(12)), [3, 1, 7]])
def test_the_following_pass_from_a_template(rows: list[int]) -> None:
    """Metadata taken over from the pass before is the same as what is worked out anew."""
    made, _ = steps(np.random.default_rng(15), 12)
    made.metadata((None,), 16, GEOMETRY)
    kept = 0
    for _ in range(40):
        following = made.following(rows, GEOMETRY, 4096)
        assert following is not None
        kept += following.template is not None
        moved = following.metadata((None,), 16, GEOMETRY)
        anew = replace(following, template=None).metadata((None,), 16, GEOMETRY)
        assert np.array_equal(moved.words, anew.words)
        assert (moved.programs, moved.load) == (anew.programs, anew.load)
        made, rows = replace(following, staged={}), list(range(len(rows)))
        if kept > 30:
            break
    assert kept > 20


def as_asked(made: DecodeSteps, spans: list[Span], sampled: IntArray) -> list[PassInput]:
    """What an engine asks for after a step, once all sequences have their new pages."""
    asked: list[PassInput] = []
    for one, token in zip(spans, sampled.tolist(), strict=True):
        table = one.table
        table.positions.append(len(table))
        if len(table) >= len(table.pages) * PAGE:
            table.pages.append(POOL - len(asked) - 1)
        at = len(table)
        slot = table.pages[at // PAGE] * PAGE + at % PAGE
        asked.append(PassInput(Proposal(chain([token], at), 1), table, np.asarray([slot])))
    return asked


@pytest.mark.parametrize("change", ["", "token", "renew", "position", "slot", "joined"])
def test_the_step_token_says_whether_it_is_the_next_step(change: str) -> None:
    """The same sequences one step on, some of them, in any order; and nothing else."""
    made, spans = steps(np.random.default_rng(16), 6)
    following = made.following(list(range(6)), GEOMETRY, 4096)
    assert following is not None
    sampled = np.arange(6)
    asked = as_asked(made, spans, sampled)
    if change == "token":
        asked[2].proposal.graph.tokens[0] += 1
    elif change == "renew":
        asked[2].table.renew()
    elif change == "position":
        asked[2].table.positions.append(len(asked[2].table))
    elif change == "slot":
        asked[2].slots[0] += 1
    elif change == "joined":
        (other,) = as_asked(made, steps(np.random.default_rng(17), 1)[1], sampled[:1])
        asked[2] = other
    for rows in ([0, 1, 2, 3, 4, 5], [5, 2, 0], [2]):
        found = following.match([asked[row] for row in rows], sampled, PAGE)
        assert found == (None if change else rows)
    assert following.match([asked[0], asked[4]], sampled, PAGE) == [0, 4]
    assert following.match([asked[0], asked[0]], sampled, PAGE) is None


def test_kv_in_staging_pages_is_copied_to_the_pages_that_came() -> None:
    one = span(np.random.default_rng(18), "step", 47, 0)
    one.table.pages = one.table.pages[:3]
    made = DecodeSteps.of([one], PAGE)
    assert made is not None
    following = made.following([0], GEOMETRY, 4096)
    assert following is not None
    staging = GEOMETRY.staging_page * PAGE
    assert following.staged == {0: staging}
    asked = as_asked(made, [one], np.asarray([3]))
    assert following.match(asked, np.asarray([3]), PAGE) == [0]
    assert following.settle([0], asked, PAGE) == [(staging, (POOL - 1) * PAGE)]
    assert following.pages[3] == POOL - 1
    assert following.slots.tolist() == [(POOL - 1) * PAGE]


def templated(builder: TemplateBuilder, context: int, pages: list[int]) -> BatchMetadata:
    """Eight nodes after `context` tokens, or up to seven fewer."""
    template = builder.template(builder.key(context, 7, 8), context, 16)
    assert template is not None
    return replace(template.made, words=template.words(context, pages, 0))


def realigned(metadata: BatchMetadata, accepted: int) -> None:
    """What the GPU does to a pass that assumed all of a chain to be accepted."""
    words, table = metadata.words, row_table(metadata.words, metadata.rows)
    nodes = int(words[HeaderField.NUM_NODES])
    move = accepted - int(words[HeaderField.MAX_REJECTED]) + int(words[HeaderField.SHIFT])
    positions = table[RowField.POSITION, :nodes]
    positions += move
    pages = words[int(words[HeaderField.PAGES_START]) :]
    table[RowField.SLOT, :nodes] = pages[positions // PAGE] * PAGE + positions % PAGE
    items = item_table(words[int(words[HeaderField.ITEMS_START]) : metadata.lists_at])
    items[: int(words[HeaderField.NUM_ITEMS]), ITEM_PLACES] += move


@pytest.mark.parametrize("size", [None, 40, 512])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_realigned_pass_is_the_pass_at_that_place(bidirectional: bool, size: int | None) -> None:
    """Over hundreds of contexts, so across blocks and pages, and from the same templates."""
    source = np.random.default_rng(7)
    builder = TemplateBuilder((size,), GEOMETRY, bidirectional=bidirectional)
    rejected, nodes = 7, 8
    pages = [int(page) for page in source.permutation(POOL)[:60]]
    context = 100
    while context < 700:
        made = templated(builder, context + rejected, pages)
        accepted = int(source.integers(rejected + 1))
        realigned(made, accepted)
        at = context + accepted
        places = np.arange(at, at + nodes)
        slots = np.asarray(pages)[places // PAGE] * PAGE + places % PAGE
        graph = block([5] * nodes, at) if bidirectional else chain([5] * nodes, at)
        there = Span(graph, slots, BlockTable(pages, list(range(at))), 0, 0)
        assert read(made, 0, size) == right([there], size)
        table = row_table(made.words, 16)
        assert table[RowField.POSITION, :nodes].tolist() == places.tolist()
        assert table[RowField.SLOT, :nodes].tolist() == slots.tolist()
        context += accepted + 1


def test_a_pass_realigned_too_far_would_be_noticed() -> None:
    builder, pages = TemplateBuilder((None,), GEOMETRY, bidirectional=False), list(range(40))
    made = templated(builder, 307, pages)
    realigned(made, 2)
    there = Span(
        chain([5] * 8, 303), np.arange(303, 311), BlockTable(pages, list(range(303))), 0, 0
    )
    assert read(made, 0, None) != right([there], None)
